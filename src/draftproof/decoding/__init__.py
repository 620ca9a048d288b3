"""The draft/verify loop around a target model."""

from .draft_length import COSTS, DraftLength, FixedLength, LengthPolicy, LengthState, interpolate
from .generation import Emitted, Generation
from .loop import SpeculativeDecoder
from .stats import Stats

__all__ = [
    "COSTS",
    "DraftLength",
    "Emitted",
    "FixedLength",
    "Generation",
    "LengthPolicy",
    "LengthState",
    "SpeculativeDecoder",
    "Stats",
    "interpolate",
]
