"""NumPy, imported when it is first used: rows of torch need none of it.

``from . import _numpy as np`` stands for ``import numpy as np``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        value = globals()[name] = getattr(importlib.import_module("numpy"), name)
        return value
