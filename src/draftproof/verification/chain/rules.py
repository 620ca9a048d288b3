"""The four rules over a batch of chains: which drafts are accepted, and the token that follows them.

Portable batched text in the pinned arithmetic. A rule walks the positions; at each it works on the sequences that are
still undecided. ``reference.py`` is the meaning of the same rules, one request at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from ...numerics.draws import inverse_cdf
from ...numerics.masses import probabilities, reciprocal, residual_masses
from ...sampling.rows import Law, ids_of
from ...types import DEAD, Array, Status
from .rows import Draws

Choose = Callable[[int, Array], tuple[Array, Array]]
"""Gives ``(token, status)`` of the target's own choice at position i for some sequences of the batch."""


class Source(Protocol):
    """Gives the law of position i for some sequences of the batch."""

    def law(self, i: int, rows: Array) -> Law: ...


class Chains(NamedTuple):
    """The drafts of a batch: ``tokens`` int64 [b, K], of which the first ``length`` [b] count."""

    tokens: Array
    length: Array


class Outcome:
    """What is decided so far, per sequence: accepted drafts, the token after them, status bits."""

    def __init__(self, xp: Array, chains: Chains) -> None:
        self.accepted = xp.full(chains.length.shape, 0, "int64", like=chains.length)
        self.next_token = xp.full(chains.length.shape, -1, "int64", like=chains.length)
        self.status = xp.full(chains.length.shape, 0, "int32", like=chains.length)

    def flag(self, rows: Array, bits: Array) -> None:
        self.status[rows] = self.status[rows] | bits


def token_rule(xp: Array, chains: Chains, target: Source, draft: Source | None, draws: Draws) -> Outcome:
    """Accept draft i iff ``u_i * q(x_i) < p(x_i)``; at the first rejection draw from ``norm(max(p - q, 0))``."""
    outcome = Outcome(xp, chains)
    rows = xp.arange(chains.length.shape[0], like=chains.length)
    for i in range(chains.tokens.shape[1] + 1):
        ended = chains.length[rows] == i
        _emit(xp, outcome, i, rows[ended], target, draws)
        rows = rows[~ended]
        if rows.shape[0] == 0:
            break
        p, q = target.law(i, rows), draft.law(i, rows) if draft else None
        alive = _alive(xp, outcome, rows, p, q)
        token = chains.tokens[rows, i]
        p_token, q_token = probability_of(xp, p, token), _draft_probability(xp, q, token, p)
        outcome.flag(rows, _off_support(xp, q_token) * alive)
        accept = (draws.accept(i, rows) * q_token < p_token)[:, 0]
        rejected = alive & ~accept
        _correct(xp, outcome, rows[rejected], (_at(p, rejected), _at(q, rejected)), token[rejected], 1.0, i, draws)
        rows = rows[alive & accept]
        outcome.accepted[rows] = i + 1
    return outcome


def block_rule(xp: Array, chains: Chains, target: Source, draft: Source | None, draws: Draws) -> Outcome:
    """Block verification (Sun et al., ICLR 2025): the longest prefix that passes its joint test is accepted."""
    outcome = Outcome(xp, chains)
    batch, drafted = chains.tokens.shape
    scale = xp.full((batch, drafted + 1), 1.0, "float32", like=chains.length)  # P_i
    rows = xp.arange(batch, like=chains.length)[chains.length > 0]
    for i in range(drafted):
        if rows.shape[0] == 0:
            break
        p, q = target.law(i, rows), draft.law(i, rows) if draft else None
        alive = _alive(xp, outcome, rows, p, q)
        token = chains.tokens[rows, i]
        here = scale[rows, i : i + 1]
        if i > 0:
            residual = _residual_sum(xp, p, q, token, here)
            _accept_prefix(outcome, i, rows, _stop_probability(xp, residual, here), draws)
        p_token, q_token = probability_of(xp, p, token), _draft_probability(xp, q, token, p)
        outcome.flag(rows, _off_support(xp, q_token) * alive)
        joint = here * p_token
        share = joint / xp.where(q_token > 0.0, q_token, 1.0)
        scale[rows, i + 1] = xp.where(joint == 0.0, 0.0, xp.where(joint >= q_token, 1.0, share))[:, 0]
        rows = rows[alive]
        last = chains.length[rows] == i + 1
        _accept_prefix(outcome, i + 1, rows[last], scale[rows[last], i + 1 : i + 2], draws)
        rows = rows[~last]
    _conclude_block(xp, outcome, chains, target, draft, scale, draws)
    return outcome


def follow_rule(xp: Array, chains: Chains, choose: Choose) -> Outcome:
    """Emit the target's own choice at each position, and go on while the draft agrees: rules match and greedy."""
    outcome = Outcome(xp, chains)
    rows = xp.arange(chains.length.shape[0], like=chains.length)
    for i in range(chains.tokens.shape[1] + 1):
        if rows.shape[0] == 0:
            break
        choice, status = choose(i, rows)
        outcome.flag(rows, status)
        outcome.next_token[rows] = xp.where(status == 0, choice, -1)
        if i == chains.tokens.shape[1]:
            break
        rows = rows[(status == 0) & (chains.length[rows] > i) & (chains.tokens[rows, i] == choice)]
        outcome.accepted[rows] = i + 1
    return outcome


def probability_of(xp: Array, law: Law, token: Array) -> Array:
    """Return ``p(token)`` of each row, ``[r, 1]``; ids outside the law have probability 0."""
    return probabilities(xp, _mass_of(xp, law, token), law.total)


def _mass_of(xp: Array, law: Law, token: Array) -> Array:
    token = token[:, None]
    if law.ids is not None:
        return xp.sum(xp.where(law.ids == token, law.mass, 0) * (token < law.vocab))
    inside = token < law.vocab
    return xp.where(inside, xp.take(law.mass, xp.where(inside, token, 0)), 0)


