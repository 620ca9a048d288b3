"""Where drafts come from."""

from .base import Drafter, DraftState
from .model import ModelDrafter
from .ngram import NgramDrafter

__all__ = ["DraftState", "Drafter", "ModelDrafter", "NgramDrafter"]
