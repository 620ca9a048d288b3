"""The draft/verify loop around a target model."""

from .draft_length import COSTS, DraftLength, FixedLength
from .loop import Emitted, Generation, SpeculativeDecoder
from .stats import Stats

__all__ = ["COSTS", "DraftLength", "Emitted", "FixedLength", "Generation", "SpeculativeDecoder", "Stats"]
