"""transformers: causal language models as targets and as drafters."""

from __future__ import annotations

from .causal_lm import CausalLM, check_tokenizers, model_drafter
from .default_model import load_default_model

__all__ = ["CausalLM", "check_tokenizers", "load_default_model", "model_drafter"]
