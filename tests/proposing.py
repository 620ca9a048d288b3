"""What a drafter proposes next, in a form that tests compare."""

from __future__ import annotations

from typing import Any

import numpy as np

from draftproof import SamplingParams
from draftproof.types import Draft


def propose(state: Any, ids: list[int], width: int = 6) -> Draft:
    draft = state.propose(np.array(ids, np.int64), width, params=SamplingParams(), seed=0, offset=len(ids))
    assert draft.logits is None
    assert len(draft.tokens) == len(draft.acceptance) <= width
    assert all(0 <= chance <= 1 for chance in draft.acceptance)
    return draft
