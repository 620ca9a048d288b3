"""What the runs of ``compare`` come to: by prompt, by class, as a table."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from statistics import geometric_mean, median

import numpy as np
from rich.table import Table

from .contest import OWN, PLAIN, Run

EVERY = "all"
SLOW = 0.95


@dataclass(frozen=True)
class Speed:
    """How many times as fast as plain decoding a contestant was on a prompt, in medians of seconds a token.

    ``low`` and ``high`` enclose 90 % of what resampled repetitions give.
    """

    kind: str
    prompt: int
    arm: str
    speed: float
    low: float
    high: float


@dataclass(frozen=True)
class Standing:
    """A contestant on a class of prompts: geometric mean and minimum of its speeds, and sums over all runs.

    ``slow`` prompts have an interval that lies below 0.95. ``overhead`` has the milliseconds a forward spent outside
    the model, ``by_position`` the share accepted at each position of a draft, as far as draftproof counted it.
    """

    kind: str
    arm: str
    prompts: int
    tokens_per_second: float
    speed: float
    worst: float
    slow: int
    overhead: float
    by_position: list[float]
    tokens_per_forward: float
    drafted: int
    accepted: int
    same: int | None

    @property
    def acceptance(self) -> float:
        """Share of the drafted tokens that was accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0


def speeds(runs: list[Run]) -> list[Speed]:
    """Compare every contestant's runs of a prompt with those of plain decoding."""
    costs: dict[tuple[str, int, str], list[float]] = {}
    for run in runs:
        costs.setdefault((run.kind, run.prompt, run.arm), []).append(run.seconds / run.tokens)
    found = []
    for (kind, prompt, arm), own in costs.items():
        plain = costs[kind, prompt, PLAIN]
        rng = np.random.default_rng(0)
        drawn = [np.array(times)[rng.integers(len(times), size=(2000, len(times)))] for times in (plain, own)]
        ratios = np.median(drawn[0], axis=1) / np.median(drawn[1], axis=1)
        low, high = (1.0, 1.0) if arm == PLAIN else np.quantile(ratios, [0.05, 0.95]).tolist()
        found.append(Speed(kind, prompt, arm, median(plain) / median(own), low, high))
    return found


def standings(runs: list[Run]) -> list[Standing]:
    """Return a standing for every class and contestant; with several classes, one over all of them too."""
    kinds, arms = ({getattr(run, name): None for run in runs} for name in ("kind", "arm"))
    found, groups = speeds(runs), [(kind, {kind}) for kind in kinds]
    if len(kinds) > 1:
        groups.append((EVERY, set(kinds)))
    standings = []
    for name, members in groups:
        for arm in sorted(arms, key=_order):
            chosen = [run for run in runs if run.kind in members and run.arm == arm]
            ratios = [speed for speed in found if speed.kind in members and speed.arm == arm]
            standings.append(_standing(name, arm, chosen, ratios))
    return standings


def _order(arm: str) -> tuple[bool, bool, str]:
    return arm != PLAIN, arm == OWN, arm.rjust(20)


def _standing(kind: str, arm: str, runs: list[Run], ratios: list[Speed]) -> Standing:
    tokens, forwards = sum(run.tokens for run in runs), sum(run.forwards for run in runs)
    firsts = [run.same for run in runs if run.repetition == 0 and run.same is not None]
    return Standing(
        kind,
        arm,
        prompts=len(ratios),
        tokens_per_second=tokens / sum(run.seconds for run in runs),
        speed=geometric_mean([ratio.speed for ratio in ratios]),
        worst=min(ratio.speed for ratio in ratios),
        slow=sum(ratio.high < SLOW for ratio in ratios),
        overhead=1e3 * sum(run.seconds - run.inside for run in runs) / forwards,
        by_position=_by_position(runs),
        tokens_per_forward=tokens / forwards,
        drafted=sum(run.drafted for run in runs),
        accepted=sum(run.accepted for run in runs),
        same=sum(firsts) if firsts else None,
    )


def _by_position(runs: list[Run]) -> list[float]:
    counted = [run.stats for run in runs if run.stats is not None]
    drafted, accepted = (
        [sum(column) for column in zip_longest(*lists, fillvalue=0)]
        for lists in ([s.drafted_by_position for s in counted], [s.accepted_by_position for s in counted])
    )
    return [round(a / d, 3) for a, d in zip(accepted, drafted, strict=True)]


def table(results: list[Standing]) -> Table:
    """Return the table that ``compare`` prints."""
    table = Table(box=None, pad_edge=False)
    for i, column in enumerate(["", "", "tokens/s", "x plain", "worst", "ms/fwd", "tokens/fwd", "accepted", "wasted"]):
        table.add_column(column, justify="right" if i > 1 else "left", no_wrap=True)
    shown = ""
    for s in results:
        drafts = [f"{s.acceptance:.0%}", str(s.drafted - s.accepted)] if s.drafted else ["-", "-"]
        speeds = [f"{s.tokens_per_second:.1f}", f"{s.speed:.2f}", f"{s.worst:.2f}"]
        forwards = [f"{s.overhead:.1f}", f"{s.tokens_per_forward:.2f}"]
        table.add_row("" if s.kind == shown else s.kind, s.arm, *speeds, *forwards, *drafts)
        shown = s.kind
    return table


def same_tokens(results: list[Standing]) -> str | None:
    """Return the line that says on how many prompts tokens were those of plain decoding; None if they were sampled."""
    last = [s for s in results if s.kind == results[-1].kind and s.arm != PLAIN]
    if last[0].same is None:
        return None
    return "same tokens as plain decoding: " + ", ".join(f"{s.arm} {s.same} of {s.prompts}" for s in last)
