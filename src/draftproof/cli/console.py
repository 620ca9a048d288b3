"""Where the command line writes, and how it fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich.console import Console
from rich.text import Text

from ..errors import BackendError, DtypeError, ShapeError, ValueRangeError

# What is in brackets, as in draftproof[triton], is text like any other.
out = Console(highlight=False, soft_wrap=True, markup=False)
err = Console(highlight=False, soft_wrap=True, markup=False, stderr=True)


def note(message: str) -> None:
    """Print one line that is no error."""
    err.print(Text(f"note: {message}", style="yellow"))


def fail(message: str) -> NoReturn:
    """Print one message and leave with exit code 2."""
    err.print(Text(f"error: {message}", style="red"))
    raise typer.Exit(2)


@contextmanager
def readable_errors() -> Iterator[None]:
    """Turn errors of the library, the file system and missing packages into one message; bugs keep their traceback."""
    try:
        yield
    except (ShapeError, DtypeError, ValueRangeError, BackendError, OSError, ImportError) as error:
        fail(str(error))


def wait_passively() -> None:
    """Make torch's threads sleep, not spin, while they wait for each other; call it before torch is imported.

    On a busy machine of two cores, spinning made forwards of nine tokens eight times slower.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
