"""Causal models of transformers in the loop: tiny random ones, built from a configuration."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from draftproof import SamplingParams, SpeculativeDecoder, sample  # noqa: E402
from draftproof.drafters import ModelDrafter, NgramDrafter  # noqa: E402
from draftproof.errors import DtypeError, ShapeError, ValueRangeError  # noqa: E402
from draftproof.integrations.transformers import CausalLM, model_drafter  # noqa: E402

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def llama(seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    # Wide initial weights: logits far enough apart that rounding does not decide.
    config = transformers.LlamaConfig(**SIZES | {"initializer_range": 0.3} | changes)
    return transformers.LlamaForCausalLM(config).eval()


def sliding(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.MistralConfig(**SIZES, initializer_range=0.3, sliding_window=8, head_dim=8)
    return transformers.MistralForCausalLM(config).eval()


def perturbed(model: Any, scale: float = 0.02) -> Any:
    """Return a copy that agrees with the model most of the time."""
    copy = type(model)(model.config).eval()
    copy.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in copy.parameters():
            weight += scale * torch.randn(weight.shape, generator=generator)
    return copy


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


@pytest.fixture(scope="module")
def draft_model(model: Any) -> Any:
    return perturbed(model)


def prompts(n: int, length: int = 9) -> Iterator[list[int]]:
    rng = np.random.default_rng(n)
    for _ in range(n):
        half = rng.integers(VOCAB, size=length).tolist()
        yield half + half[: length // 2]


def greedy(model: Any, prompt: list[int], max_new: int, **arguments: Any) -> list[int]:
    """Return what the model's own `generate` adds to the prompt."""
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=max_new, **arguments)
    return out[0, len(prompt) :].tolist()


class Watched(CausalLM):
    """Notes, for each call, the ids it was asked about and those that went through the model."""

    def __init__(self, model: Any) -> None:
        self.asked: list[list[int]] = []
        self.fed: list[list[int]] = []
        super().__init__(model)

    def __call__(self, prefix: Any, proposed: Any) -> Any:
        self.asked.append([*map(int, prefix), *map(int, proposed)])
        with self.model.get_input_embeddings().register_forward_pre_hook(
            lambda _, inputs: self.fed.append(inputs[0][0].tolist())
        ):
            return super().__call__(prefix, proposed)


# transformers issues 30042 and 30413: assisted greedy decoding differed from greedy decoding.
@pytest.mark.parametrize("drafter", ["ngram", "private", "point mass", "none"])
def test_greedy_equals_generate(model: Any, draft_model: Any, drafter: str) -> None:
    accepted = 0
    for prompt in prompts(4):
        drafts = {
            "ngram": NgramDrafter(min_ngram=1),
            "private": model_drafter(draft_model, model),
            "point mass": model_drafter(draft_model, model, noise=None),
            "none": NgramDrafter(),
        }[drafter]
        decoder = SpeculativeDecoder(drafts, CausalLM(model), k=0 if drafter == "none" else 4)
        assert decoder.generate(prompt, max_new=30) == greedy(model, prompt, 30)
        accepted += decoder.stats.accepted
    assert (accepted > 0) == (drafter != "none")


# transformers issue 47912: an eos accepted in mid block must end the output there; PR 46790: none at all must work.
def test_eos_equals_generate(model: Any, draft_model: Any) -> None:
    in_block = 0
    for prompt in prompts(2):
        free = greedy(model, prompt, 30)
        for eos in ([free[7]], [free[2], free[12]], [VOCAB - 1]):
            decoder = SpeculativeDecoder(model_drafter(draft_model, model), CausalLM(model), k=6, eos=eos)
            events = list(decoder.stream(prompt, max_new=30))
            assert [token for token, _ in events] == greedy(model, prompt, 30, eos_token_id=eos, pad_token_id=0)
            in_block += events[-1].drafted
    assert in_block > 0


