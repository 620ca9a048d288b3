"""The only place where an argument error is worded: argument, what was expected, what came, how to mend it.

Kinds, dtypes and shapes are checked when a function is called (``rows``, ``per_row``, ``ids``, ...). Values of arrays
are checked by ``values`` where the operation runs, since a compiled graph has no values before that: on the CPU a bad
value raises, on other devices it is flagged, which costs no synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ._arrays import is_torch, namespace
from .errors import DtypeError, ShapeError, ValueRangeError
from .numerics.constants import MAX_UNIFORM, MAX_VOCAB
from .types import DEAD, Array, Status

FLOATS = ("float16", "bfloat16", "float32", "float64")
IDS = ("int32", "int64", "uint32")
RULES = ("token", "block", "match", "greedy")
_INFINITY = float("inf")
_SEED_REMEDY = "pass an int or an int64/uint64 array [B]; draftproof.random_seeds(B) gives fresh ones"


class Range(NamedTuple):
    """What a per-row parameter may be."""

    valid: Callable[[Any], Any]  # of a Python number or of an array
    expected: str
    default: float  # what a flagged row goes on with


PARAMETERS = {
    "temperature": Range(lambda a: (a >= 0) & (a < _INFINITY), "finite and at least 0 (0 is greedy)", 1.0),
    "top_k": Range(lambda a: (a >= -1) & (a % 1 == 0), "an integer of at least -1 (None, 0 and -1 are off)", 0),
    "top_p": Range(lambda a: (a >= 0) & (a <= 1), "in [0, 1] (None and 1 are off)", 1.0),
    "min_p": Range(lambda a: (a >= 0) & (a <= 1), "in [0, 1] (None and 0 are off)", 0.0),
    "repetition_penalty": Range(lambda a: (a > 0) & (a < _INFINITY), "finite and above 0 (None and 1 are off)", 1.0),
    "draft_index": Range(lambda a: (a >= 0) & (a < 1 << 24), "an integer in [0, 2**24)", 0),
}
_OFF: dict[str, Callable[[Any], Any]] = {
    "top_k": lambda k: k <= 0,
    "top_p": lambda p: p == 1,
    "min_p": lambda p: p == 0,
    "repetition_penalty": lambda r: r == 1,
}


def _base(name: str) -> str:
    return name.removeprefix("draft_") if name != "draft_index" else name


# --- when the function is called: kinds, dtypes, shapes ---------------------------------------------------------------


def rows(name: str, value: Any, form: str) -> Any:
    """Check an array of logits or probabilities of the given form, such as ``[B, K+1, V]``; return its namespace."""
    if not isinstance(value, np.ndarray) and not is_torch(value):
        raise DtypeError(
            f"{name} must be a NumPy array or a torch tensor {form}, got {type(value).__name__}: convert it first"
        )
    xp = namespace(value)
    if xp.dtype_name(value) not in FLOATS:
        raise DtypeError(f"{name} must be one of {', '.join(FLOATS)}, got {xp.dtype_name(value)}: cast it first")
    if value.ndim != form.count(",") + 1:
        raise ShapeError(f"{name} must be {form}, got {_shape(value)}: {_rank_remedy(value.ndim, form)}")
    if value.shape[-1] == 0:
        raise ShapeError(f"{name} must be {form} with at least one token in V, got {_shape(value)}")
    if value.shape[-1] > MAX_VOCAB:
        raise ShapeError(f"{name} must have a vocabulary of at most 2**22 = {MAX_VOCAB}, got {value.shape[-1]}")
    return xp


def shape(name: str, value: Array, form: str, expected: tuple[int, ...]) -> None:
    """Check an exact shape."""
    if tuple(value.shape) != expected:
        raise ShapeError(f"{name} must be {form} = {list(expected)}, got {_shape(value)}")


def same_kind(name: str, value: Any, like: Array) -> Array:
    """Check that ``value`` is an array of the library and device of ``like``; lists become arrays."""
    if isinstance(value, (list, tuple)):
        value = namespace(like).asarray(np.asarray(value), like)
    if not isinstance(value, np.ndarray) and not is_torch(value):
        raise DtypeError(f"{name} must be an array, got {type(value).__name__}")
    if is_torch(value) != is_torch(like):
        kinds = ("a NumPy array", "a torch tensor")
        wanted, got = kinds[is_torch(like)], kinds[is_torch(value)]
        raise DtypeError(f"{name} must be {wanted} as the rows are, got {got}: convert one of them")
    if is_torch(like) and value.device != like.device:
        raise DtypeError(f"{name} must be on {like.device} as the rows are, got {value.device}: move it there")
    return value


def ids(name: str, value: Any, like: Array, form: str) -> Array:
    """Check token ids of the given form; return them as int64."""
    value = same_kind(name, value, like)
    xp = namespace(like)
    if xp.dtype_name(value) not in IDS and value.shape[-1:] != (0,):
        raise DtypeError(f"{name} must be int32, int64 or uint32 token ids, got {xp.dtype_name(value)}")
    if value.ndim != form.count(",") + 1 or value.shape[0] != like.shape[0]:
        raise ShapeError(f"{name} must be {form} with B = {like.shape[0]}, got {_shape(value)}")
    return xp.int64(value)


def mask(name: str, value: Any, like: Array, form: str, expected: tuple[int, ...]) -> Array | None:
    """Check a mask: bool of the expected shape, or packed int32 with ceil(V / 32) words in place of V."""
    if value is None:
        return None
    value = same_kind(name, value, like)
    dtype = namespace(like).dtype_name(value)
    if dtype not in ("bool", "int32"):
        raise DtypeError(f"{name} must be bool {form}, or int32 with 32 ids packed in a word, got {dtype}")
    if dtype == "int32":
        form = form.replace("V", "ceil(V/32)")
        expected = (*expected[:-1], -(-expected[-1] // 32))
    shape(name, value, form, expected)
    return value


def per_row(name: str, value: Any, like: Array, vocab: int) -> Array | None:
    """Check a filter parameter: a number, or an array ``[B]``. Return ``[B]``, or None where it is off for every row.

    A number becomes an expanded view, which later shows that all rows share it.
    """
    base = _base(name)
    xp, batch = namespace(like), like.shape[0]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        raise DtypeError(f"{name} must be a number or an array [B], got bool")
    if isinstance(value, (int, float)):
        if not PARAMETERS[base].valid(value):
            raise ValueRangeError(f"{name} must be {PARAMETERS[base].expected}, got {value!r}")
        if base in _OFF and (_OFF[base](value) or (base == "top_k" and value >= vocab)):
            return None
        dtype = "int64" if base in ("top_k", "draft_index") else "float32"
        return xp.broadcast(xp.full((), int(value) if dtype == "int64" else value, dtype, like=like), (batch,))
    if value is None:
        return None
    return _column(name, same_kind(name, value, like), like, "a number")


def integers(name: str, value: Any, like: Array, low: int, high: int) -> Array:
    """Check an int in [low, high], or an integer array ``[B]``; return int64 ``[B]``."""
    xp = namespace(like)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int) and not isinstance(value, bool):
        if not low <= value <= high:
            raise ValueRangeError(f"{name} must be in [{low}, {high}], got {value}")
        return xp.broadcast(xp.full((), value, "int64", like=like), (like.shape[0],))
    value = _column(name, same_kind(name, value, like), like, "an int")
    if "int" not in xp.dtype_name(value):
        raise DtypeError(f"{name} must be an int or an integer array [B], got {xp.dtype_name(value)}")
    return xp.int64(value)


def seed(value: Any, like: Array) -> Array:
    """Check a seed; return its int64 bits, ``[B]``, or 0-D for a scalar that rows are still to be derived from."""
    xp = namespace(like)
    if value is None:
        raise ValueRangeError(f"seed must be given, got None: {_SEED_REMEDY}")
    if isinstance(value, np.generic) and value.dtype.kind in "iu":
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        if not -(2**63) <= value < 2**64:
            raise ValueRangeError(f"seed must be in [-2**63, 2**64), got {value}")
        return xp.full((), value - 2**64 if value >= 2**63 else value, "int64", like=like)
    if isinstance(value, np.ndarray) and is_torch(like):
        value = xp.asarray(value.astype(np.int64, casting="unsafe"), like)
    if isinstance(value, (bool, float, str)):
        raise DtypeError(f"seed must be an integer, got {type(value).__name__}: {_SEED_REMEDY}")
    value = same_kind("seed", value, like)
    if xp.dtype_name(value) not in ("int32", "int64", "uint64"):
        raise DtypeError(f"seed must be int64 or uint64, got {xp.dtype_name(value)}: {_SEED_REMEDY}")
    if value.ndim > 1 or (value.ndim == 1 and value.shape[0] != like.shape[0]):
        raise ShapeError(f"seed must be a scalar or [B] = [{like.shape[0]}], got {_shape(value)}: {_SEED_REMEDY}")
    return xp.int64(value)


def eos(value: Any, like: Array) -> Array | None:
    """Check end-of-sequence ids: an int, ``[E]`` or ``[B, E]`` padded with -1; return int64 ``[B, E]``."""
    if value is None:
        return None
    xp = namespace(like)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int) and not isinstance(value, bool):
        value = [value]
    value = same_kind("eos", value, like)
    if value.shape[-1:] == (0,):
        return None
    if xp.dtype_name(value) not in IDS:
        raise DtypeError(f"eos must be an int or int32/int64/uint32 ids, got {xp.dtype_name(value)}")
    if value.ndim == 1:
        value = xp.broadcast(value[None, :], (like.shape[0], value.shape[0]))
    if value.ndim != 2 or value.shape[0] != like.shape[0]:
        raise ShapeError(f"eos must be an int, [E] or [B, E] with B = {like.shape[0]}, got {_shape(value)}")
    return xp.int64(value)


def uniforms(name: str, value: Any, like: Array, form: str, expected: tuple[int, ...]) -> Array | None:
    """Check uniforms handed in by the caller; their values are checked where the operation runs."""
    if value is None:
        return None
    value = same_kind(name, value, like)
    if namespace(like).dtype_name(value) not in FLOATS:
        raise DtypeError(f"{name} must be floats in [0, 1], got {namespace(like).dtype_name(value)}")
    shape(name, value, form, expected)
    return value


def one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Check a word."""
    if value not in choices:
        raise ValueRangeError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def flag(value: Any) -> None:
    """Check ``check``."""
    if value is not None and not isinstance(value, bool):
        raise DtypeError(f"check must be None, True or False, got {value!r}")


