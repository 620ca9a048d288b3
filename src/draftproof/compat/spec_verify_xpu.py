"""spec-verify-xpu under its own name: verification of a batch of drafts from probabilities, on any device."""

from __future__ import annotations

from ..types import Array
from ..verification.chain import api as chain

__all__ = ["verify"]


def verify(
    draft_tokens: Array,
    draft_probs: Array,
    target_probs: Array,
    uniform_accept: Array | None = None,
    uniform_sample: Array | None = None,
) -> tuple[Array, Array]:
    """Accept the longest prefix of each draft that rejection sampling keeps, then draw one more token.

    Parameters
    ----------
    draft_tokens
        ``[B, K]`` int64 (int32 and uint32 work too).
    draft_probs, target_probs
        ``[B, K, V]`` and ``[B, K+1, V]`` float32; each row counts relative to its own sum.
    uniform_accept, uniform_sample
        ``[B, K]`` and ``[B, K+1]`` in [0, 1): position i is accepted by ``uniform_accept[:, i]``; the token after ``a``
        accepted ones is drawn with ``uniform_sample[:, a]``. What is missing comes from torch's default generator, so
        ``torch.manual_seed`` makes it repeatable.

    Returns
    -------
    accepted, next_token
        int64 ``[B]`` in [0, K], and int64 ``[B]``: the correction, or the bonus where all K were accepted.

    Raises
    ------
    ShapeError, DtypeError, ValueRangeError
        As ``draftproof.verify_probs`` does.

    Notes
    -----
    The arrays may be NumPy arrays. ``torch.compile(fullgraph=True)`` traces the call; Inductor then draws
    missing uniforms its own way: other numbers from the same seed. The rule is that of Leviathan et al. 2023.

    Examples
    --------
    >>> import torch
    >>> import draftproof.compat.spec_verify_xpu as sv
    >>> target = torch.eye(3)[None]
    >>> accepted, next_token = sv.verify(torch.tensor([[0, 2]]), torch.full((1, 2, 3), 1 / 3), target)
    >>> accepted.tolist(), next_token.tolist()
    ([1], [1])
    """
    if uniform_accept is None:
        uniform_accept = _uniforms(draft_tokens.shape, target_probs)
    if uniform_sample is None:
        uniform_sample = _uniforms(target_probs.shape[:2], target_probs)
    result = chain.verify_probs(
        target_probs,
        draft_probs,
        draft_tokens,
        rule="token",
        uniform_accept=uniform_accept,
        uniform_sample=uniform_sample,
    )
    return result.num_accepted, result.next_token


def _uniforms(shape: tuple[int, ...], like: Array) -> Array:
    import torch

    if isinstance(like, torch.Tensor):
        return torch.rand(shape, device=like.device)
    return torch.rand(shape).numpy()