# transformers PR 46993: prompt lookup went past max_new_tokens.
@pytest.mark.parametrize("max_new", [1, 2, 3])
def test_short_outputs(model: Any, max_new: int) -> None:
    prompt = [5, 6, 7, 5, 6, 7, 5, 6]
    out = SpeculativeDecoder(NgramDrafter(), CausalLM(model), k=10).generate(torch.tensor(prompt), max_new=max_new)
    assert out.tolist() == greedy(model, prompt, max_new)


@pytest.mark.parametrize("drafter", ["ngram", "shared", "private"])
@pytest.mark.parametrize("params", [SamplingParams(0.8), SamplingParams(1.0, 20, 0.9, None, 1.2)], ids=["", "filtered"])
def test_match_equals_sampling(model: Any, draft_model: Any, drafter: str, params: SamplingParams) -> None:
    """Token for token what `sample` draws from the model's rows, one position at a time."""
    drafts = NgramDrafter(min_ngram=1) if drafter == "ngram" else model_drafter(draft_model, model, noise=drafter)
    decoder = SpeculativeDecoder(drafts, CausalLM(model), greedy=False, rule="match", seed=21, **asdict(params))
    accepted = 0
    for prompt in prompts(2):
        ids = list(prompt)
        row = CausalLM(model)
        for _ in range(24):
            seen = torch.tensor([ids])
            ids += sample(row(ids, []), **asdict(params), prev_tokens=seen, seed=21, offset=len(ids)).tolist()
        assert decoder.generate(prompt, max_new=24) == ids[len(prompt) :]
        accepted += decoder.stats.accepted
    assert accepted > 0 or drafter != "shared"


@pytest.mark.parametrize("rule", ["token", "block"])
def test_own_drafts_are_accepted(model: Any, rule: str) -> None:
    """With the target as its own draft model p = q up to rounding: nearly everything is accepted."""
    decoder = SpeculativeDecoder(model_drafter(model, model), CausalLM(model), greedy=False, rule=rule, seed=3)
    decoder.generate(next(prompts(1)), max_new=40)
    assert decoder.stats.acceptance > 0.98


@pytest.mark.parametrize("rule", ["greedy", "token"])
def test_nothing_is_computed_twice(model: Any, draft_model: Any, rule: str) -> None:
    """Each call feeds what differs from the call before: the prompt once, the drafts, the token before them."""
    prompt = next(prompts(1))
    target, draft = Watched(model), Watched(draft_model)
    decoder = SpeculativeDecoder(ModelDrafter(draft), target, k=4, greedy=rule == "greedy", rule=rule, seed=5)
    decoder.generate(prompt, max_new=40)
    stats = decoder.stats
    assert 0 < stats.accepted < stats.drafted
    assert len(target.fed) == stats.rounds == stats.target_forwards
    assert sum(map(len, target.fed)) == len(prompt) + stats.drafted + stats.rounds - 1
    assert len(draft.fed) == stats.drafted
    for watched in (target, draft):
        held: list[int] = []
        for asked, fed in zip(watched.asked, watched.fed, strict=True):
            same = next((i for i, pair in enumerate(zip(held, asked, strict=False)) if pair[0] != pair[1]), len(held))
            assert fed == asked[same:]
            held = asked


def test_full_attention_goes_back_anywhere(model: Any) -> None:
    watched = Watched(model)
    ids = next(prompts(1, 60))
    for asked in (ids[:70], ids[:71], [*ids[:40], 5]):
        watched(asked, [])
    assert [len(fed) for fed in watched.fed] == [70, 1, 1]


# transformers issue 47433: crop(0) and crops beyond the cache left stale entries.
def test_cache_follows_the_sequence(model: Any) -> None:
    target = CausalLM(model)
    rng = np.random.default_rng(0)
    prefix = [3, 1, 4, 1, 5]
    for _ in range(60):
        if rng.random() < 0.3:
            prefix = rng.integers(VOCAB, size=rng.integers(1, 12)).tolist()
        prefix = [*prefix, int(rng.integers(VOCAB))]
        if rng.random() < 0.3 and len(prefix) > 3:
            prefix = prefix[: int(rng.integers(1, len(prefix)))]
        proposed = rng.integers(VOCAB, size=rng.integers(0, 5)).tolist()
        rows = target(prefix, proposed)
        assert rows.shape == (len(proposed) + 1, VOCAB)
        with torch.no_grad():
            whole = model(torch.tensor([prefix + proposed]), use_cache=False).logits[0, len(prefix) - 1 :]
        torch.testing.assert_close(rows, whole, rtol=1e-4, atol=1e-4)
        # The next round takes over some of the proposed tokens.
        prefix = prefix + proposed[: int(rng.integers(0, len(proposed) + 1))]