def _column(name: str, value: Array, like: Array, scalar: str) -> Array:
    batch = like.shape[0]
    if value.ndim == 0:
        return namespace(like).broadcast(value, (batch,))
    if tuple(value.shape) != (batch,):
        raise ShapeError(f"{name} must be {scalar} or an array [B] = [{batch}], got {_shape(value)}")
    return value


def _shape(value: Array) -> list[int]:
    return [int(n) for n in value.shape]


def _rank_remedy(ndim: int, form: str) -> str:
    wanted = form.count(",") + 1
    return "add the batch axis, array[None]" if ndim == wanted - 1 else f"it needs {wanted} axes, not {ndim}"


# --- where the operation runs: values ---------------------------------------------------------------------------------


def values(xp: Any, arguments: dict[str, Any]) -> tuple[dict[str, Any], Array | None]:
    """Check the values of an operation's array arguments and bring them to their working dtypes.

    Returns the arguments, and ``[B]`` bool of the rows whose parameters are bad (None on the CPU, where they raise).
    """
    result = dict(arguments)
    like = next(iter(arguments.values()))
    bad = None
    for name, array in arguments.items():
        if array is None or not (spec := _spec(name, arguments)):
            continue
        # One row that stands for all is worked on once, and stays an expanded view.
        row = array[:1] if xp.same_row(array) else array
        working = xp.float32(row) if spec.floating else row
        good = spec.range.valid(working)
        if xp.on_host(like):
            if xp.any(~good):
                _raise_value(xp, name, array, good, spec.range.expected)
        else:
            working = xp.where(good, working, spec.range.default)
            row_bad = xp.broadcast(~good if good.ndim == 1 else xp.sum(~good)[:, 0] > 0, (array.shape[0],))
            bad = row_bad if bad is None else bad | row_bad
        result[name] = xp.broadcast(spec.finish(xp, working), tuple(array.shape))
    return result, bad


