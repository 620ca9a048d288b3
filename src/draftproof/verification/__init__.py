"""Drafted tokens in, tokens of the target's law out."""

from .chain import verify, verify_greedy, verify_probs

__all__ = ["verify", "verify_greedy", "verify_probs"]
