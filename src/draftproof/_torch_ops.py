"""The operations registered with torch: one op per contract, with its fake and its vmap rule.

A compiled graph sees these ops only, never what is inside, so compilation cannot change a bit. Imported on the first
torch tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from ._dispatch import OPERATIONS, run
from ._ops import add_op_namespace_prefix, ops
from .rng.streams import row_seeds
from .types import Array

_REQUIRED = {"logits", "probs", "target_logits", "target_probs", "target", "draft_tokens", "temperature"} | {
    "draft_temperature",
    "num_draft_tokens",
    "offset",
}
_DTYPES = {
    "logprobs": torch.float32,
    "raw_logprobs": torch.float32,
    "filtered": torch.float32,
    "eos_hit": torch.bool,
    "status": torch.int32,
}


def call_op(operation: str, arguments: tuple[Any, ...], check: bool | None, backend: str) -> tuple[Array, ...]:
    """Call a registered op. No gradient flows: tokens have none, and that of the filtered logits would be partial."""
    with torch.no_grad():
        return getattr(ops, operation)(*arguments, check, backend)


def _schema(operation: str) -> str:
    spec = OPERATIONS[operation]
    typed = [
        f"str {name}" if name == "rule" else f"Tensor{'' if name in _REQUIRED else '?'} {name}"
        for name in spec.arguments
    ]
    outputs = ", ".join("Tensor" for _ in spec.outputs)
    return f"({', '.join(typed)}, bool? check, str backend) -> ({outputs})"


def _fake(operation: str) -> Any:
    spec = OPERATIONS[operation]

    def fake(*arguments: Any) -> tuple[Array, ...]:
        rows = arguments[0]
        tokens = arguments[spec.arguments.index("draft_tokens")] if "draft_tokens" in spec.arguments else None

        def shape(name: str) -> tuple[int, ...]:
            if name == "filtered":
                return tuple(rows.shape)
            if name == "tokens" and tokens is not None:
                return (rows.shape[0], tokens.shape[1] + 1)
            return (rows.shape[0],)

        return tuple(rows.new_empty(shape(name), dtype=_DTYPES.get(name, torch.int64)) for name in spec.outputs)

    return fake


def _vmap(operation: str) -> Any:
    """The batch axis of vmap joins the operation's own: every argument is per row."""
    spec = OPERATIONS[operation]

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        *tensors, check, backend = arguments
        size = info.batch_size
        first = tensors[0]
        rows = first.shape[0] if in_dims[0] is None else first.movedim(in_dims[0], 0).shape[1]

        def merge(name: str, value: Any, dim: int | None) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            stacked = value.movedim(dim, 0) if dim is not None else value.expand(size, *value.shape)
            if name == "seed" and stacked.ndim == 1:
                number = torch.arange(rows, device=value.device)
                stacked = row_seeds(stacked[:, None], number[None, :])
            return stacked.reshape(size * rows, *stacked.shape[2:])

        merged = [merge(*each) for each in zip(spec.arguments, tensors, in_dims, strict=False)]
        results = call_op(operation, tuple(merged), check, backend)
        return tuple(r.reshape(size, rows, *r.shape[1:]) for r in results), tuple(0 for _ in results)

    return rule


def _register(operation: str) -> None:
    def kernel(*arguments: Any) -> tuple[Array, ...]:
        *tensors, check, backend = arguments
        return run(operation, tuple(tensors), check, backend)

    name = add_op_namespace_prefix(operation)
    torch.library.define(name, _schema(operation))
    torch.library.impl(name, "default", kernel)
    torch.library.register_fake(name, _fake(operation))
    torch.library.register_vmap(name, _vmap(operation))


for _operation in OPERATIONS:
    _register(_operation)
