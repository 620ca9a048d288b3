"""``generate`` with ``Speculative``: everything that ``generate`` promises, on a toy without rounding, to the bit."""

from __future__ import annotations

import inspect
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import zoo  # noqa: E402
from draftproof import SamplingParams, sample  # noqa: E402
from draftproof.decoding import DraftLength  # noqa: E402
from draftproof.drafters import ModelDrafter, NgramDrafter  # noqa: E402
from draftproof.errors import DtypeError, ShapeError, ValueRangeError  # noqa: E402
from draftproof.integrations.transformers import CausalLM, Speculative, model_drafter  # noqa: E402

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


@BATCHES
@pytest.mark.parametrize("sampled", [False, True])
def test_batches(inputs: dict[str, Any], sampled: bool) -> None:
    stats = check(inputs, do_sample=sampled).stats
    assert len({tuple(s.accepted_by_position) for s in stats}) == len(stats)
    assert all(s.tokens == 40 == s.rounds + s.accepted for s in stats)


@BATCHES
@pytest.mark.parametrize("drafter", ["guesser", "ngram", "mix", "model", "none"])
@pytest.mark.parametrize("params", [SamplingParams(0.8), SamplingParams(1.3, 6, 0.9, 0.05, 1.2)], ids=["", "filtered"])
def test_match_is_sampling(inputs: dict[str, Any], drafter: str, params: SamplingParams) -> None:
    """Token for token what `sample` draws from the model's rows, one position at a time, padding not counted."""
    settings = {"do_sample": True, "temperature": params.temperature, "top_k": params.top_k or 0, "top_p": params.top_p}
    settings |= {"min_p": params.min_p, "repetition_penalty": params.repetition_penalty}
    settings = {name: value for name, value in settings.items() if value is not None}
    seeds = np.arange(len(inputs["input_ids"])) + 5
    drafts = {"ngram": NgramDrafter(min_ngram=1), "model": zoo.toy(1), "none": None}.get(drafter, drafter)
    if drafter == "guesser":
        drafts = zoo.Guesser(zoo.unpadded(generate(Speculative(None, seed=seeds), inputs, **settings), inputs))
    speculative = Speculative(drafts, rule="match", k="auto" if drafter == "mix" else 4, seed=seeds)
    output = generate(speculative, inputs, **settings)
    for row, prompt, seed in zip(zoo.unpadded(output, inputs), inputs["attention_mask"].sum(1), seeds, strict=True):
        one = CausalLM(TOY)
        for length in range(prompt, len(row)):
            seen = torch.tensor([row[:length]])
            drawn = sample(one(row[:length], []), **vars(params), prev_tokens=seen, seed=int(seed), offset=length)
            assert drawn.item() == row[length]
    if drafter in ("guesser", "model"):
        assert sum(stats.accepted for stats in speculative.stats) > 0


PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[3], [4, 5], [7, 8]]},
    "min_length": {"min_length": 45, "eos_token_id": [2, 5]},
    "min_new_tokens": {"min_new_tokens": 25, "eos_token_id": [2, 5]},
    "forced_bos": {"forced_bos_token_id": 6},
    "forced_eos": {"forced_eos_token_id": 6},
    "suppress": {"suppress_tokens": [0, 1, 2]},
    "begin_suppress": {"begin_suppress_tokens": [1, 3, 5, 7, 9, 11]},
    "decay": {"exponential_decay_length_penalty": (5, 1.2), "eos_token_id": 2},
    "sequence_bias": {"sequence_bias": [[[3], 2.0], [[4, 5], -4.0]]},
    "invalid": {"remove_invalid_values": True},
    "normalized": {"renormalize_logits": True},
    "many": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 10, "eos_token_id": [2]},
    "watermark": {"watermarking_config": transformers.WatermarkingConfig(bias=2.5, seeding_scheme="lefthash")},
}
WARPERS = {
    "temperature": {"temperature": 0.7, "top_k": 0},
    "top_k": {"top_k": 4},
    "filters": {"temperature": 1.4, "top_k": 8, "top_p": 0.8, "min_p": 0.02},
    "typical": {"typical_p": 0.8, "top_k": 0},
    "epsilon": {"epsilon_cutoff": 0.05, "top_k": 0, "top_p": 0.95},
    "eta": {"eta_cutoff": 0.05, "temperature": 0.9},
    "top_h": {"top_h": 0.6, "top_p": 0.9},
    "own_order": {
        "logits_processor": [transformers.TopPLogitsWarper(0.6), transformers.TemperatureLogitsWarper(2.0)],
        "top_k": 0,
    },
}


