"""nuvec's speculative functions under their own names: accept a draft of one sequence in one small result.

A result is ``(accepted, next, eos_hit)``, uint32 ``[3]`` for NumPy arrays and int64 ``[3]`` for torch tensors:
``accepted`` is the kept prefix, cut after the first accepted end-of-sequence token; ``next`` the candidate at position
``accepted``, also after an accepted end; ``eos_hit`` is 1 if an accepted draft token or ``next`` ends the sequence.
``torch.vmap`` maps the functions over a leading batch. There is no gradient.
"""

from __future__ import annotations

from numbers import Integral

from ..errors import DtypeError, ShapeError
from ..types import Array, VerifyResult
from ..verification.chain import api as chain

__all__ = ["accept_greedy", "accept_sampled", "read"]

_FLOATS = ("float32", "float16", "bfloat16")
_INTEGERS = ("uint32", "int32", "int64")


def accept_greedy(logits: Array, draft: Array, eos: Array) -> Array:
    """Keep the draft while each token is the largest logit of its row.

    Parameters
    ----------
    logits
        ``[N+1, V]`` float32, float16 or bfloat16, any strides. The lowest id wins a tie.
    draft
        ``[N]`` uint32, int32 or int64.
    eos
        ``[E]`` ids that end a sequence, integers as in ``draft``; may be empty.

    Returns
    -------
    result
        ``[3]``: accepted, next, eos_hit.

    Raises
    ------
    ShapeError, DtypeError
        Naming the operation, the input, what is needed and what was given.

    Examples
    --------
    >>> import numpy as np
    >>> from draftproof.compat import nuvec
    >>> logits = np.eye(3, dtype=np.float32)[[2, 0, 1]]
    >>> nuvec.read(nuvec.accept_greedy(logits, np.array([2, 0], np.uint32), np.array([], np.uint32)))
    (2, 1, False)
    """
    _check("accept_greedy", "logits", logits, draft, eos)
    return _result(chain.verify_greedy(logits[None], draft[None], eos=eos))


def accept_sampled(probs: Array, draft: Array, draft_probs: Array | None, eos: Array, key: int | Array) -> Array:
    """Keep draft token x while ``u * q(x) < p(x)``, then draw ``next`` from ``max(p - q, 0)``, or from p without that.

    Parameters
    ----------
    probs
        ``[N+1, V]`` float32, float16 or bfloat16, any strides; each row counts relative to its sum.
    draft
        ``[N]`` uint32, int32 or int64, drawn from ``draft_probs``.
    draft_probs
        ``[N, V]`` as ``probs``; None is a draft that was not drawn: q is a point mass.
    eos
        As in ``accept_greedy``.
    key
        An int of 64 bits, or uint32 ``[2]``, low half first. Philox splits it in two streams, for the uniforms and for
        ``next``. The same key gives the same result: use another one every round, and one for each row under ``vmap``.

    Returns
    -------
    result
        ``[3]``: accepted, next, eos_hit.

    Raises
    ------
    ShapeError, DtypeError
        Naming the operation, the input, what is needed and what was given.

    Examples
    --------
    >>> import numpy as np
    >>> from draftproof.compat import nuvec
    >>> probs = np.eye(3, dtype=np.float32)[[2, 0, 1]]
    >>> nuvec.read(nuvec.accept_sampled(probs, np.array([2, 1], np.uint32), None, np.array([0], np.uint32), key=7))
    (1, 0, True)
    """
    _check("accept_sampled", "probs", probs, draft, eos)
    if draft_probs is not None:
        shape = (draft.shape[0], probs.shape[1])
        _require("accept_sampled", "draft_probs", draft_probs, f"[N, V] = {list(shape)}", shape, _FLOATS)
        draft_probs = draft_probs[None]
    seed = _seed(key)
    return _result(chain.verify_probs(probs[None], draft_probs, draft[None], rule="token", seed=seed, eos=eos))


def read(result: Array) -> tuple[int, int, bool]:
    """Read a result on the host, once: ``(accepted, next, eos_hit)``.

    Raises
    ------
    ShapeError
        If ``result`` does not hold 3 values.
    """
    _require("read", "result", result, "[3], as the accept functions return it,", (3,), _INTEGERS)
    accepted, token, eos_hit = result.tolist()
    return accepted, token, bool(eos_hit)


def _check(op: str, name: str, rows: Array, draft: Array, eos: Array) -> None:
    _require(op, "draft", draft, "[N]", (None,), _INTEGERS)
    drafted = draft.shape[0]
    needed = f"[N+1, V] with N+1 = {drafted + 1} rows for N = {drafted} draft tokens"
    _require(op, name, rows, needed, (drafted + 1, None), _FLOATS)
    _require(op, "eos", eos, "[E]", (None,), _INTEGERS)


def _require(
    op: str, name: str, array: Array, needed: str, shape: tuple[int | None, ...], dtypes: tuple[str, ...]
) -> None:
    """Raise unless ``array`` has this shape (None: any size) and one of these dtypes."""
    needed = f"{op}: {name} must be an array {needed} of {', '.join(dtypes)}"
    if not hasattr(array, "dtype"):
        raise DtypeError(f"{needed}; got {type(array).__name__}")
    given, dtype = tuple(array.shape), str(array.dtype).rpartition(".")[2]
    if len(given) != len(shape) or not all(want in (None, given[axis]) for axis, want in enumerate(shape)):
        raise ShapeError(f"{needed}; got {list(given)} {dtype}")
    if dtype not in dtypes:
        raise DtypeError(f"{needed}; got {list(given)} {dtype}")


def _seed(key: Array) -> int | Array:
    """The 64-bit seed that a key holds."""
    if isinstance(key, Integral):
        return int(key) % 2**64
    _require("accept_sampled", "key", key, "[2] (or an int)", (2,), ("uint32",))
    if not hasattr(key, "new_empty"):
        return int(key[0]) | int(key[1]) << 32
    import torch

    low, high = key.to(torch.int64).split(1)
    return low | high << 32


def _result(result: VerifyResult) -> Array:
    packed = result.packed()[0]
    if hasattr(packed, "new_empty"):
        return packed.long()
    return packed.astype("uint32")
