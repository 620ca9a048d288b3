"""The standings of ``compare`` in Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .contest import OWN, PLAIN
from .standings import Speed, Standing

# Of the accepted shares by position.
_POSITIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)


def markdown(settings: dict[str, Any], results: list[Standing], found: list[Speed]) -> str:
    """Return the settings, a table of all classes, one of all prompts and the acceptance by position."""
    parts = [", ".join(f"{name} {value}" for name, value in settings.items() if value is not None)]
    parts += [_classes(results), _prompts(found), _positions(results)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _classes(results: list[Standing]) -> str:
    rows = []
    for s in results:
        rivals = [r.speed for r in results if r.kind == s.kind and r.arm not in (OWN, PLAIN)]
        ahead = f"{s.speed / max(rivals):.2f}" if s.arm == OWN and rivals else ""
        drafts = [f"{s.acceptance:.0%}", s.drafted - s.accepted] if s.drafted else ["", ""]
        numbers = [f"{s.tokens_per_second:.1f}", f"{s.speed:.2f}", ahead, f"{s.worst:.2f}", s.slow]
        rows.append([s.kind, s.arm, *numbers, f"{s.overhead:.1f}", f"{s.tokens_per_forward:.2f}", *drafts])
    head = ["class", "", "tokens/s", "x plain", "x best lookup", "slowest prompt", "prompts below 0.95"]
    return _table([*head, "ms a forward beside the model", "tokens a forward", "accepted", "wasted"], rows)


def _prompts(found: list[Speed]) -> str:
    kinds, rows = [speed.kind for speed in found], []
    for own in sorted((speed for speed in found if speed.arm == OWN), key=lambda s: (kinds.index(s.kind), s.prompt)):
        rivals = [s for s in found if s.prompt == own.prompt and s.arm not in (OWN, PLAIN)]
        best = max(rivals, key=lambda s: s.speed, default=None)
        against = [best.arm, f"{best.speed:.2f}", f"{own.speed / best.speed:.2f}"] if best else [""] * 3
        rows.append([own.kind, own.prompt, f"{own.speed:.2f}", f"{own.low:.2f} to {own.high:.2f}", *against])
    return _table(["class", "prompt", "x plain", "90 % interval", "best lookup", "x plain", "x best lookup"], rows)


def _positions(results: list[Standing]) -> str:
    rows = [
        [s.kind, *(f"{s.by_position[at - 1]:.0%}" if at <= len(s.by_position) else "" for at in _POSITIONS)]
        for s in results
        if s.by_position
    ]
    return _table(["accepted at position", *_POSITIONS], rows) if rows else ""


def _table(head: list[Any], rows: list[list[Any]]) -> str:
    def line(cells: Iterable[Any]) -> str:
        return f"| {' | '.join(map(str, cells))} |"

    return "\n".join([line(head), line("---" for _ in head), *map(line, rows)])
