"""What tests of ``Speculative`` share: a toy model, batches, and the comparison with ``generate``."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import zoo  # noqa: E402
from draftproof.integrations.transformers import Speculative  # noqa: E402

VOCAB = 13


TOY = zoo.toy()


ONE = zoo.batch([[token % VOCAB for token in row] for row in zoo.prompts(1)])


FIVE = zoo.batch([[token % VOCAB for token in row] for row in zoo.prompts(5)])


BATCHES = pytest.mark.parametrize("inputs", [ONE, FIVE], ids=["one", "five"])


def generate(speculative: Any = None, inputs: dict[str, Any] = FIVE, model: Any = TOY, **arguments: Any) -> Any:
    settings = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0} | arguments
    return model.generate(**inputs, custom_generate=speculative, **settings)


def guessing(inputs: dict[str, Any] = FIVE, **arguments: Any) -> Speculative:
    """Speculative decoding with drafts that are often right, and go on after a criterion was met."""
    arguments = arguments | {"stopping_criteria": None}
    sampled = arguments.get("do_sample", False)
    seed = 3 if sampled else None
    truth = generate(Speculative(None, seed=seed) if sampled else None, inputs, **arguments)
    return Speculative(zoo.Guesser(zoo.unpadded(truth, inputs)), k=4, seed=seed)


def check(inputs: dict[str, Any] = FIVE, **arguments: Any) -> Speculative:
    """Compare output with and without drafts, greedy with that of `generate` itself; drafts must have been accepted."""
    speculative = guessing(inputs, **arguments)
    plain = Speculative(None, seed=3) if arguments.get("do_sample") else None
    with_drafts, without = generate(speculative, inputs, **arguments), generate(plain, inputs, **arguments)
    assert with_drafts.tolist() == without.tolist()
    assert sum(stats.accepted for stats in speculative.stats) > 0
    return speculative
