"""What ``generate`` shows: the text as it comes, and the summary."""

from __future__ import annotations

from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from ..decoding import Emitted, SpeculativeDecoder, Stats
from .console import out

ACCEPTED = "green"
# Beyond these, hardly any round has drafts.
POSITIONS = 10


class TextStream:
    """Prints tokens as text, accepted drafts in colour where the terminal has any."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._from = self._shown = 0

    def put(self, emitted: Emitted) -> None:
        """Print what the token adds; one that ends within a character waits for the rest of it."""
        self._ids.append(emitted.token)
        # Some tokenizers drop a leading space, so the new text is the difference of two decoded windows.
        before = self._decode(self._ids[self._from : self._shown])
        now = self._decode(self._ids[self._from :])
        if not now.endswith("\ufffd"):
            self._print(now[len(before) :], emitted.drafted)
            self._from, self._shown = self._shown, len(self._ids)

    def finish(self) -> None:
        """Print what is still waiting and end the line."""
        waiting = self._decode(self._ids[self._from :])[len(self._decode(self._ids[self._from : self._shown])) :]
        self._print(waiting + "\n", False)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _print(self, text: str, drafted: bool) -> None:
        out.print(Text(text, style=ACCEPTED if drafted else ""), end="")


class Plain(NamedTuple):
    """Tokens and time of decoding without drafts."""

    tokens: list[int]
    seconds: float


def summary(decoder: SpeculativeDecoder, seconds: float, plain: Plain | None) -> Table:
    """Return the table of what was generated and how fast, with plain decoding beside it."""
    stats, generation = decoder.stats, decoder.generation
    table = Table(box=None, pad_edge=False, show_header=plain is not None)
    for column in ("", "draftproof", *(["plain decoding"] if plain else [])):
        table.add_column(column, justify="left")
    accepted = f"{stats.accepted} of {stats.drafted} ({stats.acceptance:.0%})"
    rows: list[tuple[str, str | Text, str]] = [
        ("tokens", str(stats.tokens), str(len(plain.tokens)) if plain else ""),
        ("target forwards", str(stats.target_forwards), str(len(plain.tokens)) if plain else ""),
        ("tokens per forward", f"{stats.tokens_per_forward:.2f}", "1.00"),
        ("drafts accepted", Text(accepted, style=ACCEPTED), ""),
        ("tokens/s", rate(stats.tokens, seconds), rate(len(plain.tokens), plain.seconds) if plain else ""),
    ]
    if generation is not None and decoder.rule != "greedy":
        rows.append(("seed", str(generation.seed), ""))
    for row in rows:
        table.add_row(*row[: 3 if plain else 2])
    return table


def by_position(stats: Stats) -> str:
    """Return the line that says how often a draft was accepted at each position, of the drafts that reached it."""
    counts = list(zip(stats.accepted_by_position, stats.drafted_by_position, strict=True))
    shares = [f"{accepted / drafted:.0%}" for accepted, drafted in counts[:POSITIONS]]
    if len(counts) > POSITIONS:
        shares.append(f"... (of {len(counts)})")
    return f"acceptance by position: {' '.join(shares) or 'nothing was drafted'}"


def rate(tokens: int, seconds: float) -> str:
    """Return tokens a second as text."""
    return f"{tokens / seconds:.1f}" if seconds else "-"
