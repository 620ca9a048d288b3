"""``Speculative``: caches, other inputs than ids, and what is refused."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import remedies  # noqa: E402
import zoo  # noqa: E402
from draftproof.decoding import DraftLength  # noqa: E402
from draftproof.drafters import NgramDrafter  # noqa: E402
from draftproof.errors import DtypeError, ValueRangeError  # noqa: E402
from draftproof.integrations.transformers import Speculative  # noqa: E402
from speculating import BATCHES, FIVE, ONE, TOY, VOCAB, check, generate, guessing  # noqa: E402


class TestCaches:
    @BATCHES
    def test_conversation(self, inputs: dict[str, Any]) -> None:
        """A cache that is passed is gone on from, and comes back as `generate` leaves it."""
        caches = [transformers.DynamicCache(config=TOY.config) for _ in range(2)]
        turns = [dict(inputs), dict(inputs)]
        for new in (11, 17):
            for turn, cache, speculative in zip(turns, caches, (True, False), strict=True):
                drafts = None
                if speculative:
                    truth = generate(None, turn, max_new_tokens=new)
                    drafts = Speculative(zoo.Guesser(zoo.unpadded(truth, turn)), k=4)
                output = generate(drafts, turn, max_new_tokens=new, cache=cache)
                assert not speculative or sum(stats.accepted for stats in drafts.stats) > 0
                more = torch.full((len(output), 3), 7)
                turn["input_ids"] = torch.cat([output, more], 1)
                turn["attention_mask"] = torch.cat([turn["attention_mask"], torch.ones(len(output), new + 3).long()], 1)
            assert turns[0]["input_ids"].tolist() == turns[1]["input_ids"].tolist()
            assert caches[0].get_seq_length() == caches[1].get_seq_length()
            visible = turns[0]["attention_mask"][:, None, :-4, None]
            entries = [cache.layers[0].keys * visible for cache in caches]
            assert entries[0].tolist() == entries[1].tolist()

    def test_only_new_tokens(self) -> None:
        """The prompt may leave out what the cache holds; the mask then has more columns."""
        outputs = []
        for speculative in (Speculative(NgramDrafter(min_ngram=1), k=4), None):
            cache = transformers.DynamicCache(config=TOY.config)
            generate(None, max_new_tokens=8, cache=cache)
            held, new = cache.get_seq_length(), FIVE["input_ids"][:, -4:]
            mask = torch.cat([FIVE["attention_mask"], torch.ones(5, held - FIVE["input_ids"].shape[1] + 4).long()], 1)
            outputs.append(generate(speculative, {"input_ids": new, "attention_mask": mask}, cache=cache).tolist())
        assert outputs[0] == outputs[1]

    @BATCHES
    def test_static(self, inputs: dict[str, Any]) -> None:
        for arguments in ({}, {"eos_token_id": 2}):
            check(inputs, cache_implementation="static", disable_compile=True, **arguments)

    @BATCHES
    def test_returned(self, inputs: dict[str, Any]) -> None:
        arguments = {"return_dict_in_generate": True, "eos_token_id": 2}
        truth = generate(None, inputs, eos_token_id=2)
        drafts = Speculative(zoo.Guesser(zoo.unpadded(truth, inputs)), k=4)
        ours, theirs = generate(drafts, inputs, **arguments), generate(None, inputs, **arguments)
        assert ours.cache.get_seq_length() == theirs.cache.get_seq_length() == truth.shape[1] - 1
        new = truth[:, inputs["input_ids"].shape[1] :]
        filled = torch.cat([inputs["attention_mask"], (torch.cumsum(new == 2, 1) == 0).long()], 1)[:, :-1]
        entries = [cache.layers[0].keys[:, 0, :, 0] * filled for cache in (ours.cache, theirs.cache)]
        assert entries[0].tolist() == entries[1].tolist()

    def test_prompt_in_pieces(self) -> None:
        fed: list[int] = []
        hook = TOY.register_forward_pre_hook(
            lambda _, __, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        try:
            output = generate(Speculative(None), prefill_chunk_size=5)
        finally:
            hook.remove()
        assert output.tolist() == generate().tolist()
        assert fed == [5] * 5 + [1] * 39


def test_embeddings_as_prompt() -> None:
    model = zoo.model("llama")
    inputs = zoo.batch(zoo.prompts(3))
    embedded = {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]).detach()}
    embedded["attention_mask"] = inputs["attention_mask"]
    truth = generate(None, embedded, model)
    speculative = Speculative(NgramDrafter(min_ngram=1), k=4)
    assert generate(speculative, embedded, model).tolist() == truth.tolist()


def test_token_types_go_on() -> None:
    seen: list[Any] = []

    class Typed(zoo.Toy):
        def forward(
            self,
            input_ids: Any = None,
            position_ids: Any = None,
            attention_mask: Any = None,
            token_type_ids: Any = None,
            **arguments: Any,
        ) -> Any:
            assert token_type_ids.shape == input_ids.shape
            seen.append(token_type_ids)
            return super().forward(input_ids, attention_mask, position_ids, **arguments)

    model = Typed(TOY.config).eval()
    types = FIVE["attention_mask"] * 3
    truth = generate(None, FIVE | {"token_type_ids": types}, model)
    assert truth.tolist() == generate().tolist()
    guesser = zoo.Guesser(zoo.unpadded(truth, FIVE))
    assert generate(Speculative(guesser, k=4), FIVE | {"token_type_ids": types}, model).tolist() == truth.tolist()
    assert all((ids[:, -1] == 3).all() for ids in seen)


def refused(match: str, model: Any = TOY, inputs: dict[str, Any] = FIVE, **arguments: Any) -> None:
    def run(*_: Any) -> None:
        raise AssertionError("the model ran")

    hook = model.register_forward_pre_hook(run)
    try:
        with remedies.refused(ValueRangeError, match):
            generate(Speculative(), inputs, model, **arguments)
    finally:
        hook.remove()


class TestRefused:
    @pytest.mark.parametrize("kind", ["Mamba", "Qwen3Next"])
    def test_linear_attention(self, kind: str) -> None:
        sizes = {name: value for name, value in zoo.SIZES.items() if name != "initializer_range"}
        config = getattr(transformers, f"{kind}Config")(**sizes)
        refused("cannot go back, leave out custom_generate", getattr(transformers, f"{kind}ForCausalLM")(config).eval())

    def test_encoder_decoder(self) -> None:
        config = transformers.T5Config(
            vocab_size=VOCAB, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0
        )
        model = transformers.T5ForConditionalGeneration(config).eval()
        with pytest.raises(ValueRangeError, match="encoder-decoder T5ForConditionalGeneration"):
            generate(Speculative(), FIVE, model)

    def test_quantized_cache(self) -> None:
        model = zoo.model("llama")
        cache = transformers.QuantizedCache(backend="fp8", config=model.config)
        refused("leave out cache_implementation and cache", model, cache=cache)

    def test_layers_that_hold_more(self) -> None:
        """Their rows cannot be moved; without a batch they need not be."""
        cache = transformers.DynamicCache(config=TOY.config)
        cache.layers = [transformers.cache_utils.DynamicIndexedLayer()]
        refused("DynamicIndexedLayer: pass one sequence at a time", cache=cache)
        assert generate(guessing(ONE), ONE, cache=cache).tolist() == generate(None, ONE).tolist()

    def test_static_sliding_window(self) -> None:
        refused("StaticSlidingWindowLayer", zoo.model("mistral"), cache_implementation="static")

    def test_training(self) -> None:
        refused(r"call model.eval\(\)", zoo.toy().train())

    @pytest.mark.parametrize(
        ("arguments", "match"),
        [
            ({"use_cache": False}, "pass use_cache=True"),
            ({"num_beams": 2}, "got beam_search"),
            ({"prompt_lookup_num_tokens": 3}, "got assisted_generation"),
            ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions"),
            ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states"),
            ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor"),
        ],
        ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
    )
    def test_requests(self, arguments: dict[str, Any], match: str) -> None:
        refused(match, inputs=ONE, **arguments)

    def test_synthetic_watermark(self) -> None:
        config = transformers.SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)
        refused("SynthIDTextWatermarkLogitsProcessor", watermarking_config=config, do_sample=True)

    @pytest.mark.parametrize(
        ("arguments", "match"),
        [
            ({"drafter": "lookup"}, "got 'lookup'"),
            ({"rule": "greedy"}, "rule must be one of"),
            ({"k": -1}, "k must be at least 0"),
            ({"k": 2.5}, "k must be an int, got float: pass a number of tokens, 'auto' or a policy"),
            ({"streamer": 5}, r"streamer must be an object with put\(\), end\(\), got int"),
            ({"drafter": NgramDrafter}, "drafter must be 'mix', a drafter, a model or None"),
            ({"drafter": SimpleNamespace(start=list)}, r"drafter must have start\(\), has_q"),
            ({"seed": 2**64}, "seed must be in"),
            ({"seed": [1, 2]}, "seed"),
            ({"drafter": zoo.toy(vocab=14)}, "vocabulary of 13 ids, got 14"),
        ],
        ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
    )
    def test_arguments(self, arguments: dict[str, Any], match: str) -> None:
        with remedies.refused((ValueError, TypeError), match):
            generate(Speculative(**arguments), do_sample=True)

    @pytest.mark.parametrize(
        "arguments", [{"k": -1}, {"k": 2.5}, {"k": DraftLength}, {"streamer": transformers.TextStreamer}]
    )
    def test_at_once(self, arguments: dict[str, Any]) -> None:
        with pytest.raises((ValueRangeError, DtypeError), match=next(iter(arguments))):
            Speculative(**arguments)

    @pytest.mark.parametrize("size", [-1, 0])
    def test_prompt_in_no_pieces(self, size: int) -> None:
        refused(f"prefill_chunk_size must be at least 1, got {size}", prefill_chunk_size=size)

    def test_without_parentheses(self) -> None:
        expected = r"custom_generate must be an object, got the class Speculative: pass Speculative\(\), with parenth"
        with pytest.raises(DtypeError, match=expected):
            generate(Speculative)
        assert list(inspect.signature(Speculative).parameters) == ["drafter", "rule", "k", "seed", "streamer"]