class _Spec(NamedTuple):
    range: Range
    floating: bool
    finish: Callable[[Any, Array], Array]


def _spec(name: str, arguments: dict[str, Any]) -> _Spec | None:
    if name in ("uniform_accept", "uniform_sample"):
        unit = Range(lambda a: (a >= 0) & (a <= 1), "in [0, 1]", 0.5)
        return _Spec(unit, True, lambda xp, a: xp.minimum(a, MAX_UNIFORM))
    if name == "offset":
        drafted = arguments["draft_tokens"].shape[1] if "draft_tokens" in arguments else 0
        limit = 2**63 - 1 - drafted
        return _Spec(Range(lambda a: (a >= 0) & (a <= limit), f"in [0, 2**63 - {1 + drafted}]", 0), False, _as_int64)
    if name == "num_draft_tokens":
        drafted = arguments["draft_tokens"].shape[1]
        return _Spec(Range(lambda a: (a >= 0) & (a <= drafted), f"in [0, K] = [0, {drafted}]", 0), False, _as_int64)
    base = _base(name)
    if base == "top_k":
        return _Spec(PARAMETERS[base], False, _finish_top_k)
    if base == "draft_index":
        return _Spec(PARAMETERS[base], False, _as_int64)
    return _Spec(PARAMETERS[base], True, lambda _, a: a) if base in PARAMETERS else None


