"""The sub-commands in one application."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from .backends import backends
from .check import check
from .generate import generate

app = typer.Typer(
    name="draftproof",
    help="Exact sampling and verification of speculative drafts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(check)
app.command()(backends)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"draftproof {__version__}")
        raise typer.Exit


@app.callback()
def options(
    _version_wanted: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Exact sampling and verification of speculative drafts."""
