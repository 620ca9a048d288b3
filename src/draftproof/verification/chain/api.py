"""The documented verification functions: check, resolve, call, wrap the result."""

from __future__ import annotations

from typing import Any

from ... import _checks
from ..._dispatch import entry
from ...errors import ShapeError, ValueRangeError
from ...sampling.api import call, filters
from ...types import Array, Filters, VerifyResult


def verify(
    target_logits: Array,
    draft_logits: Array | None,
    draft_tokens: Array,
    *,
    rule: str = "token",
    temperature: Any = 1.0,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    repetition_penalty: Any = None,
    prev_tokens: Array | None = None,
    mask: Array | None = None,
    draft_temperature: Any = None,
    draft_top_k: Any = None,
    draft_top_p: Any = None,
    draft_min_p: Any = None,
    draft_repetition_penalty: Any = None,
    draft_mask: Array | None = None,
    num_draft_tokens: Any = None,
    eos: Any = None,
    seed: Any,
    offset: Any = 0,
    check: bool | None = None,
    backend: str = "auto",
) -> VerifyResult:
    """Verify drafted tokens against the target's logits, so that what is emitted has the target's law.

    Parameters
    ----------
    target_logits : float [B, K+1, V]
        Row i is the target after the first i drafts; row K is for the bonus token.
    draft_logits : float [B, K, Vd] or None
        Raw logits of the laws the drafts were drawn from; None for deterministic drafts (argmax, n-gram): a point mass.
        **The drafts must have been drawn from exactly the law that these and the ``draft_*`` parameters describe.**
        Vd may differ from V. Rules match and greedy do not read them.
    draft_tokens : ids [B, K]
        Padded with -1. The first id below 0 or >= max(V, Vd), or index ``num_draft_tokens``, ends the draft: the token
        there is drawn from the target row, as a bonus.
    rule : "token", "block", "match" or "greedy"
        ``token``: rejection sampling. ``block``: block verification, more tokens under the same law. ``match``: the
        target's own race at each position, compared with the draft; the output is bitwise that of ``sample`` at
        offset + i. ``greedy``: the argmax at each position.
    temperature, top_k, top_p, min_p, repetition_penalty, prev_tokens, seed, check, backend
        As in ``sample``. The penalty at position i also sees the drafts before it.
    mask : bool [B, K+1, V] or int32 [B, K+1, ceil(V/32)], optional
        As in ``sample``, a row per position.
    draft_temperature, draft_top_k, draft_top_p, draft_min_p, draft_repetition_penalty, draft_mask
        The draft's own settings where they differ; None: as the target's. ``draft_mask`` is ``[B, K, Vd]`` or packed.
    num_draft_tokens : int or [B], optional
        Drafts that count in each row; K by default.
    eos : int, [E] or [B, E] padded with -1, optional
        End-of-sequence ids. The draft is cut after its first; if that is accepted, emission ends with it, and
        ``next_token`` is the bonus after it, not emitted.
    offset : int or [B]
        Absolute position of the round's first emitted token, below 2**63 - K.

    Returns
    -------
    VerifyResult
        ``num_accepted`` int64 [B], ``next_token`` int64 [B], ``tokens`` int64 [B, K+1] padded with -1, ``num_emitted``
        int64 [B], ``eos_hit`` bool [B], ``status`` int32 [B]. ``.packed()`` is int32 [B, 3].

    Raises
    ------
    ShapeError, DtypeError, ValueRangeError, BackendError

    Notes
    -----
    token: Leviathan et al. (2023), Chen et al. (2023). block: Sun et al., "Block verification accelerates speculative
    decoding" (ICLR 2025).

    **Exactness.** token, block and match emit the target's filtered law, greedy its argmax; proved by enumeration on
    fractions, with the rounding of the pinned arithmetic on top: given the masses, total variation of a round's first
    token by analysis of the rounding at most 5e-7 for token and (8K+6) * 2**-24 for block. Rows that the rule does
    not need never matter. The same bits on every backend.

    Examples
    --------
    >>> import numpy as np, draftproof
    >>> target = np.zeros((1, 3, 4), dtype=np.float32)
    >>> target[0, [0, 1, 2], [2, 0, 1]] = 9.0
    >>> result = draftproof.verify(target, None, np.array([[2, 0]]), rule="greedy", seed=0)
    >>> result.num_accepted, result.tokens
    (array([2]), array([[2, 0, 1]]))
    """
    own = (temperature, top_k, top_p, min_p, repetition_penalty)
    differing = (draft_temperature, draft_top_k, draft_top_p, draft_min_p, draft_repetition_penalty)
    given = (prev_tokens, mask, draft_mask, num_draft_tokens, eos, seed, offset)
    rows = (target_logits, draft_logits, draft_tokens)
    plain = entry("verify", target_logits, backend)
    result = plain and plain(*rows, rule, *own, *differing, *given, check)
    if result is None:
        draft = Filters(*(mine if value is None else value for mine, value in zip(own, differing, strict=True)))
        result = call("verify", _verify_arguments(*rows, rule, Filters(*own), draft, *given), check, backend)
    return VerifyResult(*result)


