"""The filters, one file each, in the order they apply: penalty, mask, (temperature), top-k, top-p, min-p."""

from .mask import apply_mask, unpack
from .min_p import above_min_p
from .penalty import penalise
from .top_k import keep_top_k
from .top_p import check_winner, keep_top_p

__all__ = ["above_min_p", "apply_mask", "check_winner", "keep_top_k", "keep_top_p", "penalise", "unpack"]
