"""Derive the polynomials of ``draftproof.numerics.constants``: ``python docs/fit_constants.py`` prints them.

Each polynomial has the least possible relative error on its interval, found by Lawson's iteration: weighted least
squares on Chebyshev points, where the weights of the points with large errors grow until all peaks are equally high
(C. L. Lawson, "Contributions to the theory of linear least maximum approximation", 1961). The coefficients are then
rounded to float32. Needs NumPy only.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Target(NamedTuple):
    """``function(x)`` without its constant term is approximated by ``x * polynomial(x)``."""

    function: Callable[[Any], Any]
    constant: float
    low: float
    high: float
    points: int
    terms: int


TARGETS = {
    "EXP2": Target(np.exp2, 1.0, -1 / 2, 1 / 2, 4001, 6),
    "LOG1P": Target(np.log1p, 0.0, -1 / 4, 1 / 2, 6001, 9),
    "LOG2": Target(lambda x: np.log1p(x) / math.log(2), 0.0, -1 / 4, 1 / 2, 6001, 9),
}
ITERATIONS = 200


def fit(target: Target) -> tuple[float, ...]:
    """Return the coefficients, lowest power first, as exact float32 values."""
    middle, radius = (target.low + target.high) / 2, (target.high - target.low) / 2
    x = middle - radius * np.cos(np.linspace(0, np.pi, target.points))
    # At x = 0 the form is exact, and a relative error has no meaning.
    x = x[np.abs(x) > 1e-9]
    value = target.function(x)
    powers = np.stack([x**k for k in range(1, target.terms + 1)], axis=1)
    coefficients = minimax(powers, value - target.constant, 1 / np.abs(value))
    return tuple(float(np.float32(c)) for c in coefficients)


def minimax(columns: Any, wanted: Any, scale: Any) -> Any:
    """Return the combination of columns with the least largest ``|scale * (columns @ c - wanted)|``."""
    weights = np.ones(len(wanted))
    best, least = None, math.inf
    for _ in range(ITERATIONS):
        root = np.sqrt(weights) * scale
        coefficients = np.linalg.lstsq(columns * root[:, None], wanted * root, rcond=None)[0]
        error = np.abs((columns @ coefficients - wanted) * scale)
        if error.max() < least:
            best, least = coefficients, error.max()
        weights *= error / error.max() + 1e-12
        weights /= weights.sum()
    return best


def main() -> None:
    """Print the constants as they stand in ``constants.py``."""
    for name, target in TARGETS.items():
        lines = "".join(f"    {c!r},\n" for c in fit(target))
        sys.stdout.write(f"{name} = (\n{lines})\n")


if __name__ == "__main__":
    main()
