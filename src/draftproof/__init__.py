"""draftproof turns logits into tokens: exact sampling and exact verification of speculative drafts.

``sample`` and ``verify`` are the two main functions; ``SpeculativeDecoder`` runs the whole draft/verify loop.
"""

from ._dispatch import backends
from ._native import set_num_threads
from .decoding import SpeculativeDecoder
from .errors import BackendError, DtypeError, ShapeError, ValueRangeError
from .sampling import filter_logits, random_seeds, sample, sample_probs, sample_with_logprobs
from .types import Draft, SampleResult, SamplingParams, Status, VerifyResult
from .verification import verify, verify_greedy, verify_probs

__version__ = "0.1.0.dev0"

__all__ = [
    "BackendError",
    "Draft",
    "DtypeError",
    "SampleResult",
    "SamplingParams",
    "ShapeError",
    "SpeculativeDecoder",
    "Status",
    "ValueRangeError",
    "VerifyResult",
    "backends",
    "filter_logits",
    "random_seeds",
    "sample",
    "sample_probs",
    "sample_with_logprobs",
    "set_num_threads",
    "verify",
    "verify_greedy",
    "verify_probs",
]
