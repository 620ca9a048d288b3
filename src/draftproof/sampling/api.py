"""The documented sampling functions: check, resolve, call, wrap the result."""

from __future__ import annotations

import secrets
from typing import Any

from .. import _checks
from .. import _numpy as np
from .._arrays import is_torch, number
from .._dispatch import entry, run
from ..errors import ShapeError
from ..types import Array, Filters, SampleResult


def call(operation: str, arguments: tuple[Any, ...], check: bool | None, backend: str) -> tuple[Array, ...]:
    """Run an operation: NumPy directly, torch through its registered op, which compile and vmap know."""
    _checks.flag(check)
    _checks.word("backend", backend)
    if is_torch(arguments[0]):
        from .._torch_ops import call_op

        return call_op(operation, arguments, check, backend)
    return run(operation, arguments, check, backend)


def filters(rows: Array, parameters: Filters, prefix: str = "") -> tuple[Array | None, ...]:
    """Check the filter parameters of a batch of rows; return them as ``[B]`` arrays, None where one is off."""
    if parameters.temperature is None:
        parameters = parameters._replace(temperature=1.0)
    named = zip(Filters._fields, parameters, strict=True)
    return tuple(_checks.per_row(prefix + name, value, rows, rows.shape[-1]) for name, value in named)


def _filter_arguments(logits: Any, parameters: Filters, prev_tokens: Any, mask: Any) -> tuple[Any, ...]:
    _checks.rows("logits", logits, "[B, V]")
    history = None if prev_tokens is None else _checks.ids("prev_tokens", prev_tokens, logits, "[B, L]")
    allowed = _checks.mask("mask", mask, logits, "[B, V]", tuple(logits.shape))
    return (logits, *filters(logits, parameters), history, allowed)


def _stream_arguments(logits: Array, seed: Any, offset: Any, draft_index: Any) -> tuple[Any, ...]:
    return (
        _checks.seed(seed, logits),
        _checks.integers("offset", offset, logits),
        None if draft_index is None else _checks.integers("draft_index", draft_index, logits),
    )