# transformers issue 48280: the cache of a sliding window grew while the past was recorded.
@pytest.mark.parametrize("length", [3, 9, 20])
def test_sliding_window(length: int) -> None:
    model = sliding()
    prompt = next(prompts(1, length))
    target, draft = CausalLM(model), Watched(perturbed(model))
    decoder = SpeculativeDecoder(ModelDrafter(draft), target, k=3)
    output = greedy(model, prompt, 120)
    assert decoder.generate(prompt, max_new=120) == output
    assert 0 < decoder.stats.accepted < decoder.stats.drafted
    # The window holds 7 past tokens; more stay until the next crop, at most 64 and one round.
    for layer in (*target._cache.layers, *draft._cache.layers):
        assert layer.keys.shape[-2] <= 7 + 64 + 4
    plain_target = CausalLM(model)
    assert SpeculativeDecoder(NgramDrafter(), plain_target, k=0).generate(prompt, max_new=120) == output
    assert all(layer.keys.shape[-2] <= 7 + 64 + 1 for layer in plain_target._cache.layers)
    # Going back beyond the last crop is impossible: the cache starts anew.
    assert decoder.generate(prompt, max_new=30) == output[:30]


@pytest.mark.parametrize("where", ["target", "draft"])
def test_an_exception_inside_the_model(model: Any, draft_model: Any, where: str) -> None:
    """The forward fails between two layers; the round is repeated on a new cache."""
    prompt = next(prompts(1))
    calls = itertools.count(1)

    def fail(*_: object) -> None:
        if next(calls) in (1, 5, 6):
            raise MemoryError("no room")

    broken = model if where == "target" else draft_model
    decoder = SpeculativeDecoder(model_drafter(draft_model, model), CausalLM(model))
    stream = decoder.stream(prompt, max_new=30)
    handle = broken.model.layers[1].register_forward_pre_hook(fail)
    try:
        for _ in range(3):
            with pytest.raises(MemoryError):
                list(stream)
    finally:
        handle.remove()
    assert decoder.resume() == greedy(model, prompt, 30)


# DeepSpec issue 31: drafts drawn from bfloat16 rows, verified with float32 ones. Here q is the very row of the draw.
def test_half_precision_rows(model: Any) -> None:
    half = llama().to(torch.bfloat16)
    rows = CausalLM(half)([1, 2, 3], [4])
    assert rows.dtype == torch.float32
    assert (rows == rows.to(torch.bfloat16).float()).all()
    drafter = ModelDrafter(CausalLM(half))
    draft = drafter.start().propose(np.array([1, 2, 3]), 3, params=SamplingParams(), seed=4, offset=3)
    for i, token in enumerate(draft.tokens.tolist()):
        assert sample(draft.logits[i : i + 1], seed=4, offset=3, draft_index=i).item() == token
    decoder = SpeculativeDecoder(drafter, CausalLM(model), greedy=False, seed=4)
    assert len(decoder.generate([1, 2, 3], max_new=20)) == 20


