"""The kit that shows whether a rule is lossless, for the library's rules and for yours.

``enumerate_law`` gives the law of a random program as Fractions; ``Uniforms`` decides the same program from uniforms
and keeps the margin of each decision. ``check_law`` compares speculation with plain sampling, ``check_grid`` an
implementation of ``verify_probs`` with the rules; ``MUTANTS`` are the systems that the checks must tell from a right
one. ``TableModel`` and ``decode`` are for drafters and loops. ``draftproof.testing.strategies`` needs hypothesis,
``g_test`` SciPy.
"""

from ..rng.uniforms import Choose, Uniforms, counter
from .checks import check_batch, check_kept, check_law, models
from .enumerate_law import ReusedDraw, enumerate_law, midpoints
from .goodness_of_fit import GTest, detectable_deviation, g_test
from .grid import check_grid
from .mutants import MUTANTS, Mutant
from .speculation import Model, System
from .table_model import TableModel, decode

__all__ = [
    "MUTANTS",
    "Choose",
    "GTest",
    "Model",
    "Mutant",
    "ReusedDraw",
    "System",
    "TableModel",
    "Uniforms",
    "check_batch",
    "check_grid",
    "check_kept",
    "check_law",
    "counter",
    "decode",
    "detectable_deviation",
    "enumerate_law",
    "g_test",
    "midpoints",
    "models",
]
