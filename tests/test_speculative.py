"""``Speculative`` inside ``generate()``: what generate promises, kept with drafts."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import zoo  # noqa: E402
from draftproof import SamplingParams, sample  # noqa: E402
from draftproof.drafters import NgramDrafter  # noqa: E402
from draftproof.integrations.transformers import CausalLM, Speculative  # noqa: E402
from speculating import BATCHES, FIVE, ONE, TOY, VOCAB, check, generate, guessing  # noqa: E402


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