@BATCHES
@pytest.mark.parametrize("arguments", PROCESSORS.values(), ids=PROCESSORS)
def test_processors(inputs: dict[str, Any], arguments: dict[str, Any]) -> None:
    check(inputs, **arguments)


@pytest.mark.parametrize("arguments", [*PROCESSORS.values(), *WARPERS.values()], ids=[*PROCESSORS, *WARPERS])
def test_processors_when_sampling(arguments: dict[str, Any]) -> None:
    """The rows that are drawn from are those `generate` draws from, and the draw is the one without drafts."""
    arguments = {"do_sample": True, "return_dict_in_generate": True, "output_scores": True, **arguments}
    given: list[Any] = []

    class Watched(Speculative):
        def __call__(self, model: Any, input_ids: Any, logits_processor: Any, *args: Any, **kwargs: Any) -> Any:
            given.extend(logits_processor)
            return super().__call__(model, input_ids, logits_processor, *args, **kwargs)

    plain = generate(Watched(None, seed=3), output_logits=True, **arguments)
    drafts = zoo.Guesser(zoo.unpadded(plain.sequences, FIVE))
    speculative = Speculative(drafts, rule="match", k=4, seed=3)
    output = generate(speculative, output_logits=True, **arguments)
    assert output.sequences.tolist() == plain.sequences.tolist()
    assert sum(stats.accepted for stats in speculative.stats) > 0
    prompt = FIVE["input_ids"].shape[1]
    processors = transformers.LogitsProcessorList(given)
    for step, (scores, logits) in enumerate(zip(output.scores, output.logits, strict=True)):
        seen, drawn = output.sequences[:, : prompt + step], output.sequences[:, prompt + step]
        going = ~torch.isneginf(logits).any(1)
        expected = processors(seen, logits.clone())
        torch.testing.assert_close(scores[going], expected[going])
        assert torch.isfinite(scores[torch.arange(5), drawn]).all()


class Hashed(transformers.LogitsProcessor):  # type: ignore[misc]
    """Favours a token that depends on every token before it, padding included, and on the row."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        weights = torch.arange(1, input_ids.shape[1] + 1)
        favoured = ((input_ids * weights).sum(1) + torch.arange(len(input_ids))) % VOCAB
        scores[torch.arange(len(scores)), favoured] += 4
        return scores


@BATCHES
@pytest.mark.parametrize("sampled", [False, True])
def test_own_processor_sees_the_right_prefix(inputs: dict[str, Any], sampled: bool) -> None:
    check(inputs, do_sample=sampled, logits_processor=[Hashed()], repetition_penalty=1.1, temperature=0.9, top_k=7)


class Loose(zoo.Guesser):
    """Drafts the truth, and then tokens that are forbidden."""

    def propose(self, context: Any, width: int, **_: Any) -> Any:
        tokens = super().propose(context, width).tokens
        tokens[2:] = (tokens[1:2] + np.arange(4, 4 * len(tokens), 4)[: len(tokens[2:])]) % VOCAB
        return zoo.Draft(tokens, None)


def allowed_after(new: list[int], row: int) -> list[int]:
    assert all((b - a - row) % 4 for a, b in itertools.pairwise(new))
    return [token for token in range(1, VOCAB) if (token - (new or [0])[-1] - row) % 4]


class Grammar(transformers.LogitsProcessor):  # type: ignore[misc]
    """Does not bear what it has forbidden; 0, which it never allows, is padding."""

    def __init__(self, prompt: int) -> None:
        self.prompt = prompt

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        mask = torch.full_like(scores, -torch.inf)
        for row, ids in enumerate(input_ids[:, self.prompt :].tolist()):
            mask[row, allowed_after(list(itertools.takewhile(bool, ids)), row)] = 0
        return scores + mask


@BATCHES
@pytest.mark.parametrize("kind", ["function", "processor"])
def test_constrained(inputs: dict[str, Any], kind: str) -> None:
    """What is forbidden depends on the row's number; after a forbidden draft nothing is asked."""
    prompt = inputs["input_ids"].shape[1]
    arguments: dict[str, Any] = {
        "function": {"prefix_allowed_tokens_fn": lambda row, ids: allowed_after(ids[prompt:].tolist(), row)},
        "processor": {"logits_processor": [Grammar(prompt)]},
    }[kind]
    truth = generate(None, inputs, **arguments)
    speculative = Speculative(Loose(zoo.unpadded(truth, inputs)), k=4)
    assert generate(speculative, inputs, **arguments).tolist() == truth.tolist()
    assert all(0 < stats.accepted < stats.drafted for stats in speculative.stats)


