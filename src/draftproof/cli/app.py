"""The sub-commands in one application."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from .._native import set_level
from .backends import backends
from .check import check
from .compare import compare
from .console import readable_errors
from .generate import generate

app = typer.Typer(
    name="draftproof",
    help="Exact sampling and verification of speculative drafts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(compare)
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
    level: Annotated[
        str | None,
        typer.Option(help="Instruction-set level of the C++ core, of those that backends lists. Default: the best."),
    ] = None,
) -> None:
    """Exact sampling and verification of speculative drafts."""
    if level is not None:
        with readable_errors():
            set_level(level)
