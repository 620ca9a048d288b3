"""``Speculative``: rules, drafts and how many of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import zoo  # noqa: E402
from draftproof.drafters import ModelDrafter  # noqa: E402
from draftproof.errors import ShapeError, ValueRangeError  # noqa: E402
from draftproof.integrations.transformers import CausalLM, Speculative, model_drafter  # noqa: E402
from remedies import refused  # noqa: E402
from speculating import BATCHES, FIVE, ONE, TOY, generate  # noqa: E402


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
        with refused(ShapeError, r"attention_mask must be \[2, 4 or more\]"):
            TOY.generate(ids, attention_mask=mask.long(), max_new_tokens=3, custom_generate=Speculative())


def test_a_drafter_must_be_one() -> None:
    for wrong in (5, object(), "ngram"):
        with refused(ValueRangeError, "drafter must be 'mix', a drafter, a model or None"):
            Speculative(wrong)  # type: ignore[arg-type]


def test_a_draft_models_cost_is_that_of_every_row() -> None:
    drafter = ModelDrafter(CausalLM(TOY), cost=0.01)
    assert Speculative(drafter)._drafter(TOY, True).cost == 0.01


def test_a_draft_model_costs_its_share_of_the_parameters() -> None:
    target, draft = zoo.build("llama", num_hidden_layers=4), zoo.model("llama")
    share = draft.num_parameters() / target.num_parameters()
    assert 0.3 < share < 0.7
    assert model_drafter(draft, target).cost == share
    assert model_drafter(draft, target, cost=0.1).cost == 0.1
    for sampled in (False, True):
        assert Speculative(draft)._drafter(target, sampled).cost == share


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_draft_model_as_large_as_the_target_drafts_next_to_nothing(rule: Any) -> None:
    speculative = Speculative(zoo.toy(), rule=rule, seed=3)
    generate(speculative, ONE, do_sample=True, max_new_tokens=60)
    assert speculative.stats[0].drafted < 3


def test_no_drafter_reads_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody will ask for is not ranked."""
    monkeypatch.setattr("draftproof.drafters.recycling.most_likely", None)
    assert generate(Speculative(None), ONE).tolist() == generate(None, ONE).tolist()
    with pytest.raises(TypeError):
        generate(Speculative(), ONE)
