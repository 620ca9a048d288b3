"""The border to the caller's functions: what they are given, and what they may return."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _numpy as np
from .._arrays import is_torch, namespace
from ..drafters.checks import check_ids
from ..errors import ShapeError, ValueRangeError
from ..types import Array, Draft

if TYPE_CHECKING:
    Ids = np.ndarray[Any, np.dtype[np.int64]]
else:
    Ids = Any


class Checked(NamedTuple):
    """A draft after checking: ``rows`` ``[len(tokens), V]`` are logits or probabilities, None for a point mass."""

    tokens: list[int]
    rows: Array | None


def read_prompt(prompt: Any) -> tuple[Ids, Callable[[Ids], Any]]:
    """Return the prompt as int64 NumPy and a function that copies ids into the kind the prompt came in."""
    kind: Callable[[Ids], Any] = np.ndarray.copy
    if is_torch(prompt):
        import torch

        def kind(ids: Ids) -> Any:
            return torch.tensor(ids, device=prompt.device)

    elif not isinstance(prompt, np.ndarray):
        kind = np.ndarray.tolist
    return frozen(check_ids("prompt_ids", prompt)), kind


def read_draft(result: Any, width: int, source: str) -> tuple[list[int], Array | None, Any]:
    """Check what a drafter or ``draft_step`` returned: tokens, rows, and estimates of their acceptance if any."""
    acceptance = None
    try:
        if isinstance(result, Draft):
            tokens, rows, acceptance = result
        else:
            tokens, rows = result
    except (TypeError, ValueError):
        got = f"{_describe(result)}: return None for the rows of a point mass"
        raise ShapeError(f"{source} must return a pair (tokens, rows or None), got {got}") from None
    ids = check_ids(f"the tokens from {source}", tokens, least=None)
    if len(ids) > width:
        remedy = f"return the first {width}"
        raise ShapeError(f"{source} must return at most {width} tokens, as asked for, got {len(ids)}: {remedy}")
    if rows is not None:
        rows = _matrix(rows, len(ids), source, "one a token, or None for a point mass")
    return ids.tolist(), rows, None if acceptance is None else _chances(acceptance, len(ids), source)


def read_rows(rows: Any, drafted: int) -> Array:
    """Check what ``target_step`` returned."""
    return _matrix(rows, drafted + 1, "target_step", "after the prefix and after each proposed token")


def frozen(array: Array) -> Array:
    """Make a NumPy array read-only: drafters get it without a copy."""
    array.flags.writeable = False
    return array


def logits_of(probs: Array) -> Array:
    """Return logits with this law: -inf for what cannot come."""
    if is_torch(probs):
        return probs.log()
    with np.errstate(divide="ignore"):
        return np.log(probs)


def as_kind(value: Any, like: Array) -> Array:
    """Return ``value`` in the array library and on the device of ``like``."""
    if is_torch(value) and not is_torch(like):
        value = value.float().cpu().numpy()
    return namespace(like).asarray(value, like)


def _matrix(rows: Any, count: int, source: str, meaning: str) -> Array:
    if isinstance(rows, (list, tuple)):
        # What has no shape afterwards is refused for that.
        with suppress(TypeError, ValueError):
            rows = np.asarray(rows, dtype=np.float32)
    shape = getattr(rows, "shape", None)
    if shape is None or len(shape) != 2 or shape[0] != count:
        got = f"{_describe(rows)}: return one array with a row for each"
        raise ShapeError(f"{source} must return rows [{count}, vocab] ({meaning}), got {got}")
    return rows.detach() if is_torch(rows) else rows


def _chances(acceptance: Any, count: int, source: str) -> list[float]:
    try:
        chances = [float(chance) for chance in acceptance]
    except (TypeError, ValueError):
        chances = []
    got = f"{_describe(acceptance)}: return probabilities, or leave it out"
    if len(chances) != count:
        raise ShapeError(f"{source} must return acceptance [{count}], a number a token, got {got}")
    if not all(0 <= chance <= 1 for chance in chances):
        raise ValueRangeError(f"the acceptance from {source} must be in [0, 1], got {got}")
    return chances


def _describe(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"{type(value).__name__} {list(shape)}" if shape is not None else repr(value)[:60]