def sample(
    logits: Array,
    *,
    temperature: Any = 1.0,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    repetition_penalty: Any = None,
    prev_tokens: Array | None = None,
    mask: Array | None = None,
    seed: Any,
    offset: Any = 0,
    draft_index: Any = None,
    check: bool | None = None,
    backend: str = "auto",
) -> Array:
    """Draw one token per row of logits.

    Filters apply in this order: repetition penalty, mask, temperature, top-k, top-p, min-p. Their boundaries are those
    of the transformers processors: top-k keeps every token that ties with the k-th, top-p keeps a token iff the mass
    ranked strictly above it is below ``top_p``.

    Parameters
    ----------
    logits : array [B, V], float16, bfloat16, float32 or float64
        NumPy array or torch tensor, any strides. Never modified.
    temperature : float or [B]
        At least 0; 0 is greedy (lowest id among tied maxima).
    top_k : int or [B], optional
        Off: None, 0, -1, or at least V.
    top_p : float or [B], optional
        In [0, 1]; off: None or 1. 0 keeps one token.
    min_p : float or [B], optional
        In [0, 1]; off: None or 0.
    repetition_penalty : float or [B], optional
        Above 0; off: None or 1. Acts once on each id of ``prev_tokens``.
    prev_tokens : array [B, L] of ids, optional
        The history the penalty acts on, padded with -1.
    mask : bool [B, V] or int32 [B, ceil(V/32)], optional
        True, or a set bit, allows the token; bit ``v & 31`` of word ``v >> 5``.
    seed : int, 0-D array or int64/uint64 [B]
        With one scalar, row 0 uses it and every other row a seed derived from it and the row number.
    offset : int or [B]
        Tokens already in the row's sequence, prompt and generated: every position gets its own draw.
    draft_index : int or [B], optional
        Draw private draft ``draft_index`` of the round that starts at ``offset``, for rules token and block.
    check : bool, optional
        None raises for a dead row (NaN, nothing allowed) of a CPU array and only marks it elsewhere; True always
        raises, False never does. A dead row's token is -1.
    backend : str
        ``"auto"``, or a name of ``draftproof.backends()``; a named backend is used or fails.

    Returns
    -------
    tokens : int64 [B], of the kind that came in.

    Raises
    ------
    ShapeError, DtypeError, ValueRangeError, BackendError

    Notes
    -----
    Gumbel-argmax in the linear domain, a race of exponentials (Maddison et al., 2014): the token with the least
    ``E_id / w_id`` wins, with one exponential per token id from Philox4x32-10.

    **Exactness.** The token is a pure function of the row's (logits, parameters, seed, offset): the same bits on every
    backend, for any batch, padding or strides. Its law is the filtered softmax of the float32 logits up to
    rounding: a weight w carries a relative error of 1.04e-7 (measured) plus 2**-22 * abs(log(w)) from its rounded
    argument, an exponential 3.15e-7 (measured), and tokens lighter than 2**-40 of the largest are dropped, which
    costs at most V * 2**-40 of mass.

    Examples
    --------
    >>> import numpy as np, draftproof
    >>> logits = np.log(np.array([[0.5, 0.3, 0.2]], dtype=np.float32))
    >>> draftproof.sample(logits, temperature=0, seed=1)
    array([0])
    >>> draftproof.sample(logits, top_k=2, top_p=0.9, seed=7, offset=12).shape
    (1,)
    """
    parameters = (temperature, top_k, top_p, min_p, repetition_penalty)
    plain = entry("sample", logits, backend)
    result = plain and plain(logits, *parameters, prev_tokens, mask, seed, offset, draft_index, check)
    if result is None:
        arguments = _filter_arguments(logits, Filters(*parameters), prev_tokens, mask)
        arguments += _stream_arguments(logits, seed, offset, draft_index)
        result = call("sample", arguments, check, backend)
    return result[0]


def sample_with_logprobs(
    logits: Array,
    *,
    temperature: Any = 1.0,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    repetition_penalty: Any = None,
    prev_tokens: Array | None = None,
    mask: Array | None = None,
    seed: Any,
    offset: Any = 0,
    draft_index: Any = None,
    check: bool | None = None,
    backend: str = "auto",
) -> SampleResult:
    """Draw as ``sample`` does, the same tokens, and say how probable each was.

    Parameters
    ----------
    Those of ``sample``.

    Returns
    -------
    SampleResult
        ``tokens`` int64 [B]; ``logprobs`` float32 [B], natural logarithm under the filtered law (0 for greedy rows);
        ``raw_logprobs`` float32 [B], log-softmax of the logits as given, before penalty, mask and temperature;
        ``kept`` int64 [B], tokens that the filters keep; ``status`` int32 [B], bits of ``draftproof.Status``. Dead
        rows have NaN log-probabilities and ``kept`` 0.

    Raises
    ------
    ShapeError, DtypeError, ValueRangeError, BackendError

    Notes
    -----
    **Exactness.** The bits agree between backends. ``logprobs`` is within 3e-7 relative plus 3e-6 absolute of the
    real value: the pinned exp2 and log2 carry 1.04e-7 and 2.05e-7.

    Examples
    --------
    >>> import numpy as np, draftproof
    >>> logits = np.log(np.array([[0.5, 0.3, 0.2]], dtype=np.float32))
    >>> result = draftproof.sample_with_logprobs(logits, top_k=1, seed=1)
    >>> int(result.tokens[0]), float(result.logprobs[0]), int(result.kept[0])
    (0, 0.0, 1)
    """
    parameters = (temperature, top_k, top_p, min_p, repetition_penalty)
    plain = entry("sample_with_logprobs", logits, backend)
    result = plain and plain(logits, *parameters, prev_tokens, mask, seed, offset, draft_index, check)
    if result is None:
        arguments = _filter_arguments(logits, Filters(*parameters), prev_tokens, mask)
        arguments += _stream_arguments(logits, seed, offset, draft_index)
        result = call("sample_with_logprobs", arguments, check, backend)
    return SampleResult(*result)


