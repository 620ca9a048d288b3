"""Where drafts come from."""

from .base import Drafter, DraftState
from .corpus import CorpusDrafter
from .mix import MixDrafter
from .model import ModelDrafter
from .ngram import NgramDrafter
from .recycling import RecyclingDrafter
from .suffix import SuffixDrafter

__all__ = [
    "CorpusDrafter",
    "DraftState",
    "Drafter",
    "MixDrafter",
    "ModelDrafter",
    "NgramDrafter",
    "RecyclingDrafter",
    "SuffixDrafter",
]
