"""From an operation's name to the implementation that runs it, and the common frame around every run."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from . import _checks
from . import _numpy as np
from ._arrays import is_torch, namespace
from ._native import core, missing, watched
from .errors import BackendError
from .rng.streams import row_seeds
from .types import Array, Filters, Status

FILTERS = Filters._fields


class Operation(NamedTuple):
    """Where an operation lives, its arguments in order, and its outputs with the value a dead row gets."""

    package: str
    arguments: tuple[str, ...]
    outputs: Mapping[str, float]


_DRAFT_FILTERS = tuple(f"draft_{name}" for name in FILTERS)
_SAMPLE = ("logits", *FILTERS, "prev_tokens", "mask", "seed", "offset", "draft_index")
_NAN = float("nan")
_VERIFIED = {"num_accepted": 0, "next_token": -1, "tokens": -1, "num_emitted": 0, "eos_hit": False, "status": 0}

OPERATIONS = {
    "sample": Operation("sampling", _SAMPLE, {"tokens": -1, "status": 0}),
    "sample_with_logprobs": Operation(
        "sampling", _SAMPLE, {"tokens": -1, "logprobs": _NAN, "raw_logprobs": _NAN, "kept": 0, "status": 0}
    ),
    "sample_probs": Operation("sampling", ("probs", "seed", "offset"), {"tokens": -1, "status": 0}),
    "filter_logits": Operation(
        "sampling", ("logits", *FILTERS, "prev_tokens", "mask"), {"filtered": _NAN, "status": 0}
    ),
    "verify": Operation(
        "verification.chain",
        (
            *("target_logits", "draft_logits", "draft_tokens", "rule", *FILTERS, *_DRAFT_FILTERS),
            *("prev_tokens", "mask", "draft_mask", "num_draft_tokens", "eos", "seed", "offset"),
        ),
        _VERIFIED,
    ),
    "verify_probs": Operation(
        "verification.chain",
        (
            *("target_probs", "draft_probs", "draft_tokens", "rule", "uniform_accept", "uniform_sample"),
            *("seed", "offset", "num_draft_tokens", "eos"),
        ),
        _VERIFIED,
    ),
    "verify_greedy": Operation("verification.chain", ("target", "draft_tokens", "num_draft_tokens", "eos"), _VERIFIED),
}

BACKENDS: dict[str, tuple[str, ...]] = {
    "cpu": ("cpu", "eager"),
    "cuda": ("triton", "eager"),  # ROCm's tensors too
    "xpu": ("triton", "eager"),
}
"""Device type -> backends, best first. Other devices run eager."""

REFERENCE = "reference"
_TRITON_DEVICES = "runs on CUDA, ROCm and XPU devices, and for tests on CPU tensors under TRITON_INTERPRET=1"


def _without_triton() -> str | None:
    """Return why triton cannot be used, without importing it. Its distributions have many names, the module one."""
    remedy = "install draftproof[triton], on Linux"
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return f"triton is not importable: {remedy}"
    found = re.search(r"^__version__ = ['\"]((\d+)\.(\d+).*)['\"]", Path(spec.origin).read_text(encoding="utf-8"), re.M)
    # Older compilers lack options that fix the bits.
    if found is None or (int(found[2]), int(found[3])) < (3, 6):
        return f"triton must be 3.6 or newer, got {found[1] if found else 'no version'}: {remedy}"
    return None


MISSING = {name: reason for name, reason in (("cpu", missing), ("triton", _without_triton())) if reason}
"""Backends that this installation lacks, with the reason. ``auto`` passes over them, a name does not."""


def interpreted() -> bool:
    """Whether triton interprets its kernels, for tests. They then run on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def resolve(operation: str, device: str, backend: str) -> Any:
    """Return the function of an operation on a backend. ``auto`` takes the device's first; a name never falls back."""
    known = (*BACKENDS.get(device, ("eager",)), REFERENCE)
    if backend == "triton" and device == "cpu" and interpreted():
        known = (*known, backend)
    available = tuple(name for name in known if name not in MISSING)
    if backend == "auto":
        backend = available[0]
    if backend in MISSING:
        raise BackendError(f"backend={backend!r} is not available: {MISSING[backend]}. Here: {', '.join(available)}")
    if backend == "triton" and backend not in known:
        raise BackendError(f"backend='triton' {_TRITON_DEVICES}; the tensors are on {device}: move them there")
    if backend not in available:
        raise BackendError(
            f"backend must be one of auto, {', '.join(available)} for {operation} on {device}, got {backend!r}"
        )
    if backend == REFERENCE and device != "cpu":
        raise BackendError(f"backend='reference' runs on the CPU only, the tensors are on {device}: move them there")
    module = importlib.import_module(f".{OPERATIONS[operation].package}.{backend}", __package__)
    return getattr(module, operation)


def backends() -> dict[str, dict[str, str]]:
    """Return, for every operation and backend, ``"available"`` or the reason why it is not.

    Examples
    --------
    >>> import draftproof
    >>> draftproof.backends()["sample"]["eager"]
    'available'
    """
    names = [*dict.fromkeys(name for row in BACKENDS.values() for name in row), REFERENCE]
    row = {name: MISSING.get(name, "available") for name in names}
    if "triton" not in MISSING and not interpreted() and not _has_gpu():
        row["triton"] = f"it {_TRITON_DEVICES}; torch sees no such device"
    return {operation: dict(row) for operation in OPERATIONS}


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return any(getattr(torch, device).is_available() for device, row in BACKENDS.items() if "triton" in row)