def test_padding_is_not_penalised() -> None:
    """Left padding counts for no processor of ours and moves no draw: each row is what it is on its own."""
    arguments = {"do_sample": True, "repetition_penalty": 1.5, "top_k": 8}
    seeds = np.arange(5)
    rows = zoo.unpadded(generate(Speculative(None, seed=seeds), **arguments), FIVE)
    for row, alone, seed in zip(rows, zoo.unpadded(FIVE["input_ids"], FIVE), seeds, strict=True):
        own = generate(Speculative(None, seed=int(seed)), zoo.batch([alone]), **arguments)
        assert own[0].tolist() == row


# transformers issue 36642: a penalty that leaves out the prompt.
@BATCHES
@pytest.mark.parametrize("ignored", [None, 3, "prompt", "rows"])
def test_own_penalty(inputs: dict[str, Any], ignored: Any) -> None:
    """What the penalty counts is the user's choice: the prompt or not, the padding too."""
    width, rows = inputs["input_ids"].shape[1], torch.arange(len(inputs["input_ids"])) + 2
    length = {"prompt": width, "rows": rows}.get(ignored, ignored)
    penalty = transformers.RepetitionPenaltyLogitsProcessor(1.6, prompt_ignore_length=length)
    for sampled in (False, True):
        check(inputs, do_sample=sampled, logits_processor=[penalty])


