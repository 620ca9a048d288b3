"""The ``draftproof`` command: generate text, compare ways to, check this installation, list the backends."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def main() -> None:
    """Run the command line; its packages come with the extra ``cli``."""
    missing = [package for package in ("typer", "rich") if find_spec(package) is None]
    if missing:
        sys.exit(
            f"draftproof: error: the command line needs typer and rich; missing: {', '.join(missing)}; "
            "run: python -m pip install 'draftproof[cli]'"
        )
    from .app import app

    app()
