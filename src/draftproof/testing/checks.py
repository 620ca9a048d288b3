"""What a lossless system passes: exact laws, streams without reuse, the boundaries of the filters.

Every check raises AssertionError and says what it failed on. Those that take a system only are what ``MUTANTS`` name.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any

from ..rng.uniforms import Choose, Masses
from ..verification.chain import reference as chain
from . import grid
from .enumerate_law import enumerate_law
from .speculation import MODES, Model, System, Tokens, ended, play, play_round, warp

Law = dict[Tokens, Fraction]


def extend(law: Law, model: Model, length: int, *, greedy: bool = False) -> Law:
    """Continue every sequence of a law by plain target sampling, or by its argmax, to ``length`` tokens or an eos."""
    result: Law = {}
    pending = list(law.items())
    while pending:
        tokens, weight = pending.pop()
        if len(tokens) >= length or ended(model, tokens):
            result[tokens] = result.get(tokens, Fraction(0)) + weight
            continue
        p = chain.law(warp(model, model.target(tokens)))
        if greedy:
            p = chain.point_masses([chain.argmax(p)])[0]
        pending += [((*tokens, x), weight * p_x) for x, p_x in enumerate(p) if p_x]
    return result


def models(count: int, *, seed: int = 0, vocab: int = 3, drafted: int = 2, **features: Any) -> Iterator[Model]:
    """Yield models of all modes in turn; ``features`` are fields of ``Model``.

    Examples
    --------
    >>> [model.mode for model in models(3)]
    ['generic', 'zeros', 'equal']
    """
    for i in range(count):
        yield Model(vocab, drafted, MODES[i % len(MODES)], seed + i, **features)


def check_law(system: System, cases: Iterable[Model], *, to_end: bool = False, shared: bool = False) -> None:
    """Check that speculation emits the target's law: draft, verify, then plain target sampling.

    Texts are compared up to ``drafted + 1`` tokens or an eos.

    Parameters
    ----------
    system : System
        What to check; ``System(rule=...)`` for a rule of your own.
    cases : iterable of Model
        The models to check it on.
    to_end : bool
        True plays round after round instead of sampling plainly after the first.
    shared : bool
        False also forbids that a random number serves twice; True measures what that does to the law.

    Raises
    ------
    AssertionError
        With the total variation and the model. ``ReusedDraw`` where a random number serves twice.

    Exactness
    ---------
    All outcomes of all choices, on Fractions, compared with ``==``: exhaustive for each model.

    Examples
    --------
    >>> check_law(System(rule=chain.block), models(8, vocab=4))
    """
    greedy = system.rule is chain.greedy
    for model in cases:
        length = model.drafted + 1
        expected = extend({(): Fraction(1)}, model, length, greedy=greedy)
        if to_end:
            emitted = enumerate_law(functools.partial(play, system, model, length), shared=shared)
        else:
            emitted = enumerate_law(functools.partial(play_round, system, model, ()), shared=shared)
        actual = extend(emitted, model, length, greedy=greedy)
        if actual != expected:
            raise AssertionError(f"the law is off by {float(total_variation(actual, expected)):.3g} on {model}")


def total_variation(a: Law, b: Law) -> Fraction:
    """Return half the sum of absolute differences of two laws."""
    return sum((abs(a.get(x, Fraction(0)) - b.get(x, Fraction(0))) for x in a.keys() | b.keys()), Fraction(0)) / 2


def check_batch(system: System, model: Model, *, rows: int = 2) -> None:
    """Check that the rows of a batch with one scalar seed share no random number, each row playing one round.

    Raises
    ------
    ReusedDraw
        If they do.

    Examples
    --------
    >>> check_batch(System(), Model(vocab=2, drafted=1), rows=2)
    """

    def program(choose: Choose) -> tuple[Tokens, ...]:
        return tuple(play_round(system, model, (), choose, system.row_seeds(0, b)) for b in range(rows))

    enumerate_law(program)


def check_kept(system: System) -> None:
    """Check the boundaries of the filters on rows whose kept sets are known.

    Raises
    ------
    AssertionError
        With the row, the filters and both kept sets.

    Examples
    --------
    >>> check_kept(System())
    """
    tenths = [Fraction(x, 10) for x in (5, 3, 2)]
    # What float32 logits make of log .5, log .3 and log .2: the two largest may fall short of .8 by a rounding.
    short = [tenths[0], tenths[1] - Fraction(1, 1 << 23), tenths[2] + Fraction(1, 1 << 23)]
    expected: Sequence[tuple[list[int], Masses, dict[str, Any]]] = [
        ([0, 1], tenths, {"top_p": Fraction(4, 5)}),
        ([0, 1], short, {"top_p": Fraction(4, 5)}),
        ([0], tenths, {"top_p": Fraction(1, 2)}),
        ([0], tenths, {"top_p": Fraction(0)}),
        ([1, 0, 3], [2, 4, 1, 2], {"top_k": 2}),
        ([0, 1], [4, 3, 2, 1], {"top_k": 3, "top_p": Fraction(7, 9)}),
        ([0, 1], [8, 4, 3, 3], {"min_p": Fraction(1, 2)}),
        ([1, 0, 2], [1, 2, 1], {"top_p": Fraction(1), "top_k": 0}),
    ]
    for ids, masses, filters in expected:
        actual = system.kept(masses, masses, masses, **filters)
        if actual != ids:
            raise AssertionError(f"{filters} keep {actual} of {list(map(str, masses))}, expected {ids}")


# --- the checks of the mutants ----------------------------------------------------------------------------------------


def sampled_law(system: System) -> None:
    """The emitted law is the target's."""
    check_law(system, models(16))


def point_mass_law(system: System) -> None:
    """The emitted law is the target's when drafts have no law."""
    check_law(system, models(16, point_mass=True))


def ragged_law(system: System) -> None:
    """The emitted law is the target's when drafts stop early."""
    check_law(system, models(16, ragged=True))


def eos_law(system: System) -> None:
    """The emitted law is the target's, and nothing follows an eos."""
    check_law(system, models(16, eos=frozenset([1])))


def filtered_law(system: System) -> None:
    """The emitted law is the filtered target's."""
    check_law(system, models(16, vocab=4, top_k=2))
    check_law(system, models(16, vocab=4, top_p=Fraction(1, 2)))


def streams(system: System) -> None:
    """Rounds on end emit the target's law, also where random numbers are shared; and none is."""
    check_law(system, models(8, vocab=3, drafted=1), to_end=True, shared=True)
    check_law(system, models(8, vocab=2), to_end=True, shared=True)
    check_law(system, models(8, vocab=2), to_end=True)


def batch(system: System) -> None:
    """No random number serves two rows of a batch."""
    check_batch(system, Model(vocab=2, drafted=1))


def on_grid(system: System) -> None:
    """All drafts, on all points of a grid of uniforms, come out as by the exact rule."""
    grid.check_grid(grid.batched(system.rule, system.interpreter), rules=[system.rule.__name__], shapes=grid.SMALL)


def kept(system: System) -> None:
    """The filters keep what they must."""
    check_kept(system)
