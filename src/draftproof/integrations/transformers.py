"""transformers: causal language models as targets and as drafters, and drafts inside ``generate``."""

from __future__ import annotations

from .default_model import load_default_model, require

require("torch", "transformers")

from .causal_lm import CausalLM, check_tokenizers, model_drafter  # noqa: E402
from .speculative import Speculative  # noqa: E402

__all__ = ["CausalLM", "Speculative", "check_tokenizers", "load_default_model", "model_drafter"]