def _draft_probability(xp: Array, q: Law | None, token: Array, p: Law) -> Array:
    return xp.full((token.shape[0], 1), 1.0, "float32", like=p.mass) if q is None else probability_of(xp, q, token)


def _off_support(xp: Array, q_token: Array) -> Array:
    return xp.int32(q_token == 0.0)[:, 0] * int(Status.OFF_SUPPORT)


def _alive(xp: Array, outcome: Outcome, rows: Array, p: Law, q: Law | None) -> Array:
    """Flag the sequences whose rows are bad; return which are good."""
    status = p.status if q is None else p.status | q.status
    outcome.flag(rows, status)
    return xp.broadcast(status == 0, rows.shape)


def _at(law: Law | None, rows: Array) -> Law | None:
    """Rows of a law; a law of one row that serves the whole batch stays as it is."""
    if law is None or law.mass.shape[0] != rows.shape[0]:
        return law
    ids = law.ids if law.ids is None or law.ids.shape[0] == 1 else law.ids[rows]
    return Law(ids, law.mass[rows], law.total[rows], law.status[rows], law.vocab)


def _emit(xp: Array, outcome: Outcome, i: int, rows: Array, target: Source, draws: Draws) -> None:
    """Draw the bonus of the sequences whose drafts ended, all accepted, before position i."""
    if rows.shape[0] == 0:
        return
    p = target.law(i, rows)
    outcome.flag(rows, p.status)
    drawn = ids_of(xp, p.ids, inverse_cdf(xp, draws.emit(i, rows), p.mass))
    outcome.next_token[rows] = xp.where(p.status == 0, drawn, -1)


def _correct(
    xp: Array,
    outcome: Outcome,
    rows: Array,
    laws: tuple[Law | None, Law | None],
    token: Array,
    scale: Array | float,
    i: int,
    draws: Draws,
) -> None:
    """Draw the correction at position i from the residual law, or from the target where the residual has no mass."""
    p, q = laws
    if rows.shape[0] == 0 or p is None:
        return
    residual = _residual(xp, p, q, token, scale)
    empty = xp.sum(residual) == 0
    mass = xp.where(empty, p.mass, residual) if xp.any(empty) else residual
    outcome.flag(rows, xp.int32(empty)[:, 0] * int(Status.RESIDUAL_FALLBACK))
    outcome.next_token[rows] = ids_of(xp, p.ids, inverse_cdf(xp, draws.emit(i, rows), mass))


def _residual(xp: Array, p: Law, q: Law | None, token: Array, scale: Array | float) -> Array:
    """Residual masses on the target's candidates, ``[r or 1, C]``."""
    if q is None:
        ids = xp.arange(p.vocab, like=p.mass)[None, :] if p.ids is None else p.ids
        return xp.where(ids == token[:, None], 0, p.mass)
    q_mass = _mass_on(xp, q, p)
    return residual_masses(xp, scale, probabilities(xp, p.mass, p.total), probabilities(xp, q_mass, q.total))


def _mass_on(xp: Array, q: Law, p: Law) -> Array:
    """The draft's masses at the target's candidates; 0 where the draft's vocabulary ends."""
    width = max(p.vocab, q.vocab) + 1
    if p.ids is None and q.ids is None and p.vocab <= q.vocab:
        return q.mass[:, : p.vocab]
    dense = xp.full((q.mass.shape[0], width), 0, "int64", like=q.mass)
    if q.ids is None:
        dense[:, : q.vocab] = q.mass
    else:
        row, slot = xp.nonzero(q.ids < q.vocab)
        dense[row, q.ids[row, slot]] = q.mass[row, slot]
    if p.ids is None:
        return dense[:, : p.vocab]
    return xp.take(dense, p.ids)


def _residual_sum(xp: Array, p: Law, q: Law | None, token: Array, scale: Array) -> Array:
    """``S_i``: the probability left to the residual after P_i, float32 ``[r, 1]``."""
    if q is None:
        rest = xp.float32(p.total - _mass_of(xp, p, token)) * reciprocal(xp, p.total)
        return scale * rest
    return xp.float32(xp.sum(_residual(xp, p, q, token, scale))) * 2.0**-61


def _stop_probability(xp: Array, residual: Array, scale: Array) -> Array:
    """``h_i = S_i / (S_i + 1 - P_i)``, 1 for 0/0."""
    whole = residual + (1.0 - scale)
    some = whole > 0.0
    return xp.where(some, residual / xp.where(some, whole, 1.0), 1.0)


def _accept_prefix(outcome: Outcome, i: int, rows: Array, chance: Array, draws: Draws) -> None:
    """Accept the first i drafts where ``u_i`` falls below the chance ``[r, 1]``; later prefixes override."""
    passed = rows[(draws.accept(i - 1, rows) < chance)[:, 0]]
    outcome.accepted[passed] = i


def _conclude_block(
    xp: Array, outcome: Outcome, chains: Chains, target: Source, draft: Source | None, scale: Array, draws: Draws
) -> None:
    """Draw each sequence's next token at the position where its accepted prefix ends."""
    good = (outcome.status & DEAD) == 0
    for i in range(chains.tokens.shape[1] + 1):
        here = good & (outcome.accepted == i)
        _emit(xp, outcome, i, xp.nonzero(here & (chains.length == i))[0], target, draws)
        rows = xp.nonzero(here & (chains.length > i))[0]
        if rows.shape[0] > 0:
            laws = target.law(i, rows), draft.law(i, rows) if draft else None
            _correct(xp, outcome, rows, laws, chains.tokens[rows, i], scale[rows, i : i + 1], i, draws)
