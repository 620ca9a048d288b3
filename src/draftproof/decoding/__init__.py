"""The draft/verify loop around a target model."""

from .loop import Emitted, Generation, SpeculativeDecoder
from .stats import Stats

__all__ = ["Emitted", "Generation", "SpeculativeDecoder", "Stats"]
