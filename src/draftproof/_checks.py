"""The errors about arguments that operations share: argument, what was expected, what came, how to mend it.

Kinds, dtypes and shapes are checked when a function is called (``rows``, ``per_row``, ``ids``, ...). Values of arrays
are checked by ``values`` where the operation runs, since a compiled graph has no values before that: on the CPU a bad
value raises, on other devices it is flagged, which costs no synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from . import _numpy as np
from ._arrays import is_dense, is_numpy, is_torch, namespace, number
from .errors import DtypeError, ShapeError, ValueRangeError
from .numerics.constants import FLT_MAX, MAX_UNIFORM, MAX_VOCAB
from .types import DEAD, Array, Status

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
IDS = ("int32", "int64", "uint32")
SEEDS = ("int64", "uint64")
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
}
_OFF: dict[str, Callable[[Any], Any]] = {
    "top_k": lambda k: k <= 0,
    "top_p": lambda p: p == 1,
    "min_p": lambda p: p == 0,
    "repetition_penalty": lambda r: r == 1,
}


def _base(name: str) -> str:
    return name.removeprefix("draft_")


def _integer_range(name: str, drafted: int) -> Range:
    """What an integer parameter may be, in a call with ``drafted`` drafts a row."""
    if name == "num_draft_tokens":
        return Range(lambda a: (a >= 0) & (a <= drafted), f"in [0, K] = [0, {drafted}]", 0)
    if name == "draft_index":
        return Range(lambda a: (a >= 0) & (a < 1 << 24), "in [0, 2**24)", 0)
    limit = 2**63 - drafted
    return Range(lambda a: (a >= 0) & (a <= limit - 1), f"in [0, 2**63 - {drafted})" if drafted else "in [0, 2**63)", 0)


# --- when the function is called: kinds, dtypes, shapes ---------------------------------------------------------------


def rows(name: str, value: Any, form: str) -> Any:
    """Check an array of logits or probabilities of the given form, such as ``[B, K+1, V]``; return its namespace."""
    _array(name, value, f"a NumPy array or a torch tensor {form}")
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


def same_kind(name: str, value: Any, like: Array, expected: str = "an array") -> Array:
    """Check that ``value`` is an array of the library and device of ``like``; lists become arrays."""
    if isinstance(value, (list, tuple)):
        # A list of ids goes as it is, which a compiled graph can follow.
        ids_only = all(type(x) is int and -(2**63) <= x < 2**63 for x in value)
        value = namespace(like).asarray(value if ids_only else _from_list(name, value), like)
    _array(name, value, expected)
    if is_torch(value) != is_torch(like):
        kinds = ("a NumPy array", "a torch tensor")
        wanted, got = kinds[is_torch(like)], kinds[is_torch(value)]
        raise DtypeError(f"{name} must be {wanted} as the rows are, got {got}: convert one of them")
    if is_torch(like) and value.device != like.device:
        raise DtypeError(f"{name} must be on {like.device} as the rows are, got {value.device}: move it there")
    return value


def _array(name: str, value: Any, expected: str) -> None:
    """Check for a plain array: NumPy's subclasses give operations another meaning, and sparse tensors lack most."""
    if is_numpy(value) or (is_torch(value) and is_dense(value)):
        return
    layout = f" of layout {value.layout}" if is_torch(value) else ""
    raise DtypeError(f"{name} must be {expected}, got {type(value).__name__}{layout}: convert it first")