def sample_probs(
    probs: Array, *, seed: Any, offset: Any = 0, check: bool | None = None, backend: str = "auto"
) -> Array:
    """Draw one token per row of probabilities.

    Parameters
    ----------
    probs : array [B, V], float
        Non-negative; every row is normalised by its own sum.
    seed, offset, check, backend
        As in ``sample``.

    Returns
    -------
    tokens : int64 [B]

    Raises
    ------
    ShapeError, DtypeError, ValueRangeError, BackendError

    Notes
    -----
    Inverse CDF over integer masses; ``verify_probs`` with rule match draws the same token at the same offset.

    **Exactness.** The same bits on every backend; a probability of 0 is never drawn. Entries are held in units of
    2**-40 of the power of two above the row's maximum: the law is within V * 2**-39 of the given one.

    Examples
    --------
    >>> import numpy as np, draftproof
    >>> draftproof.sample_probs(np.array([[0.0, 1.0, 0.0]], dtype=np.float32), seed=3)
    array([1])
    """
    plain = entry("sample_probs", probs, backend)
    result = plain and plain(probs, seed, offset, check)
    if result is None:
        _checks.rows("probs", probs, "[B, V]")
        stream = _stream_arguments(probs, seed, offset, None)[:2]
        result = call("sample_probs", (probs, *stream), check, backend)
    return result[0]


def filter_logits(
    logits: Array,
    *,
    temperature: Any = 1.0,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    repetition_penalty: Any = None,
    prev_tokens: Array | None = None,
    mask: Array | None = None,
    check: bool | None = None,
    backend: str = "auto",
) -> Array:
    """Return the logits as the filters leave them: ``l / T`` where a token is kept, -inf elsewhere.

    Parameters
    ----------
    Those of ``sample``.

    Returns
    -------
    filtered : float32 [B, V]
        At temperature 0 only the lowest-id maximum is kept, undivided. A dead row is NaN throughout.

    Raises
    ------
    ShapeError, DtypeError, ValueRangeError, BackendError

    Notes
    -----
    **Exactness.** Kept entries are bitwise what the transformers processors return for float32 logits: one float32
    division after the penalty. The kept set is exact in integer masses; it differs from the processors' only where
    the mass at a top-p or min-p boundary lies within float32 rounding of the threshold.

    Examples
    --------
    >>> import numpy as np, draftproof
    >>> draftproof.filter_logits(np.array([[2.0, 1.0, 0.0]], dtype=np.float32), temperature=0.5, top_k=2)
    array([[  4.,   2., -inf]], dtype=float32)
    """
    parameters = (temperature, top_k, top_p, min_p, repetition_penalty)
    plain = entry("filter_logits", logits, backend)
    result = plain and plain(logits, *parameters, prev_tokens, mask, check)
    if result is None:
        arguments = _filter_arguments(logits, Filters(*parameters), prev_tokens, mask)
        result = call("filter_logits", arguments, check, backend)
    return result[0]


def random_seeds(batch: int) -> Array:
    """Return distinct 64-bit seeds from the operating system's entropy.

    Parameters
    ----------
    batch : int
        How many; at least 0.

    Returns
    -------
    seeds : NumPy uint64 [batch]

    Raises
    ------
    ShapeError
        ``batch`` is no int of at least 0.

    Examples
    --------
    >>> import draftproof
    >>> seeds = draftproof.random_seeds(4)
    >>> seeds.shape, len(set(seeds.tolist()))
    ((4,), 4)
    """
    batch = number(batch)
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 0:
        raise ShapeError(f"batch must be an int of at least 0, got {batch!r}")
    seeds: set[int] = set()
    while len(seeds) < batch:
        seeds.add(secrets.randbits(64))
    return np.array(list(seeds), dtype=np.uint64)