def verify_probs(
    target_probs: Array,
    draft_probs: Array | None,
    draft_tokens: Array,
    *,
    rule: str = "token",
    uniform_accept: Array | None = None,
    uniform_sample: Array | None = None,
    seed: Any = None,
    offset: Any = 0,
    num_draft_tokens: Any = None,
    eos: Any = None,
    check: bool | None = None,
    backend: str = "auto",
) -> VerifyResult:
    """Verify drafted tokens against probabilities that the caller has filtered, alike on both sides.

    Parameters
    ----------
    target_probs : float [B, K+1, V]
        Non-negative; every row is normalised by its own sum.
    draft_probs : float [B, K, Vd] or None
        The laws the drafts were drawn from; None for deterministic drafts.
    draft_tokens, num_draft_tokens, eos, offset, check, backend
        As in ``verify``.
    rule : "token", "block", "match" or "greedy"
        As in ``verify``; match draws by inverse CDF, the token that ``sample_probs`` draws at offset + i.
    uniform_accept : float [B, K], optional
        Uniforms in [0, 1] that accept or reject draft i (token, block).
    uniform_sample : float [B, K+1], optional
        Uniforms in [0, 1]: entry i draws the token that follows i accepted drafts.
    seed : optional
        Gives whichever of the two the rule reads and the caller does not.

    Returns
    -------
    VerifyResult

    Raises
    ------
    ShapeError, DtypeError, ValueRangeError, BackendError

    Notes
    -----
    **Exactness.** As ``verify``; given uniforms are rounded to float32, 1.0 becomes 1 - 2**-24. A token of probability
    0 in the target is never emitted.

    Examples
    --------
    >>> import numpy as np, draftproof
    >>> p = np.full((1, 2, 2), 0.5, dtype=np.float32)
    >>> q = np.array([[[1.0, 0.0]]], dtype=np.float32)
    >>> u = np.array([[0.4]], dtype=np.float32)
    >>> draftproof.verify_probs(p, q, np.array([[0]]), uniform_accept=u, seed=1).num_accepted
    array([1])
    """
    rows = (target_probs, draft_probs, draft_tokens)
    given = (uniform_accept, uniform_sample, seed, offset, num_draft_tokens, eos)
    plain = entry("verify_probs", target_probs, backend)
    result = plain and plain(*rows, rule, *given, check)
    if result is None:
        result = call("verify_probs", _verify_probs_arguments(*rows, rule, *given), check, backend)
    return VerifyResult(*result)


def verify_greedy(
    target: Array,
    draft_tokens: Array,
    *,
    num_draft_tokens: Any = None,
    eos: Any = None,
    check: bool | None = None,
    backend: str = "auto",
) -> VerifyResult:
    """Accept drafts while they are the target's argmax (lowest id on ties), and emit the argmax where they are not.

    Parameters
    ----------
    target : float [B, K+1, V]
        Logits or probabilities; only the argmax is read.
    draft_tokens, num_draft_tokens, eos, check, backend
        As in ``verify``.

    Returns
    -------
    VerifyResult

    Raises
    ------
    ShapeError, DtypeError, ValueRangeError, BackendError

    Notes
    -----
    **Exactness.** The emitted tokens are those of greedy decoding on the same rows.

    Examples
    --------
    >>> import numpy as np, draftproof
    >>> target = np.eye(4, dtype=np.float32)[None, :3]
    >>> draftproof.verify_greedy(target, np.array([[0, 3]])).tokens
    array([[ 0,  1, -1]])
    """
    plain = entry("verify_greedy", target, backend)
    result = plain and plain(target, draft_tokens, num_draft_tokens, eos, check)
    if result is None:
        _, drafted, _ = _check_rows("target", target, draft_tokens)
        tokens = _checks.ids("draft_tokens", draft_tokens, target, "[B, K]")
        arguments = (target, tokens, _draft_length(num_draft_tokens, target, drafted), _checks.eos(eos, target))
        result = call("verify_greedy", arguments, check, backend)
    return VerifyResult(*result)


