"""``generate`` with ``Speculative`` on models of many kinds: tokens of greedy search, tokens of ``sample``, the law."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import zoo  # noqa: E402
from draftproof import SamplingParams, sample  # noqa: E402
from draftproof.drafters import MixDrafter, ModelDrafter, NgramDrafter, RecyclingDrafter, SuffixDrafter  # noqa: E402
from draftproof.integrations.default_model import NAME, cache_folder, load_default_model  # noqa: E402
from draftproof.integrations.transformers import CausalLM, Speculative, model_drafter  # noqa: E402
from draftproof.testing import g_test  # noqa: E402

NEW = 24
ONE, FIVE = zoo.batch(zoo.prompts(1)), zoo.batch(zoo.prompts(5))


def generate(model: Any, inputs: dict[str, Any], speculative: Any = None, **arguments: Any) -> Any:
    settings = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0} | arguments
    return model.generate(**inputs, custom_generate=speculative, **settings)


def drafters(name: str) -> dict[str, Any]:
    model, draft = zoo.model(name), zoo.draft_model(name)
    return {
        "ngram": NgramDrafter(min_ngram=1),
        "suffix": SuffixDrafter(),
        "recycling": RecyclingDrafter(),
        "mix": MixDrafter(),
        "model": model_drafter(draft, model),
        "argmax": model_drafter(draft, model, noise=None),
    }


class Recorded:
    """A drafter that keeps every draft with what it followed, for each sequence in turn."""

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter
        self.has_q, self.noise = drafter.has_q, drafter.noise
        self.drafts: list[list[tuple[int, list[int]]]] = []

    def start(self) -> Recorded:
        started = Recorded(self.drafter)
        started.state, started.log = self.drafter.start(), []
        self.drafts.append(started.log)
        return started

    def propose(self, context: Any, width: int, **arguments: Any) -> Any:
        draft = self.state.propose(context, width, **arguments)
        self.log.append((len(context), draft.tokens.tolist()))
        return draft

    def accept(self, *arguments: Any) -> None:
        self.state.accept(*arguments)


# transformers issues 30042 and 30413: assisted greedy search differed from greedy search; 29769: batches.
@pytest.mark.parametrize("inputs", [ONE, FIVE], ids=["one", "five"])
@pytest.mark.parametrize("name", zoo.CONFIGS)
def test_greedy_equals_generate(name: str, inputs: dict[str, Any]) -> None:
    """And each draft is accepted as far as it is the output."""
    model = zoo.model(name)
    expected = generate(model, inputs)
    rows = zoo.unpadded(expected, inputs)
    assert generate(model, inputs, Speculative()).tolist() == expected.tolist()
    assert generate(model, inputs, Speculative(None)).tolist() == expected.tolist()
    for kind, drafter in drafters(name).items():
        recorded = Recorded(drafter)
        speculative = Speculative(recorded, k=4)
        assert generate(model, inputs, speculative).tolist() == expected.tolist(), kind
        for row, drafts, stats in zip(rows, recorded.drafts, speculative.stats, strict=True):
            matches = [
                list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(draft, row[at:], strict=False)))
                for at, draft in drafts
            ]
            assert stats.accepted == sum(map(len, matches))
            assert stats.drafted == sum(len(draft) for _, draft in drafts)
        assert sum(stats.accepted for stats in speculative.stats) > 0 or kind in ("ngram", "suffix", "recycling", "mix")


def unequal_draws(output: Any, inputs: dict[str, Any], model: Any, params: SamplingParams, seeds: Any) -> list[str]:
    """Return where `sample` on the logits of one-token forwards draws another token than was emitted.

    On the logits that the emitted token was verified with it must draw that token.
    """
    unequal = []
    for b, (row, seed) in enumerate(zip(zoo.unpadded(output.sequences, inputs), seeds, strict=True)):
        one = CausalLM(model)
        start = int(inputs["attention_mask"][b].sum())
        for length in range(start, len(row)):
            drawn = [
                sample(
                    logits,
                    **asdict(params),
                    prev_tokens=torch.tensor([row[:length]]),
                    seed=int(seed),
                    offset=length,
                ).item()
                for logits in (output.logits[length - start][b : b + 1], one(row[:length], []))
            ]
            assert drawn[0] == row[length]
            if drawn[1] != row[length]:
                unequal.append(f"{type(model).__name__} row {b} at {length}: {drawn}")
    return unequal


def test_match_equals_sampling() -> None:
    """Rounding of forwards over several tokens may change a draw: at most one of 2,000."""
    params = SamplingParams(1.1, 40, 0.95, None, 1.1)
    arguments = {"do_sample": True, "temperature": 1.1, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.1}
    arguments |= {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 56}
    tokens, unequal, seeds = 0, [], np.arange(5) + 70
    for name, inputs in itertools.product(zoo.CONFIGS, (ONE, FIVE)):
        speculative = Speculative(zoo.draft_model(name), rule="match", k=4, seed=seeds[: len(inputs["input_ids"])])
        output = generate(zoo.model(name), inputs, speculative, **arguments)
        assert sum(stats.accepted for stats in speculative.stats) > 0
        tokens += 56 * len(inputs["input_ids"])
        unequal += unequal_draws(output, inputs, zoo.model(name), params, seeds[: len(inputs["input_ids"])])
    print(f"{len(unequal)} of {tokens} draws differ: {unequal}")  # noqa: T201
    assert tokens >= 2000
    assert len(unequal) <= tokens // 2000


# transformers issue 48280: the cache of a sliding window grew while the past was recorded.
@pytest.mark.parametrize("inputs", [ONE, FIVE], ids=["one", "five"])
@pytest.mark.parametrize("name", ["gemma", "mistral"])
def test_sliding_window(name: str, inputs: dict[str, Any]) -> None:
    model = zoo.model(name)
    speculative = Speculative(zoo.draft_model(name), k=4)
    output = generate(model, inputs, speculative, max_new_tokens=70, return_dict_in_generate=True)
    expected = generate(model, inputs, max_new_tokens=70, return_dict_in_generate=True)
    assert output.sequences.tolist() == expected.sequences.tolist()
    for own, other in zip(output.cache.layers, expected.cache.layers, strict=True):
        assert own.keys.shape == other.keys.shape
        # Forwards of other widths add in another order: float32 sums of a few hundred terms of size 1, two layers deep.
        torch.testing.assert_close(own.keys[:, :, -5:], other.keys[:, :, -5:], rtol=0, atol=2 * 256 * 2**-24)
    assert [vars(layer).get("record_past") for layer in output.cache.layers] == [
        vars(layer).get("record_past") for layer in expected.cache.layers
    ]


@pytest.mark.parametrize("inputs", [ONE, FIVE], ids=["one", "five"])
def test_conversation_with_a_window(inputs: dict[str, Any]) -> None:
    """Turns with drafts and turns without take over one another's cache."""
    model, outputs = zoo.model("mistral"), []
    for turns in ((True, False, True), (False, False, False)):
        cache, turn = transformers.DynamicCache(config=model.config), dict(inputs)
        for drafted in turns:
            speculative = Speculative(zoo.draft_model("mistral"), k=4) if drafted else None
            output = generate(model, turn, speculative, max_new_tokens=12, cache=cache)
            turn["input_ids"] = torch.cat([output, output[:, :3]], 1)
            mask = torch.ones(len(output), turn["input_ids"].shape[1] - turn["attention_mask"].shape[1]).long()
            turn["attention_mask"] = torch.cat([turn["attention_mask"], mask], 1)
        outputs.append(output.tolist())
        assert all(layer.keys.shape[-2] == 7 for layer in cache.layers)
    assert outputs[0] == outputs[1]