def _as_int64(xp: Any, a: Array) -> Array:
    return xp.int64(a)


def _finish_top_k(xp: Any, k: Array) -> Array:
    """Off values become the largest k; the vocabulary bounds it later."""
    return xp.int64(xp.where(k <= 0, MAX_VOCAB, xp.minimum(k, MAX_VOCAB)))


def _raise_value(xp: Any, name: str, array: Array, good: Array, expected: str) -> NoReturn:
    where = [int(axis[0]) for axis in xp.nonzero(~good)]
    value = array[tuple(where)]
    place = f"row {where[0]}" if len(where) == 1 else f"row {where[0]}, position {where[1]}"
    raise ValueRangeError(f"{name} must be {expected}, got {value.item()!r} in {place}")


def raise_on_dead_rows(xp: Any, name: str, status: Array) -> None:
    """Raise for the first row that has no law to draw from."""
    dead = (status & DEAD) != 0
    if not xp.any(dead):
        return
    row = int(xp.nonzero(dead)[0][0])
    bits = int(status[row])
    if bits & Status.NAN:
        problem = "holds NaN where the mask allows a token: mend the model's output"
    elif bits & Status.EMPTY_SUPPORT:
        problem = "has no token left, all are -inf, masked or of probability 0: allow at least one"
    elif bits & Status.BAD_PROBABILITY:
        problem = "holds a negative, NaN or infinite probability: pass finite values of at least 0"
    else:
        problem = "has a parameter out of range"
    raise ValueRangeError(f"{name}: row {row} {problem}; check=False returns status {bits} instead of raising")
