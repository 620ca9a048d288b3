"""A test of counts against a law that says what it could have seen."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..types import Array

_LEAST_EXPECTED = 5.0


class GTest(NamedTuple):
    """Outcome of ``g_test``."""

    statistic: float
    cells: int
    p_value: float
    detectable: float


def g_test(counts: Array, probabilities: Array, *, alpha: float = 1e-6, power: float = 0.99) -> GTest:
    """Test counts of independent draws against a law by the log-likelihood ratio (G-test). Needs SciPy.

    Cells are merged, rarest first, until at least 5 draws are expected in each.

    Parameters
    ----------
    counts : int [V]
        How often each outcome was drawn.
    probabilities : float [V]
        The law, normalised by its own sum.
    alpha, power
        The level, and the power at which ``detectable`` is computed.

    Returns
    -------
    GTest
        ``statistic``, ``cells`` after merging, ``p_value`` (0 if an outcome of probability 0 was drawn), and
        ``detectable``: a law at this total variation from the given one, measured on the merged cells, is rejected at
        level ``alpha`` with at least the given power. Write it beside the test.

    Raises
    ------
    ValueError
        If the law has no mass, or there are too few draws for two cells although two outcomes are possible.

    Exactness
    ---------
    The p-value is the chi-square limit's. By Cauchy and Schwarz a deviation has total variation at most half its
    chi-square distance, so the noncentral chi-square law turns ``power`` into a bound in total variation.

    Examples
    --------
    >>> fair = g_test([5_060, 4_940], [0.5, 0.5])
    >>> fair.p_value > 0.2, g_test([5_600, 4_400], [0.5, 0.5]).p_value < 1e-6
    (True, True)
    >>> round(fair.detectable, 3)
    0.036
    """
    counts, law = np.asarray(counts, np.float64), np.asarray(probabilities, np.float64)
    total = counts.sum()
    expected = total * law / law.sum()
    if not law.sum() > 0:
        raise ValueError("probabilities must have a positive sum")
    impossible = counts[law == 0].sum() > 0
    seen, expected = _merge(counts[law > 0], expected[law > 0])
    if len(expected) < 2:
        if (law > 0).sum() > 1:
            raise ValueError(f"{int(total)} draws are too few to test this law: fewer than 5 expected outside one cell")
        return GTest(0.0, 1, 0.0 if impossible else 1.0, 0.0)
    drawn = seen > 0
    statistic = float(2 * (seen[drawn] * np.log(seen[drawn] / expected[drawn])).sum())
    from scipy.stats import chi2

    p_value = 0.0 if impossible else float(chi2.sf(statistic, len(expected) - 1))
    return GTest(statistic, len(expected), p_value, detectable_deviation(int(total), len(expected), alpha, power))


def detectable_deviation(draws: int, cells: int, alpha: float = 1e-6, power: float = 0.99) -> float:
    """Return the total variation that a test of ``draws`` over ``cells`` rejects with the given power. Needs SciPy.

    Examples
    --------
    >>> round(detectable_deviation(200_000, 50), 4)
    0.0118
    """
    from scipy.optimize import brentq
    from scipy.stats import chi2, ncx2

    critical = chi2.isf(alpha, cells - 1)
    noncentrality = brentq(lambda x: ncx2.sf(critical, cells - 1, x) - power, 1e-9, 10 * (critical + 100))
    return float(np.sqrt(noncentrality / draws) / 2)


def _merge(counts: Array, expected: Array) -> tuple[Array, Array]:
    order = np.argsort(expected, kind="stable")
    counts, expected = counts[order], expected[order]
    rare = int(np.searchsorted(np.cumsum(expected), _LEAST_EXPECTED)) + 1 if expected[0] < _LEAST_EXPECTED else 1
    # The rarest together, then whatever is still too rare beside them.
    while rare < len(expected) and expected[rare] < _LEAST_EXPECTED:
        rare += 1
    return np.append(counts[:rare].sum(), counts[rare:]), np.append(expected[:rare].sum(), expected[rare:])