class LastPair(transformers.StoppingCriteria):  # type: ignore[misc]
    """Stops where two tokens add up to a number; remembers all it was asked."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.asked: list[tuple[list[list[int]], int | None]] = []

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.asked.append((input_ids.tolist(), None if scores is None else len(scores)))
        return input_ids[:, -2:].sum(1) == self.total


@BATCHES
@pytest.mark.parametrize("eos", [None, 2, [2, 5]])
def test_stopping_criteria(inputs: dict[str, Any], eos: Any) -> None:
    """They are asked after every token, inside an accepted run too; without eos the others go on, as in `generate`."""
    inside = 0
    for total in range(6, 12):
        ours, theirs = LastPair(total), LastPair(total)
        speculative = check(inputs, eos_token_id=eos, stopping_criteria=[LastPair(total)])
        output = generate(speculative, inputs, eos_token_id=eos, stopping_criteria=[ours])
        assert output.tolist() == generate(None, inputs, eos_token_id=eos, stopping_criteria=[theirs]).tolist()
        inside += output.shape[1] < inputs["input_ids"].shape[1] + speculative.stats[0].rounds * 5
        if len(output) == 1:
            assert ours.asked == theirs.asked
    assert inside > 0


def test_criteria_get_scores() -> None:
    arguments = {"return_dict_in_generate": True, "output_scores": True}
    ours, theirs = LastPair(-1), LastPair(-1)
    generate(guessing(ONE), ONE, stopping_criteria=[ours], **arguments)
    generate(None, ONE, stopping_criteria=[theirs], **arguments)
    assert ours.asked == theirs.asked
    assert ours.asked[3][1] == 4


def letters() -> Any:
    """Return a tokenizer with a letter for each id."""
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate("abcdefghijklm")}, []))
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@BATCHES
def test_stop_strings(inputs: dict[str, Any]) -> None:
    tokenizer = letters()
    text = tokenizer.decode(generate(None, inputs)[0][inputs["input_ids"].shape[1] :])
    for start in range(3, 24, 4):
        criteria = [transformers.StopStringCriteria(tokenizer, [text[start : start + 3], "mmm"])]
        speculative = check(inputs, stopping_criteria=criteria, eos_token_id=2)
        assert speculative.stats[0].tokens <= start + 3


def test_time_limit() -> None:
    assert (
        1 <= generate(guessing(ONE), ONE, max_new_tokens=10**5, max_time=0.0).shape[1] - ONE["input_ids"].shape[1] < 9
    )


@BATCHES
@pytest.mark.parametrize("eos", [[], [2], [2, 5, 9]])
def test_end_of_sequence(inputs: dict[str, Any], eos: list[int]) -> None:
    for sampled in (False, True):
        check(inputs, eos_token_id=eos or None, do_sample=sampled)


@BATCHES
@pytest.mark.parametrize("new", [1, 2, 3])
def test_maximum_length(inputs: dict[str, Any], new: int) -> None:
    assert (
        generate(guessing(inputs), inputs, max_new_tokens=new).tolist()
        == generate(None, inputs)[:, : new - 40].tolist()
    )
    longest = inputs["input_ids"].shape[1] + new
    output = generate(guessing(inputs), inputs, max_new_tokens=None, max_length=longest)
    assert output.shape[1] == longest


def test_returned_sequences_are_drawn_apart() -> None:
    arguments = {"do_sample": True, "num_return_sequences": 4, "top_k": 0}
    output = generate(Speculative("mix", seed=9), **arguments)
    assert output.shape[0] == 20
    for rows in output.split(4):
        assert len({tuple(row) for row in rows.tolist()}) == 4
    assert output.tolist() == generate(Speculative(None, seed=9), **arguments).tolist()


def test_seeds() -> None:
    arguments = {"do_sample": True, "top_k": 0}
    once = generate(Speculative(seed=4), **arguments).tolist()
    assert once == generate(Speculative(seed=4), **arguments).tolist()
    assert once != generate(Speculative(seed=5), **arguments).tolist()
    assert once == generate(Speculative(seed=torch.tensor(4)), **arguments).tolist()
    torch.manual_seed(1)
    drawn = [generate(Speculative(), **arguments).tolist() for _ in range(2)]
    torch.manual_seed(1)
    assert drawn[0] != drawn[1]
    assert drawn[0] == generate(Speculative(), **arguments).tolist()


@BATCHES
@pytest.mark.parametrize(
    "arguments",
    [{}, {"repetition_penalty": 1.2, "eos_token_id": 2}, {"stopping_criteria": [LastPair(13)], "eos_token_id": 2}],
    ids=["", "processed", "stopped"],
)
def test_outputs(inputs: dict[str, Any], arguments: dict[str, Any]) -> None:
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    speculative = guessing(inputs, **arguments)
    ours, theirs = (generate(s, inputs, **asked, **arguments) for s in (speculative, None))
    assert type(ours) is type(theirs)
    assert ours.keys() == theirs.keys()
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    tokens = torch.tensor([stats.tokens for stats in speculative.stats])
    for own, other in ((ours.scores, theirs.scores), (ours.logits, theirs.logits)):
        assert len(own) == len(other) == tokens.max()
        for step, (rows, expected) in enumerate(zip(own, other, strict=True)):
            assert rows[step < tokens].tolist() == expected[step < tokens].tolist()
            assert torch.isneginf(rows[step >= tokens][:, 1:]).all()
            assert (rows[step >= tokens][:, 0] == 0).all()
    assert generate(Speculative(), inputs, output_scores=True, **arguments).tolist() == ours.sequences.tolist()


class Recorder(transformers.generation.BaseStreamer):  # type: ignore[misc]
    def __init__(self) -> None:
        self.events: list[Any] = []

    def put(self, value: Any) -> None:
        self.events.append(value.tolist())

    def end(self) -> None:
        self.events.append("end")


@BATCHES
@pytest.mark.parametrize("arguments", [{}, {"eos_token_id": [2, 5]}], ids=["", "eos"])
def test_streamer(inputs: dict[str, Any], arguments: dict[str, Any]) -> None:
    ours, theirs = Recorder(), Recorder()
    speculative = guessing(inputs, **arguments)
    speculative.streamer = ours
    generate(speculative, inputs, **arguments)
    generate(None, inputs, streamer=theirs, **arguments)
    assert ours.events == theirs.events


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
        with pytest.raises(ValueRangeError, match=match):
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
        with pytest.raises((ValueError, TypeError), match=match):
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


def test_default_rule() -> None:
    """Token for drafts with logits, match for the others; a rule says nothing about greedy search."""
    arguments = {"do_sample": True, "top_k": 0, "max_new_tokens": 12}
    draft = zoo.toy(1)
    outputs = {
        rule: generate(Speculative(draft, rule=rule, k=3, seed=1), **arguments) for rule in (None, "token", "match")
    }
    assert outputs[None].tolist() == outputs["token"].tolist() != outputs["match"].tolist()
    assert outputs["match"].tolist() == generate(Speculative(seed=1), **arguments).tolist()
    shared = model_drafter(draft, TOY, noise="shared")
    assert generate(Speculative(shared, rule="match", k=3, seed=1), **arguments).tolist() == outputs["match"].tolist()
    for drafter, rule in ((draft, "token"), (draft, "block"), (draft, "match"), (shared, "match")):
        for penalty in ({}, {"repetition_penalty": 1.3}):
            penalty = penalty | {"max_new_tokens": 12}
            assert generate(Speculative(drafter, rule=rule, k=3), **penalty).tolist() == generate(**penalty).tolist()


# transformers issue 40739: the draft length asked for was ignored.
def test_width_is_what_was_asked_for() -> None:
    for width in (0, 1, 3):
        speculative = Speculative(zoo.Guesser(zoo.unpadded(generate(), FIVE)), k=width)
        generate(speculative)
        assert all(len(stats.drafted_by_position) == width for stats in speculative.stats)


def test_a_row_at_its_end_drafts_nothing() -> None:
    truth = generate(None, eos_token_id=2)
    guesser, model, fed = zoo.Guesser(zoo.unpadded(truth, FIVE)), zoo.toy(), list[int]()
    model.register_forward_pre_hook(lambda _, __, named: fed.append(named["input_ids"].shape[1]), with_kwargs=True)
    speculative = Speculative(guesser, k=4)
    assert generate(speculative, model=model, eos_token_id=2).tolist() == truth.tolist()
    rounds = [stats.rounds for stats in speculative.stats]
    assert min(rounds) < max(rounds) == len(fed)
    assert len(guesser.proposed) <= sum(rounds)


def test_no_row_runs_far_ahead() -> None:
    """With k="auto" a row that is 17 tokens ahead of another drafts nothing: the batch would not end sooner."""

    class Sure(zoo.Guesser):
        estimates = True

        def propose(self, context: Any, width: int, **options: Any) -> Any:
            draft = super().propose(context, width, **options)
            return draft._replace(acceptance=[0.9] * len(draft.tokens))

    inputs, new = {name: rows[:2] for name, rows in FIVE.items()}, {"max_new_tokens": 80}
    truth = generate(None, inputs, **new)
    first = zoo.unpadded(truth, inputs)[:1]
    rounds = {}
    for k in ("auto", 8):
        speculative = Speculative(Sure(first), k=k)
        assert generate(speculative, inputs, **new).tolist() == truth.tolist()
        ahead, behind = speculative.stats
        assert behind.rounds == 80
        rounds[k] = ahead.rounds
    assert rounds[8] < 40 < rounds["auto"] < 80


@pytest.mark.parametrize(("dtype", "fed"), [(torch.float32, [4, 4, 4, 5]), (torch.bfloat16, [2, 3, 4, 5])])
def test_narrow_forwards_are_filled_up(dtype: Any, fed: list[int]) -> None:
    """Where two or three tokens take longer than four; what was fed for nothing leaves the cache again."""
    model, widths = zoo.toy().to(dtype), list[int]()
    model.register_forward_pre_hook(lambda _, __, named: widths.append(named["input_ids"].shape[1]), with_kwargs=True)
    for k in (1, 2, 3, 4):
        truth = generate(None, ONE, model)
        widths.clear()
        speculative = Speculative(zoo.Guesser(zoo.unpadded(truth, ONE)), k=k)
        output = generate(speculative, ONE, model, return_dict_in_generate=True)
        assert output.sequences.tolist() == truth.tolist()
        assert output.past_key_values.get_seq_length() == truth.shape[1] - 1
        assert set(widths[1:5]) == {fed[k - 1]}


@BATCHES
def test_drafts_outside_the_vocabulary(inputs: dict[str, Any]) -> None:
    class Wild(zoo.Guesser):
        def propose(self, context: Any, width: int, **arguments: Any) -> Any:
            tokens = super().propose(context, width, **arguments).tokens
            return zoo.Draft(np.where(np.arange(len(tokens)) == 1, 10**9, tokens), None)

    for model, arguments in ((TOY, {"no_repeat_ngram_size": 2}), (zoo.model("llama"), {})):
        truth = generate(None, inputs, model, **arguments)
        speculative = Speculative(Wild(zoo.unpadded(truth, inputs), model.config.vocab_size), k=4)
        assert generate(speculative, inputs, model, **arguments).tolist() == truth.tolist()


@BATCHES
def test_positions_end(inputs: dict[str, Any]) -> None:
    """Up to the last position that the model knows; what only fills up a batch must not ask for more."""
    model = zoo.build("gpt2", n_positions=32)
    truth = generate(None, inputs, model, max_new_tokens=None, max_length=32)
    guesser = zoo.Guesser(zoo.unpadded(truth, inputs), zoo.VOCAB)
    assert (
        generate(Speculative(guesser, k=6), inputs, model, max_new_tokens=None, max_length=32).tolist()
        == truth.tolist()
    )


def test_masks_with_holes() -> None:
    """Whatever prompt columns a mask hides stay hidden, and are moved with their row."""
    mask = FIVE["attention_mask"].clone()
    mask[1, -6:-3] = 0
    mask[3, -4] = 0
    for arguments in ({}, {"repetition_penalty": 1.3}):
        inputs = FIVE | {"attention_mask": mask}
        truth = generate(None, inputs, **arguments)
        rows = [row[int(m.argmax()) :].tolist() for row, m in zip(truth, mask, strict=True)]
        speculative = Speculative(zoo.Guesser(rows), k=4)
        assert generate(speculative, inputs, **arguments).tolist() == truth.tolist()
        assert all(stats.accepted > 0 for stats in speculative.stats)


@pytest.mark.parametrize(("dtype", "seed"), [(torch.float32, 3), (torch.bfloat16, None)])
def test_no_clock_chooses_widths(dtype: Any, seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a seed, and where rows depend on the width of a forward."""
    model = zoo.toy(rows=5).to(dtype)
    widths = []
    for run in range(3):
        ticks = np.cumsum(np.random.default_rng(run).exponential(size=10**4) ** 4)
        monkeypatch.setattr("draftproof.decoding.generation.perf_counter", iter(ticks).__next__)
        speculative = Speculative(seed=seed)
        generate(speculative, ONE, model, do_sample=seed is not None)
        widths.append([stats.drafted_by_position for stats in speculative.stats])
    assert widths[0] == widths[1] == widths[2]
    assert any(widths[0])


def test_a_mask_must_fit_the_prompt() -> None:
    ids = torch.tensor([[3, 5, 6, 7]] * 2)
    for mask in (torch.ones(2, 3), torch.tensor([[0, 1, 1], [1, 1, 1]])):
        with pytest.raises(ShapeError, match=r"attention_mask must be \[2, 4 or more\]"):
            TOY.generate(ids, attention_mask=mask.long(), max_new_tokens=3, custom_generate=Speculative())


def test_a_drafter_must_be_one() -> None:
    for wrong in (5, object(), "ngram"):
        with pytest.raises(ValueRangeError, match="drafter must be 'mix', a drafter, a model or None"):
            Speculative(wrong)  # type: ignore[arg-type]


def test_a_draft_models_cost_is_that_of_every_row() -> None:
    drafter = ModelDrafter(CausalLM(TOY), cost=0.01)
    assert Speculative(drafter)._drafter(TOY, True).cost == 0.01
