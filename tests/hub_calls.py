"""Calls that the packages of the `kernels` loader and the library both take, by package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")


def plain(value: Any) -> Any:
    """Results as Python objects, with the kind and dtype of each array."""
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if hasattr(value, "dtype"):
        return [type(value).__name__, str(value.dtype), value.tolist()]
    return value


def normal(*shape: int, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def probs(*shape: int, seed: int = 0) -> Any:
    return normal(*shape, seed=seed).softmax(-1)


def ids(*shape: int, below: int, seed: int = 0) -> Any:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


FILTERED = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}
DRAFTED = (probs(2, 5, 100), probs(2, 4, 100, seed=1), ids(2, 4, below=100))


def speculate(m: Any) -> Any:
    rows = {"temperature": 0.8, "top_k": 50}
    target, draft = m.filter_logits(normal(2, 100), **rows), m.filter_logits(normal(2, 100, seed=1), **rows)
    tokens = m.sample(draft, seed=3)[:, None]
    return m.verify(torch.stack([target, target], 1), draft[:, None], tokens, seed=3, offset=1)


def seeded(m: Any) -> Any:
    torch.manual_seed(5)
    return m.verify(DRAFTED[2], DRAFTED[1], DRAFTED[0])


def decode(m: Any, greedy: bool, prompt: Any, **options: Any) -> Any:
    """Draft and verify with tables of probabilities as models; the target's arrays are torch's, or NumPy's."""
    torch_too = isinstance(prompt, torch.Tensor)
    target, draft = probs(50, 50) ** 4, probs(50, 50, seed=1) ** 4

    def draft_step(prefix: Any, k: int) -> Any:
        tokens = [int(prefix[-1])]
        for _ in range(k):
            tokens.append(int(draft[tokens[-1]].argmax()))
        return tokens[1:], draft[tokens[:-1]]

    def target_step(prefix: Any, proposed: Any) -> Any:
        assert type(prefix) is type(prompt)
        rows = target[[int(prefix[-1]), *map(int, proposed)]]
        return rows if torch_too else rows.numpy()

    return m.SpeculativeDecoder(draft_step, target_step, k=4, greedy=greedy, **options).generate(prompt, max_new=30)


one = (probs(5, 100), probs(4, 100, seed=1), ids(4, below=100))
CALLS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "spec-decode-ops": {
        "sample": lambda m: [m.sample(normal(3, 500), **FILTERED, seed=1234, offset=step) for step in range(3)],
        "sample, defaults": lambda m: m.sample(normal(3, 500)),
        "sample, bfloat16": lambda m: m.sample(normal(3, 500).bfloat16(), top_k=50, seed=1),
        "sample, greedy": lambda m: m.sample(normal(3, 500), temperature=0),
        "sample, every parameter": lambda m: m.sample(
            normal(3, 500), 0.8, 50, 0.95, 0.01, 1.2, torch.tensor([[4, 5, -1]] * 3), 1234, 7
        ),
        "sample, [B]": lambda m: m.sample(
            normal(3, 500), torch.tensor([0.5, 0.0, 2.0]), torch.tensor([0, 4, 40]), seed=torch.tensor([1, 2, 3])
        ),
        "filter_logits": lambda m: m.filter_logits(normal(3, 500), **FILTERED, min_p=0.01),
        "verify": lambda m: m.verify(
            normal(2, 5, 100), normal(2, 4, 100, seed=1), DRAFTED[2], temperature=0.8, seed=1234, offset=7
        ),
        "filtered speculation": speculate,
    },
    "spec-verify-xpu": {
        "verify": seeded,
        "verify, uniforms": lambda m: m.verify(
            DRAFTED[2],
            DRAFTED[1],
            DRAFTED[0],
            uniform_accept=torch.full((2, 4), 0.25),
            uniform_sample=torch.full((2, 5), 0.5),
        ),
    },
    "spec-verify": {
        "verify_greedy": lambda m: m.verify_greedy(one[0], one[0][:4].argmax(-1)),
        "verify_greedy, NumPy": lambda m: m.verify_greedy(one[0].numpy(), one[2].numpy()),
        "verify": lambda m: [m.verify(*one, seed=seed) for seed in range(20)],
        "accept, uniforms": lambda m: m.accept(*one, torch.full((4,), 0.25), torch.full((5,), 0.5)),
        "verify, generator": lambda m: m.verify(*one, generator=torch.Generator().manual_seed(1)),
        "verify, NumPy": lambda m: m.verify(*(a.numpy()[::-1] for a in one), generator=np.random.default_rng(1)),
        "decode greedily": lambda m: decode(m, True, [7, 8]),
        "decode an array": lambda m: decode(m, True, np.array([7, 8])),
        "decode a tensor": lambda m: decode(m, False, torch.tensor([7, 8]), seed=1),
        "decode, generator": lambda m: decode(m, False, [7, 8], generator=torch.Generator().manual_seed(2)),
    },
    "draftproof": {
        "sample": lambda m: m.sample(normal(3, 500), seed=1, **FILTERED),
        "sample, NumPy": lambda m: m.sample(normal(3, 500).numpy(), seed=1),
        "sample_with_logprobs": lambda m: m.sample_with_logprobs(normal(3, 500), seed=1, top_k=9),
        "sample_probs": lambda m: m.sample_probs(probs(3, 500), seed=1),
        "filter_logits": lambda m: m.filter_logits(normal(3, 500), min_p=0.1),
        "verify, block": lambda m: m.verify(
            normal(2, 5, 100), normal(2, 4, 100, seed=1), DRAFTED[2], rule="block", seed=1
        ),
        "verify, match": lambda m: m.verify(normal(2, 5, 100), None, DRAFTED[2], rule="match", seed=1, top_p=0.9),
        "verify_probs": lambda m: m.verify_probs(*DRAFTED, seed=1),
        "verify_greedy": lambda m: m.verify_greedy(DRAFTED[0], DRAFTED[2], eos=3),
        "drafters": lambda m: m.decoding.SpeculativeDecoder(
            m.drafters.NgramDrafter(), lambda _, proposed: np.eye(9)[[3] * (len(proposed) + 1)], greedy=True
        ).generate([1, 2, 1], max_new=9),
        "reference": lambda m: m.sample(normal(2, 50), seed=1, backend="reference"),
    },
}
