"""Measure how a real model's logits fall with their rank, and keep that in benchmarks/profiles.npy.

    python -m benchmarks.profiles

It needs the extra ``transformers`` and fetches SmolLM2-135M once. The array is float32 [rows, knots]. Rows are
positions in this repository's own prose and code; column j is the logit at rank ``knots(49152)[j]``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_name("profiles.npy")
TEXTS = ("README.md", "src/draftproof/sampling/api.py", "docs/decisions.md")
TOKENS, EVERY = 384, 12


def knots(vocab: int) -> np.ndarray:
    """Return the ranks, from 1 to ``vocab`` and nearly even in their logarithm, at which a profile is kept."""
    return np.unique(np.geomspace(1, vocab, 256).round().astype(np.int64))


def main() -> None:
    import torch

    from draftproof.integrations.transformers import load_default_model

    model, tokenizer = load_default_model()
    profiles = []
    for text in TEXTS:
        ids = tokenizer((ROOT / text).read_text(), return_tensors="pt").input_ids[:, :TOKENS]
        with torch.no_grad():
            logits = model(ids).logits[0, ::EVERY]
        falling = logits.sort(descending=True).values.numpy()
        profiles.append(falling[:, knots(falling.shape[1]) - 1])
    np.save(FILE, np.concatenate(profiles).astype(np.float32))


if __name__ == "__main__":
    main()