def test_acceptance_of_a_draft_model(model: Any, draft_model: Any) -> None:
    """First drafts are accepted with probability sum min(p, q), summed over the rounds' contexts; within 4 sigma."""
    expected = variance = accepted = 0.0
    row, draft_row = CausalLM(model), CausalLM(draft_model)
    decoder = SpeculativeDecoder(model_drafter(draft_model, model), CausalLM(model), k=1, greedy=False, seed=8)
    prompt = next(prompts(1))
    events = list(decoder.stream(prompt, max_new=100))
    ids, at = list(prompt), 0
    while at < 99:
        p, q = (torch.softmax(step(ids, [])[0].double(), 0) for step in (row, draft_row))
        rate = float(torch.minimum(p, q).sum())
        expected, variance, accepted = expected + rate, variance + rate * (1 - rate), accepted + events[at].drafted
        emitted = 1 + events[at].drafted
        ids += [token for token, _ in events[at : at + emitted]]
        at += emitted
    assert decoder.stats.accepted == accepted
    assert 0.2 < expected / decoder.stats.drafted < 0.95
    assert abs(accepted - expected) < 4 * math.sqrt(variance)


def test_drafts_outside_the_vocabulary(model: Any) -> None:
    prompt = next(prompts(1))

    def draft(prefix: list[int], k: int) -> tuple[list[int], None]:
        return [prefix[-1], VOCAB, 10**9][:k], None

    assert SpeculativeDecoder(draft, CausalLM(model)).generate(prompt, max_new=12) == greedy(model, prompt, 12)


def test_a_draft_vocabulary_of_another_size(model: Any) -> None:
    """Unused ids at the end are common padding: with equal tokenizers they are no obstacle."""
    larger = llama(vocab_size=VOCAB + 31)
    words = tokenizer({f"w{i}": i for i in range(VOCAB)})
    with pytest.raises(ValueRangeError, match=f"vocabulary of {VOCAB} ids, got {VOCAB + 31}"):
        model_drafter(larger, model)
    drafter = model_drafter(larger, model, tokenizer=words, draft_tokenizer=words)
    prompt = next(prompts(1))
    assert SpeculativeDecoder(drafter, CausalLM(model)).generate(prompt, max_new=12) == greedy(model, prompt, 12)
    decoder = SpeculativeDecoder(drafter, CausalLM(model), greedy=False, seed=2)
    assert max(decoder.generate(prompt, max_new=40)) < VOCAB


def tokenizer(vocab: dict[str, int]) -> Any:
    from tokenizers import Tokenizer, models

    return transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="w0")))


def test_tokenizers_must_agree(model: Any, draft_model: Any) -> None:
    ours, other = tokenizer({"w0": 0, "a": 1, "b": 2}), tokenizer({"w0": 0, "a": 2, "b": 1})
    with pytest.raises(ValueRangeError, match="'a' is 2 in the draft and 1 in the target"):
        model_drafter(draft_model, model, tokenizer=ours, draft_tokenizer=other)
    short = tokenizer({"w0": 0, "a": 1})
    with pytest.raises(ValueRangeError, match="got 2 tokens against 3: 'b' is None in the draft and 2 in the target"):
        model_drafter(draft_model, model, tokenizer=ours, draft_tokenizer=short)


def test_wrong_models_and_prompts(model: Any) -> None:
    with pytest.raises(ValueRangeError, match=r"call model.eval\(\)"):
        CausalLM(llama().train())
    with pytest.raises(ShapeError, match="at least one token"):
        SpeculativeDecoder(NgramDrafter(), CausalLM(model)).generate([])
    with pytest.raises(ValueRangeError, match=rf"\[0, {VOCAB}\).*got {VOCAB}"):
        SpeculativeDecoder(NgramDrafter(), CausalLM(model)).generate([1, VOCAB])


def test_caches_that_cannot_be_cropped() -> None:
    config = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(ValueRangeError, match="a cache that can be cropped, got MambaForCausalLM"):
        CausalLM(transformers.MambaForCausalLM(config).eval())([1, 2, 3], [4])


def test_models_and_steps_in_the_wrong_place() -> None:
    for model in ("gpt2", None, transformers.LlamaForCausalLM):
        with pytest.raises(DtypeError, match=r"model must be a PreTrainedModel .*from_pretrained"):
            CausalLM(model)
    step = CausalLM(llama())
    with pytest.raises(DtypeError, match=r"draft_step must be .*, got CausalLM, a target: pass ModelDrafter\(CausalLM"):
        SpeculativeDecoder(step, step)
