"""Hypothesis strategies for laws, models and rows of logits that tend to break samplers. Needs hypothesis."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ..types import Array
from .speculation import MODES, Model

_HARD = (0.0, -0.0, 1.0, -1.0, 1e-45, -1e-38, 88.0, -104.0, 3e38, -3e38, float("-inf"))


@st.composite
def distributions(draw: st.DrawFn, vocab: int) -> list[Fraction]:
    """Laws over ``vocab`` ids as Fractions: zeros, one-hot laws, near ties and tiny masses included.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(distributions(2), lambda law: law[0] > 0)
    [Fraction(1, 1), Fraction(0, 1)]
    """
    masses = st.one_of(
        st.integers(0, 4), st.sampled_from([0, 1]), st.integers(1000, 1001), st.sampled_from([1, 1 << 24, 1 << 40])
    )
    row = draw(st.lists(masses, min_size=vocab, max_size=vocab).filter(any))
    return [Fraction(m, sum(row)) for m in row]


def models(vocab: int, drafted: int, **features: Any) -> st.SearchStrategy[Model]:
    """Pairs of a target and a draft model, of every mode; ``features`` are fields of ``Model``.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(models(3, 2, ragged=True), lambda model: model.mode == "near").drafted
    2
    """
    return st.builds(
        Model,
        vocab=st.just(vocab),
        drafted=st.just(drafted),
        mode=st.sampled_from(MODES),
        seed=st.integers(0, 2**32 - 1),
        **{name: st.just(value) for name, value in features.items()},
    )


@st.composite
def logits(draw: st.DrawFn, batch: int, vocab: int) -> Array:
    """Float32 rows ``[batch, vocab]`` without NaN: ties, signed zeros, subnormals, huge values and -inf.

    Every row has at least one finite logit.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(logits(1, 2), lambda rows: rows[0, 0] == rows[0, 1])
    array([[0., 0.]], dtype=float32)
    """
    tied = st.integers(-3, 3).map(float)
    value = st.one_of(tied, st.floats(-30, 30, width=32), st.sampled_from(_HARD))
    rows = draw(st.lists(st.lists(value, min_size=vocab, max_size=vocab), min_size=batch, max_size=batch))
    array = np.array(rows, np.float32).reshape(batch, vocab)
    dead = np.isneginf(array).all(axis=1)
    array[dead, 0] = 0.0
    return array