def test_static_cache() -> None:
    model = zoo.model("llama")
    for inputs in (ONE, FIVE):
        speculative = Speculative(zoo.draft_model("llama"), k=4)
        static = {"cache_implementation": "static", "disable_compile": True}
        assert generate(model, inputs, speculative, **static).tolist() == generate(model, inputs).tolist()
        assert sum(stats.accepted for stats in speculative.stats) > 0


def test_a_batch_of_draft_caches() -> None:
    """Every sequence has a draft cache of its own: nothing is computed twice."""
    draft = zoo.draft_model("llama")
    fed: list[int] = []
    hook = draft.get_input_embeddings().register_forward_pre_hook(lambda _, ids: fed.append(ids[0].shape[1]))
    try:
        speculative = Speculative(ModelDrafter(CausalLM(draft), noise=None), k=3)
        output = generate(zoo.model("llama"), FIVE, speculative)
    finally:
        hook.remove()
    assert output.tolist() == generate(zoo.model("llama"), FIVE).tolist()
    assert len(fed) == sum(stats.drafted for stats in speculative.stats)
    assert sum(fed) <= sum(map(len, zoo.prompts(5))) + 5 * NEW + sum(stats.drafted for stats in speculative.stats)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_law(rule: str) -> None:
    """The first three tokens, of drafts up to three long, have the target's joint law.

    Detects a total variation of 0.12 with power 0.99 at level 1e-6; that of the draft model's own law is 0.4.
    """
    count, vocab = 2500, 3
    target, draft = (zoo.toy(seed, vocab, scale=1.0) for seed in (0, 1))
    inputs = {"input_ids": torch.tensor([[1, 0, 2]]), "attention_mask": torch.ones(1, 3).long()}
    speculative = Speculative(draft, rule=rule, k=3, seed=11)
    output = generate(
        target, inputs, speculative, do_sample=True, top_k=0, max_new_tokens=4, num_return_sequences=count
    )
    cells = np.ravel_multi_index(output[:, 3:6].T.numpy(), (vocab,) * 3)
    laws = []
    for model in (target, draft):
        one, law = CausalLM(model), np.ones((vocab,) * 3)
        for tokens in itertools.product(range(vocab), repeat=3):
            rows = torch.softmax(one([1, 0, 2], tokens[:2]).double(), -1)
            law[tokens] = rows[range(3), tokens].prod()
        laws.append(law.ravel())
    counts = np.bincount(cells, minlength=vocab**3)
    result = g_test(counts, laws[0])
    assert result.detectable <= 0.12
    assert result.p_value > 1e-6
    assert np.abs(laws[0] - laws[1]).sum() / 2 > 0.4
    assert g_test(counts, laws[1]).p_value < 1e-6
    assert 0.2 < sum(s.accepted for s in speculative.stats) / sum(s.drafted for s in speculative.stats) < 0.9


@pytest.fixture(scope="module")
def smollm() -> Any:
    if not (cache_folder() / NAME / "manifest.json").exists():
        pytest.skip(f"needs {NAME}, which `draftproof generate` fetches")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_default_model()
    torch.set_num_threads(threads)


def test_smollm(smollm: Any) -> None:
    model, tokenizer = smollm
    text = "Say it again: the lighthouse keeper climbed the stairs every evening to light the lamp."
    chat = [{"role": "user", "content": text}]
    inputs = dict(
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    )
    expected = generate(model, inputs)
    for drafter in ("mix", NgramDrafter()):
        speculative = Speculative(drafter)
        assert generate(model, inputs, speculative).tolist() == expected.tolist()
        assert speculative.stats[0].tokens_per_forward > 1.5
    speculative = Speculative(seed=5)
    arguments = {"do_sample": True, "temperature": 0.6, "top_k": 0}
    output = generate(model, inputs, speculative, return_dict_in_generate=True, output_logits=True, **arguments)
    unequal = unequal_draws(output, inputs, model, SamplingParams(0.6), [5])
    print(unequal)  # noqa: T201
    assert not unequal
    assert speculative.stats[0].accepted > 0