def entry(operation: str, rows: Any, backend: Any) -> Callable[..., tuple[Array, ...] | None] | None:
    """Return the core's own entry for rows and a backend where nothing speaks against it; else None.

    It takes the arguments as the caller gave them, ``check`` last, and returns the outputs, or None where not all are
    surely valid or a row is dead. This goes round checks, dispatcher and registered op, which cost more than the work
    on a ready row. What is out of the ordinary, wrong, dead, elsewhere or watched is for the full path.
    """
    if watched(rows) or type(backend) is not str or backend != "auto" or BACKENDS["cpu"][0] != "cpu" or core is None:
        return None
    found: Callable[..., tuple[Array, ...] | None] = getattr(core, operation)
    return found


def run(operation: str, arguments: tuple[Any, ...], check: bool | None, backend: str) -> tuple[Array, ...]:
    """Check values, run the implementation, give dead rows their values, and raise where that is asked for."""
    spec = OPERATIONS[operation]
    named = dict(zip(spec.arguments, arguments, strict=True))
    rows = arguments[0]
    xp = namespace(rows)
    if backend == "triton" and not is_torch(rows):
        raise BackendError("backend='triton' takes torch tensors, got NumPy arrays: pass torch.from_numpy(array)")
    implementation = resolve(operation, xp.device_type(rows), backend)
    by_kernels = implementation.__module__.endswith(".triton")
    # IEEE infinities and NaN are part of the arithmetic; NumPy's warnings about them are not news.
    quiet = np.errstate(all="ignore") if sys.modules.get("numpy") else contextlib.nullcontext()
    with quiet, _subnormals(), _current(rows) if by_kernels else contextlib.nullcontext():
        frame = _kernels("kernels.parameters") if by_kernels and not xp.on_host(rows) else None
        named, bad = (frame or _checks).values(xp, named)
        if named.get("seed") is not None and named["seed"].ndim == 0:
            named["seed"] = _seed_of_each_row(xp, xp.joined(named["seed"], (), rows), rows, by_kernels)
        if backend == REFERENCE and is_torch(rows):
            result = _through_numpy(implementation, _packed(named))
        else:
            result = implementation(*_packed(named))
    if bad is not None and frame:
        frame.spoil(spec.outputs, result, bad)
    elif bad is not None:
        result = _with_bad_rows(xp, spec, result, bad)
    if check or (check is None and xp.on_host(rows)):
        _checks.raise_on_dead_rows(xp, operation, result[-1])
    return tuple(result)


def _current(rows: Array) -> Any:
    """Make the tensors' GPU the current one for a while: triton launches there."""
    kind = rows.device.type
    if kind not in ("cuda", "xpu"):
        return contextlib.nullcontext()
    return getattr(sys.modules["torch"], kind).device(rows.device)


@contextlib.contextmanager
def _subnormals() -> Iterator[None]:
    """Lift the caller's flush-to-zero, which torch sets and only torch can lift, while an operation runs."""
    torch: Any = sys.modules.get("torch")
    flushed = torch is not None and sys.float_info.min * 0.5 * 2.0 == 0.0
    if flushed:
        torch.set_flush_denormal(False)
    try:
        yield
    finally:
        if flushed:
            torch.set_flush_denormal(True)


def _kernels(module: str) -> Any:
    return importlib.import_module(f".{module}", __package__)


def _seed_of_each_row(xp: Any, seed: Array, rows: Array, by_kernels: bool) -> Array:
    if rows.shape[0] == 1:
        return seed[None]
    if by_kernels:
        return _kernels("rng.kernels.row_seeds").row_seeds(seed, rows.shape[0])
    return row_seeds(seed, xp.arange(rows.shape[0], like=rows))


def _packed(named: dict[str, Any]) -> list[Any]:
    """Group the filter parameters, which stand side by side, into ``Filters``."""
    packed: list[Any] = []
    for name, value in named.items():
        prefix = name.removesuffix("temperature")
        if prefix in ("", "draft_"):
            packed.append(Filters(*(named[prefix + field] for field in FILTERS)))
        elif name not in FILTERS and name not in _DRAFT_FILTERS:
            packed.append(value)
    return packed


def _with_bad_rows(xp: Any, spec: Operation, result: tuple[Array, ...], bad: Array) -> tuple[Array, ...]:
    filled = []
    for array, (name, value) in zip(result, spec.outputs.items(), strict=True):
        column = bad[:, None] if array.ndim == 2 else bad
        flagged = array | xp.int32(bad) * int(Status.BAD_PARAMETER) if name == "status" else None
        filled.append(xp.where(column, value, array) if flagged is None else flagged)
    return tuple(filled)


def _through_numpy(implementation: Any, arguments: list[Any]) -> tuple[Array, ...]:
    """Run a NumPy implementation on torch CPU tensors."""
    import torch

    def to_numpy(value: Any) -> Any:
        if isinstance(value, Filters):
            return Filters(*(to_numpy(field) for field in value))
        if not isinstance(value, torch.Tensor):
            return value
        return (value.float() if value.is_floating_point() else value).detach().numpy()

    return tuple(torch.from_numpy(np.ascontiguousarray(a)) for a in implementation(*(to_numpy(a) for a in arguments)))