def _verify_arguments(
    target_logits: Array,
    draft_logits: Array | None,
    draft_tokens: Array,
    rule: str,
    own: Filters,
    draft: Filters,
    prev_tokens: Array | None,
    mask: Array | None,
    draft_mask: Array | None,
    num_draft_tokens: Any,
    eos: Any,
    seed: Any,
    offset: Any,
) -> tuple[Any, ...]:
    batch, drafted, vocab = _check_rows("target_logits", target_logits, draft_tokens)
    tokens = _checks.ids("draft_tokens", draft_tokens, target_logits, "[B, K]")
    _checks.one_of("rule", rule, _checks.RULES)
    draft_vocab = _check_draft_rows("draft_logits", draft_logits, target_logits, (batch, drafted))
    draft_rows = target_logits if draft_logits is None else draft_logits
    return (
        target_logits,
        draft_logits,
        tokens,
        rule,
        *filters(target_logits, own),
        *filters(draft_rows, draft, "draft_"),
        None if prev_tokens is None else _checks.ids("prev_tokens", prev_tokens, target_logits, "[B, L]"),
        _checks.mask("mask", mask, target_logits, "[B, K+1, V]", (batch, drafted + 1, vocab)),
        _checks.mask("draft_mask", draft_mask, target_logits, "[B, K, Vd]", (batch, drafted, draft_vocab)),
        _draft_length(num_draft_tokens, target_logits, drafted),
        _checks.eos(eos, target_logits),
        _checks.seed(seed, target_logits),
        _checks.integers("offset", offset, target_logits, drafted),
    )


def _verify_probs_arguments(
    target_probs: Array,
    draft_probs: Array | None,
    draft_tokens: Array,
    rule: str,
    uniform_accept: Array | None,
    uniform_sample: Array | None,
    seed: Any,
    offset: Any,
    num_draft_tokens: Any,
    eos: Any,
) -> tuple[Any, ...]:
    batch, drafted, _ = _check_rows("target_probs", target_probs, draft_tokens)
    tokens = _checks.ids("draft_tokens", draft_tokens, target_probs, "[B, K]")
    _checks.one_of("rule", rule, _checks.RULES)
    _check_draft_rows("draft_probs", draft_probs, target_probs, (batch, drafted))
    accept = _checks.uniforms("uniform_accept", uniform_accept, target_probs, "[B, K]", (batch, drafted))
    emit = _checks.uniforms("uniform_sample", uniform_sample, target_probs, "[B, K+1]", (batch, drafted + 1))
    _require_uniforms(rule, drafted, accept, emit, seed)
    return (
        target_probs,
        draft_probs,
        tokens,
        rule,
        accept,
        emit,
        None if seed is None else _checks.seed(seed, target_probs),
        _checks.integers("offset", offset, target_probs, drafted),
        _draft_length(num_draft_tokens, target_probs, drafted),
        _checks.eos(eos, target_probs),
    )


def _check_rows(name: str, target: Array, draft_tokens: Array) -> tuple[int, int, int]:
    """Return ``(B, K, V)``; the target must have one row more than there are drafts."""
    _checks.rows(name, target, "[B, K+1, V]")
    batch, positions, vocab = target.shape
    tokens = _checks.same_kind("draft_tokens", draft_tokens, target)
    if tokens.ndim != 2 or tokens.shape[0] != batch:
        raise ShapeError(f"draft_tokens must be [B, K] with B = {batch}, got {list(tokens.shape)}")
    drafted = tokens.shape[1]
    if positions != drafted + 1:
        remedy = "append the target's row after the last drafted token"
        if positions != drafted:
            remedy = f"draft_tokens has K = {drafted}, and the target needs one row a draft and one more"
        raise ShapeError(
            f"{name} must be [B, K+1, V] = {[batch, drafted + 1, vocab]}, got {list(target.shape)}: {remedy}"
        )
    return batch, drafted, vocab


def _check_draft_rows(name: str, draft: Array | None, target: Array, leading: tuple[int, int]) -> int:
    """Return the draft's vocabulary size."""
    if draft is None:
        return int(target.shape[-1])
    _checks.rows(name, draft, "[B, K, V]")
    _checks.same_kind(name, draft, target)
    _checks.shape(name, draft, "[B, K, Vd]", (*leading, draft.shape[-1]))
    return int(draft.shape[-1])


def _draft_length(num_draft_tokens: Any, like: Array, drafted: int) -> Array:
    count = drafted if num_draft_tokens is None else num_draft_tokens
    return _checks.integers("num_draft_tokens", count, like, drafted)


def _require_uniforms(rule: str, drafted: int, accept: Array | None, emit: Array | None, seed: Any) -> None:
    if seed is not None or rule == "greedy":
        return
    if emit is None:
        raise ValueRangeError(f"uniform_sample or seed must be given for rule {rule!r}, got None for both")
    if accept is None and drafted > 0 and rule != "match":
        raise ValueRangeError(f"uniform_accept or seed must be given for rule {rule!r}, got None for both")