def _from_list(name: str, value: Any) -> Any:
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError):  # rows of unequal length, or elements that do not convert
        array = np.array(None)
    if array.dtype.kind not in "biuf":
        raise DtypeError(f"{name} must be numbers in rows of equal length, got a list of {array.dtype}")
    # NumPy has two unsigned types of 64 bits and takes the one that torch does not know.
    return array.astype(np.uint64) if array.dtype.kind == "u" else array


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
        form = f"{form.rpartition(',')[0]}, ceil(V/32)]"
        expected = (*expected[:-1], -(-expected[-1] // 32))
    shape(name, value, form, expected)
    return value


def per_row(name: str, value: Any, like: Array, vocab: int) -> Array | None:
    """Check a filter parameter: a number, or an array ``[B]``. Return ``[B]``, or None where it is off for every row.

    A number becomes an expanded view, which later shows that all rows share it.
    """
    base = _base(name)
    xp, batch = namespace(like), like.shape[0]
    value = number(value)
    if isinstance(value, bool):
        raise DtypeError(f"{name} must be a number or an array [B], got bool")
    if isinstance(value, (int, float)):
        whole = base == "top_k"
        # What float32 cannot hold is infinite to it, and NaN is refused as infinity is.
        held = value if whole or -FLT_MAX <= value <= FLT_MAX else _INFINITY
        if not PARAMETERS[base].valid(held):
            raise ValueRangeError(f"{name} must be {PARAMETERS[base].expected}, got {_number(value)}")
        if base in _OFF and (_OFF[base](value) or (whole and value >= vocab)):
            return None
        single = xp.scalar(int(value) if whole else float(value), "int64" if whole else "float32", like=like)
        return xp.broadcast(single, (batch,))
    if value is None:
        return None
    value = _column(name, same_kind(name, value, like, "a number or an array [B]"), like, "a number")
    dtype = xp.dtype_name(value)
    if dtype not in FLOATS + INTEGERS:
        raise DtypeError(f"{name} must be a number or an array [B] of numbers, got {dtype}")
    return xp.int64(value) if base == "top_k" and dtype in INTEGERS else value


def integers(name: str, value: Any, like: Array, drafted: int = 0) -> Array:
    """Check an int, or an integer array ``[B]``; return int64 ``[B]``."""
    xp = namespace(like)
    value = number(value)
    if isinstance(value, int) and not isinstance(value, bool):
        allowed = _integer_range(name, drafted)
        if not allowed.valid(value):
            raise ValueRangeError(f"{name} must be {allowed.expected}, got {_number(value)}")
        return xp.broadcast(xp.scalar(value, "int64", like=like), (like.shape[0],))
    value = _column(name, same_kind(name, value, like, "an int or an integer array [B]"), like, "an int")
    if xp.dtype_name(value) not in INTEGERS:
        raise DtypeError(f"{name} must be an int or an integer array [B], got {xp.dtype_name(value)}")
    return xp.int64(value)


def seed(value: Any, like: Array) -> Array:
    """Check a seed; return its int64 bits, ``[B]``, or 0-D for a scalar that rows are still to be derived from.

    NumPy seeds go with rows of any kind: ``random_seeds`` gives them.
    """
    xp = namespace(like)
    if value is None:
        raise ValueRangeError(f"seed must be given, got None: {_SEED_REMEDY}")
    value = number(value)
    if isinstance(value, int) and not isinstance(value, bool):
        if not -(2**63) <= value < 2**64:
            raise ValueRangeError(f"seed must be in [-2**63, 2**64), got {_number(value)}")
        return xp.scalar(value - 2**64 if value >= 2**63 else value, "int64", like=like)
    foreign = is_torch(like) and is_numpy(value)
    if not foreign:
        value = same_kind("seed", value, like, "an int or an int64/uint64 array [B]")
    own = namespace(value)
    if own.dtype_name(value) not in SEEDS:
        raise DtypeError(f"seed must be int64 or uint64, got {own.dtype_name(value)}: {_SEED_REMEDY}")
    if value.ndim > 1 or (value.ndim == 1 and value.shape[0] != like.shape[0]):
        raise ShapeError(f"seed must be a scalar or [B] = [{like.shape[0]}], got {_shape(value)}: {_SEED_REMEDY}")
    # A copy, since torch warns when it shares a read-only array.
    return xp.asarray(own.int64(value).copy(), like) if foreign else xp.int64(value)


def eos(value: Any, like: Array) -> Array | None:
    """Check end-of-sequence ids: an int, ``[E]`` or ``[B, E]`` padded with -1; return int64 ``[B, E]``."""
    if value is None:
        return None
    xp = namespace(like)
    value = number(value)
    if isinstance(value, int) and not isinstance(value, bool):
        if not -(2**63) <= value < 2**63:
            raise ValueRangeError(f"eos must be in [-1, 2**63), got {_number(value)}")
        value = [value]
    value = same_kind("eos", value, like, "an int, [E] or [B, E]")
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


def word(name: str, value: Any) -> None:
    """Check for a str."""
    if not isinstance(value, str):
        raise DtypeError(f"{name} must be a str, got {type(value).__name__}")


def one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Check a word."""
    word(name, value)
    if value not in choices:
        raise ValueRangeError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def flag(value: Any) -> None:
    """Check ``check``."""
    if value is not None and not isinstance(value, bool):
        raise DtypeError(f"check must be None, True or False, got {type(value).__name__}")


def _column(name: str, value: Array, like: Array, scalar: str) -> Array:
    batch = like.shape[0]
    if value.ndim == 0:
        return namespace(like).broadcast(value, (batch,))
    if tuple(value.shape) != (batch,):
        raise ShapeError(f"{name} must be {scalar} or an array [B] = [{batch}], got {_shape(value)}")
    return value


def _number(value: float) -> str:
    """A number in full, unless it is an int too long to read."""
    bits = value.bit_length() if isinstance(value, int) else 0
    return f"an int of {bits} bits" if bits > 128 else repr(value)


def _shape(value: Array) -> list[int]:
    return [int(n) for n in value.shape]


def _rank_remedy(ndim: int, form: str) -> str:
    wanted = form.count(",") + 1
    return "add the batch axis, array[None]" if ndim == wanted - 1 else f"it needs {wanted} axes, not {ndim}"


# --- where the operation runs: values ---------------------------------------------------------------------------------


def values(xp: Any, arguments: dict[str, Any]) -> tuple[dict[str, Any], Array | None]:
    """Check the values of an operation's array arguments and bring them to their working dtypes.

    Returns the arguments, and ``[B]`` bool of the rows whose parameters are bad: numbers and arrays on the CPU raise.
    None: no parameter was on a device.
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
        if xp.on_host(array):
            if xp.any(~good):
                _raise_value(xp, name, array, good, spec.range.expected)
        else:
            working = xp.where(good, working, spec.range.default)
            row_bad = xp.broadcast(~good if good.ndim == 1 else xp.sum(~good)[:, 0] > 0, (array.shape[0],))
            bad = row_bad if bad is None else bad | row_bad
        result[name] = xp.joined(spec.finish(xp, working), tuple(array.shape), like)
    return result, bad


class _Spec(NamedTuple):
    range: Range
    floating: bool
    finish: Callable[[Any, Array], Array]


def _spec(name: str, arguments: dict[str, Any]) -> _Spec | None:
    if name in ("uniform_accept", "uniform_sample"):
        unit = Range(lambda a: (a >= 0) & (a <= 1), "in [0, 1]", 0.5)
        return _Spec(unit, True, lambda xp, a: xp.minimum(a, MAX_UNIFORM))
    if name in ("offset", "num_draft_tokens", "draft_index"):
        drafted = arguments["draft_tokens"].shape[1] if "draft_tokens" in arguments else 0
        return _Spec(_integer_range(name, drafted), False, _as_int64)
    base = _base(name)
    if base == "top_k":
        return _Spec(PARAMETERS[base], False, _finish_top_k)
    return _Spec(PARAMETERS[base], True, lambda _, a: a) if base in PARAMETERS else None


def _as_int64(xp: Any, a: Array) -> Array:
    return xp.int64(a)


def _finish_top_k(xp: Any, k: Array) -> Array:
    """Off values become the largest k; the vocabulary bounds it later."""
    # float16 cannot hold the largest k; float32 holds every integer up to it.
    k = xp.float32(k)
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
    raise ValueRangeError(f"{name}: row {row} {death(bits)}; check=False returns status {bits} instead of raising")


def death(bits: int) -> str:
    """Say what a status tells of a row that has no law to draw from, and how to mend it."""
    if bits & Status.NAN:
        return "holds NaN where the mask allows a token: mend the model's output"
    if bits & Status.EMPTY_SUPPORT:
        return "has no token left, all are -inf, masked or of probability 0: allow at least one"
    if bits & Status.BAD_PROBABILITY:
        return "holds a negative, NaN or infinite probability: pass finite values of at least 0"
    return "has a parameter out of range"
