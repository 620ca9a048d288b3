"""spec-decode-ops under its own names: fused sampling, its filters, and verification from logits.

Arrays are torch tensors or NumPy arrays. The pipeline is repetition penalty, temperature, top-k, top-p, min-p, draw;
each filter keeps at least one token. Temperature 0 is greedy.

Exactness: tokens are those of ``draftproof.sample`` and of ``draftproof.verify`` with rule ``token``, so equal inputs,
seed and offset give equal tokens on every device and architecture, not only on one.
"""

from __future__ import annotations

from ..sampling import api as sampling
from ..types import Array
from ..verification.chain import api as chain

__all__ = ["filter_logits", "sample", "verify"]


def sample(
    logits: Array,
    temperature: float | Array = 1.0,
    top_k: int | Array | None = None,
    top_p: float | Array | None = None,
    min_p: float | Array | None = None,
    repetition_penalty: float | Array | None = None,
    prev_tokens: Array | None = None,
    seed: int | Array = 0,
    offset: int | Array = 0,
) -> Array:
    """Draw one token a row: logits ``[B, V]`` to tokens int64 ``[B]``.

    Parameters
    ----------
    logits
        ``[B, V]`` float32, float16, bfloat16 or float64.
    temperature, top_k, top_p, min_p, repetition_penalty
        A scalar or ``[B]``; None is off.
    prev_tokens
        ``[B, L]`` token ids for the penalty, padded with -1.
    seed, offset
        The draw is a function of the row, its parameters, ``seed`` and ``offset``: count ``offset`` up with every step.

    Raises
    ------
    ShapeError, DtypeError, ValueRangeError
        As ``draftproof.sample`` does.

    Examples
    --------
    >>> import numpy as np
    >>> import draftproof.compat.spec_decode_ops as sdo
    >>> sdo.sample(np.array([[0.0, 9.0, -np.inf]], np.float32), temperature=0.8, top_k=1, seed=1234, offset=7).tolist()
    [1]
    """
    return sampling.sample(
        logits,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        prev_tokens=prev_tokens,
        seed=seed,
        offset=offset,
    )


def filter_logits(
    logits: Array,
    temperature: float | Array = 1.0,
    top_k: int | Array | None = None,
    top_p: float | Array | None = None,
    min_p: float | Array | None = None,
    repetition_penalty: float | Array | None = None,
    prev_tokens: Array | None = None,
) -> Array:
    """Mask and scale logits ``[B, V]`` as the processors of transformers do: float32 ``[B, V]``, -inf where masked.

    Parameters and errors are those of ``sample``. The result at temperature 1 has the law that ``sample`` draws from.

    Examples
    --------
    >>> import numpy as np
    >>> import draftproof.compat.spec_decode_ops as sdo
    >>> sdo.filter_logits(np.array([[1.0, 3.0, 2.0]], np.float32), temperature=0.5, top_k=2).tolist()
    [[-inf, 6.0, 4.0]]
    """
    return sampling.filter_logits(
        logits,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        prev_tokens=prev_tokens,
    )


def verify(
    target_logits: Array,
    draft_logits: Array,
    draft_tokens: Array,
    temperature: float | Array = 1.0,
    seed: int | Array = 0,
    offset: int | Array = 0,
) -> tuple[Array, Array]:
    """Accept draft tokens with ``min(1, p/q)``, then draw the correction or the bonus.

    Parameters
    ----------
    target_logits
        ``[B, k+1, V]``; row ``k`` is for the bonus.
    draft_logits
        ``[B, k, V]``: the rows the drafts were drawn from, at the same temperature.
    draft_tokens
        ``[B, k]`` int64, int32 or uint32.
    temperature, seed, offset
        As in ``sample``; ``offset`` must be another one in every round. To verify filtered drafts pass both logits
        through ``filter_logits`` and leave the temperature at 1.

    Returns
    -------
    accept_len, out
        int64 ``[B]`` and int64 ``[B, k+1]`` padded with -1: ``out[b, :accept_len[b] + 1]`` are the emitted tokens.

    Raises
    ------
    ShapeError, DtypeError, ValueRangeError
        As ``draftproof.verify`` does.

    Examples
    --------
    >>> import numpy as np
    >>> import draftproof.compat.spec_decode_ops as sdo
    >>> target = np.zeros((1, 3, 4), np.float32)
    >>> target[0, [0, 1, 2], [2, 0, 3]] = 99
    >>> accept_len, out = sdo.verify(target, target[:, :2], np.array([[2, 0]]), temperature=0.8, seed=1234, offset=7)
    >>> accept_len.tolist(), out.tolist()
    ([2], [[2, 0, 3]])
    """
    result = chain.verify(
        target_logits, draft_logits, draft_tokens, rule="token", temperature=temperature, seed=seed, offset=offset
    )
    return result.num_accepted, result.tokens
