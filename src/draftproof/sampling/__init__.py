"""Logits or probabilities in, one token per row out."""

from .api import filter_logits, random_seeds, sample, sample_probs, sample_with_logprobs

__all__ = ["filter_logits", "random_seeds", "sample", "sample_probs", "sample_with_logprobs"]
