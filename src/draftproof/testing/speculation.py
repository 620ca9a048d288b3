"""Small models, and the round of drafting and verification around a rule.

A ``System`` is everything that must be right for speculation to be lossless, one part a field; ``mutants`` replaces the
parts one at a time.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ..rng import uniforms
from ..rng.streams import row_seeds
from ..rng.uniforms import Choose, Masses
from ..sampling import reference as sampling
from ..verification.chain import reference as chain

Tokens = tuple[int, ...]

MODES = ("generic", "zeros", "equal", "half equal", "disjoint", "one-hot draft", "one-hot target", "near")


@dataclass(frozen=True)
class Model:
    """A target and a draft model over a tiny vocabulary: integer masses after every prefix, the same for a seed.

    ``mode`` (one of ``MODES``) says how the two relate. ``point_mass`` drafts are arbitrary tokens without a law;
    ``ragged`` drafts stop early, on a decision that does not see the token it prevents.

    Examples
    --------
    >>> model = Model(vocab=3, drafted=2, mode="equal", seed=5)
    >>> model.target((0, 2)) == model.draft((0, 2))
    True
    """

    vocab: int
    drafted: int
    mode: str = "generic"
    seed: int = 0
    point_mass: bool = False
    ragged: bool = False
    eos: frozenset[int] = frozenset()
    top_k: int | None = None
    top_p: Fraction | None = None

    def target(self, prefix: Tokens) -> tuple[int, ...]:
        """Masses of the target after a prefix."""
        return self._masses(prefix)[0]

    def draft(self, prefix: Tokens) -> tuple[int, ...]:
        """Masses of the draft after a prefix."""
        return self._masses(prefix)[1]

    def guess(self, prefix: Tokens) -> int:
        """The point-mass draft after a prefix."""
        return random.Random(f"guess {self.seed} {prefix}").randrange(self.vocab)

    def stops(self, prefix: Tokens) -> bool:
        """Whether the draft ends before this token."""
        return self.ragged and random.Random(f"stop {self.seed} {prefix}").random() < 0.3

    def _masses(self, prefix: Tokens) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return _masses(self.vocab, self.mode, f"{self.seed} {prefix}")


@functools.lru_cache(maxsize=1 << 16)
def _masses(vocab: int, mode: str, seed: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    rng = random.Random(seed)

    def draw(least: int, most: int = 6, ids: Iterable[int] | None = None) -> tuple[int, ...]:
        ids = range(vocab) if ids is None else ids
        row = [rng.randint(least, most) if x in ids else 0 for x in range(vocab)]
        return tuple(row) if any(row) else draw(least, most, ids)

    hot = rng.randrange(vocab)
    one_hot = tuple(int(x == hot) for x in range(vocab))
    p, q = (draw(0), draw(0)) if mode == "zeros" else (draw(1), draw(1))
    if mode == "equal" or (mode == "half equal" and rng.random() < 0.5):
        q = p
    elif mode == "disjoint":
        cut = rng.randint(1, vocab - 1)
        p, q = draw(0, 6, range(cut)), draw(0, 6, range(cut, vocab))
    elif mode == "one-hot draft":
        q = one_hot
    elif mode == "one-hot target":
        p = one_hot
    elif mode == "near":
        p = draw(5, 9)
        q = tuple(m + rng.choice([0, 0, 1]) for m in p)
    return p, q


def propose(model: Model, law: Callable[[Tokens], Masses], prefix: Tokens, choose: Choose) -> list[int]:
    """Draft up to ``model.drafted`` tokens, padded with -1."""
    tokens: list[int] = []
    while len(tokens) < model.drafted and not model.stops(context := prefix + tuple(tokens)):
        x = model.guess(context) if model.point_mass else choose.race(law(context), draw=("draft", len(tokens)))
        tokens.append(x)
    return tokens + [-1] * (model.drafted - len(tokens))


def warp(model: Model, masses: Masses) -> Masses:
    """Apply the model's filters to a row of masses."""
    if model.top_k is None and model.top_p is None:
        return masses
    ids = sampling.kept(masses, masses, masses, model.top_k, model.top_p)
    return [m if x in ids else 0 for x, m in enumerate(masses)]


@dataclass(frozen=True)
class System:
    """The parts of speculation; the defaults are the library's own.

    Examples
    --------
    >>> from draftproof.testing import check_law, models
    >>> check_law(System(rule=chain.block), models(4))
    """

    rule: chain.Rule = chain.token
    propose: Callable[[Model, Callable[[Tokens], Masses], Tokens, Choose], list[int]] = propose
    drafts_of: Callable[..., Any] = chain.drafts_of
    verify_one: Callable[..., chain.Round] = chain.verify_one
    law: Callable[[Masses], Masses] = chain.law
    warp_target: Callable[[Model, Masses], Masses] = warp
    warp_draft: Callable[[Model, Masses], Masses] = warp
    counter: Callable[..., Any] = uniforms.counter
    row_seeds: Callable[[int, int], int] = row_seeds
    kept: Callable[..., list[int]] = sampling.kept
    interpreter: Callable[..., Choose] = uniforms.Uniforms


class _Named:
    """A ``Choose`` whose draws are named by the counters that a round at ``offset`` reads."""

    def __init__(self, choose: Choose, system: System, offset: int, seed: int = 0) -> None:
        self._choose = choose
        self._name: Callable[[Any], Any] = lambda draw: (seed, *system.counter(draw, offset))

    def bernoulli(self, probability: Any, *, draw: Any) -> bool:
        return self._choose.bernoulli(probability, draw=self._name(draw))

    def categorical(self, masses: Masses, *, draw: Any) -> int:
        return self._choose.categorical(masses, draw=self._name(draw))

    def race(self, masses: Masses, *, draw: Any) -> int:
        return self._choose.race(masses, draw=self._name(draw))


def play_round(system: System, model: Model, prefix: Tokens, choose: Choose, seed: int = 0) -> Tokens:
    """Draft from the model after a prefix, verify, and return what is emitted."""
    named = _Named(choose, system, len(prefix), seed)
    tokens = system.propose(model, lambda context: warp(model, model.draft(context)), prefix, named)

    def rows(masses: Callable[[Tokens], Masses], warped: Callable[[Model, Masses], Masses]) -> chain.Laws:
        return chain.LazyLaws(lambda i: system.law(warped(model, masses(prefix + tuple(tokens[:i])))))

    draft = None if model.point_mass else rows(model.draft, system.warp_draft)
    drafts, _ = system.drafts_of(tokens, model.drafted, model.vocab, model.eos)
    outcome = system.verify_one(system.rule, rows(model.target, system.warp_target), draft, drafts, model.eos, named)
    return tuple(outcome.emitted)


def play(system: System, model: Model, length: int, choose: Choose, seed: int = 0) -> Tokens:
    """Play rounds until ``length`` tokens or an eos."""
    out: Tokens = ()
    while len(out) < length and not ended(model, out):
        out += play_round(system, model, out, choose, seed)
    return out[:length]


def ended(model: Model, tokens: Tokens) -> bool:
    """Whether a text has come to its eos."""
    return bool(tokens) and tokens[-1] in model.eos
