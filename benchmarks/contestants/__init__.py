"""The contestants of a cell: draftproof, the floors, and every peer that is installed."""

from __future__ import annotations

import importlib

from ..cells import Cell
from ..rows import Data
from . import own
from .base import Contestant, given

ENVIRONMENT = "make bench-env"
PEERS = {
    "numpy": ("numpy_rows", "pip install numpy"),
    "torch": ("torch_rows", "pip install torch==2.13.0"),
    "transformers": ("transformers_chain", "pip install transformers"),
    "vllm": ("vllm_sampler", f"{ENVIRONMENT}; it needs an environment of its own"),
    "llama.cpp": ("llama_cpp_chain", f"{ENVIRONMENT}; builds llama-cpp-python from source, without AMX"),
    "flashspec": ("flashspec_step", "pip install --no-deps flashspec==0.3.1 flashspec-asm-kernel==0.1.2"),
}
"""Name, module of this package, and how to get it."""


def missing() -> dict[str, str]:
    """Return the peers that cannot be imported: what is wrong, and how to get them."""
    found = {}
    for name, (module, remedy) in PEERS.items():
        try:
            importlib.import_module(f".{module}", __name__)
        # Libraries that do not suit one another fail in their own ways.
        except Exception as error:
            found[name] = f"{error}; get it with: {remedy}"
    return found


def contestants(cell: Cell, data: Data, absent: set[str] | frozenset[str] = frozenset()) -> list[Contestant]:
    """Return draftproof and the floors, then each peer that does the operation on such rows."""
    what = given(cell, data)
    found = own.contestants(what)
    for name, (module, _) in PEERS.items():
        if name not in absent:
            peer = importlib.import_module(f".{module}", __name__).contestant(name, what)
            found += [peer] if peer is not None else []
    return found
