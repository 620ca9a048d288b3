"""Verification of a chain of drafts: the rules token, block, match and greedy."""

from .api import verify, verify_greedy, verify_probs

__all__ = ["verify", "verify_greedy", "verify_probs"]
