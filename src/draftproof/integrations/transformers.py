"""transformers: causal language models as targets and as drafters, and drafts inside ``generate``."""

from __future__ import annotations

from .causal_lm import CausalLM, check_tokenizers, model_drafter
from .default_model import load_default_model
from .speculative import Speculative

__all__ = ["CausalLM", "Speculative", "check_tokenizers", "load_default_model", "model_drafter"]
