"""The torch namespace of the registered operations. A build for the `kernels` loader has another one of its own."""

import torch

ops = torch.ops.draftproof


def add_op_namespace_prefix(op_name: str) -> str:
    """Return the qualified name of an operation."""
    return f"draftproof::{op_name}"
