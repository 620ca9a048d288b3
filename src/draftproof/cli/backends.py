"""``draftproof backends``: what runs here."""

from __future__ import annotations

from rich.table import Table

from .. import _dispatch
from .._native import core, levels
from .console import out


def backends() -> None:
    """List every operation and backend: available, or below the table the reason why it is not."""
    listing = _dispatch.backends()
    table = Table(box=None, pad_edge=False)
    for column in ("operation", *next(iter(listing.values()))):
        table.add_column(column)
    for operation, row in listing.items():
        table.add_row(operation, *(state if state == "available" else "-" for state in row.values()))
    out.print(table)
    reasons = {f"{name}: {state}" for row in listing.values() for name, state in row.items() if state != "available"}
    for reason in sorted(reasons):
        out.print(reason)
    if levels():
        named = (f"{name} (in use)" if name == core.level() else name for name in levels())
        out.print(f"instruction-set levels of the C++ core: {', '.join(named)}")
