"""Shapes, types and layouts of arrays; the same token for each of them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import draftproof as dp
from draftproof.testing.strategies import logits as hard_logits
from edges import (
    EAGER,
    EVERY,
    EVERY_FAST,
    FAST,
    INF,
    ROWS,
    RULES,
    SEEDS,
    SYSTEMS,
    Arrays,
    Round,
    System,
    check_layout,
    make_round,
    pick,
    same,
    tensor,
    torch,
)

# --- shapes and layouts -----------------------------------------------------------------------------------------------


@EVERY
def test_small_shapes(system: System) -> None:
    for batch, vocab in itertools.product((0, 1, 3), (1, 2)):
        rows = np.zeros((batch, vocab), np.float32)
        seed = np.arange(batch)
        for given in (
            {},
            {"top_k": 1},
            {"top_k": 1, "top_p": 0.5, "min_p": 0.5, "temperature": 0.5},
            {"temperature": 0},
        ):
            assert system("sample", rows, seed=seed, **given).shape == (batch,)
            assert system("filter_logits", rows, **given).shape == (batch, vocab)
            assert system("sample_with_logprobs", rows, seed=seed, **given).kept.shape == (batch,)
        assert system("sample_probs", rows + 1, seed=7).shape == (batch,)
        for drafted, rule, point in itertools.product((0, 2), RULES, (True, False)):
            target, draft = (
                np.zeros((batch, drafted + 1, vocab), np.float32),
                np.zeros((batch, drafted, vocab), np.float32),
            )
            tokens = np.zeros((batch, drafted), np.int64)
            draft = None if point else draft
            for result in (
                system("verify", target, draft, tokens, rule=rule, seed=seed, top_k=1, eos=5),
                system("verify_probs", target + 1, None if point else draft + 1, tokens, rule=rule, seed=1),
                system("verify_greedy", target, tokens),
            ):
                assert [a.shape for a in result] == [
                    (batch,),
                    (batch,),
                    (batch, drafted + 1),
                    (batch,),
                    (batch,),
                    (batch,),
                ]
                check_layout(result, tokens)
                if vocab == 1:
                    assert (result.num_accepted == drafted).all()
                    assert (result.tokens == 0).all()


@EVERY
def test_types_of_results(system: System) -> None:
    result = dp.sample_with_logprobs(system.put(ROWS), seed=1, backend=system.backend)
    assert all(type(a) is type(system.put(ROWS)) for a in result)
    names = [str(a.dtype).removeprefix("torch.") for a in result]
    assert names == ["int64", "float32", "float32", "int64", "int32"]
    target, draft, tokens, _, _ = make_round(3)
    verified = dp.verify(*map(system.put, (target, draft, tokens)), seed=1, backend=system.backend)
    assert all(type(a) is type(system.put(ROWS)) for a in verified)
    names = [str(a.dtype).removeprefix("torch.") for a in verified]
    assert names == ["int64", "int64", "int64", "int64", "bool", "int32"]
    columns = [verified.num_accepted, verified.next_token, verified.eos_hit]
    packed = verified.packed()
    assert type(packed) is type(verified.tokens)
    assert str(packed.dtype).removeprefix("torch.") == "int32"
    assert packed.tolist() == [list(map(int, row)) for row in zip(*columns, strict=True)]
    for dtype in (np.float16, np.float64):
        assert system("filter_logits", ROWS.astype(dtype)).dtype == np.float32


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
@EVERY
def test_types_of_ids(system: System, dtype: Any) -> None:
    target, draft, tokens, seed, _ = make_round()
    eos = np.array([2, 5])
    given = {"repetition_penalty": 2.0, "seed": seed}
    expected = system("verify", target, draft, tokens, prev_tokens=tokens, eos=eos, **given)
    as_type = {"prev_tokens": tokens.astype(dtype), "eos": eos.astype(dtype)}
    same(system("verify", target, draft, tokens.astype(dtype), **as_type, **given), expected)
    listed = {"prev_tokens": tokens.tolist(), "eos": eos.tolist()}
    same(system("verify", target, draft, tokens.tolist(), **listed, **given), expected)


def unaligned(a: Arrays) -> Arrays:
    return np.frombuffer(b"x" + a.tobytes(), np.uint8)[1:].view(a.dtype).reshape(a.shape)


def read_only(a: Arrays) -> Arrays:
    a = a.copy()
    a.flags.writeable = False
    return a


NUMPY_VIEWS: dict[str, Callable[[Arrays], Arrays]] = {
    "column-major": np.asfortranarray,
    "reversed": lambda a: np.flip(np.flip(a).copy()),
    "every second": lambda a: np.kron(a, np.ones((2,) * a.ndim, a.dtype))[(slice(None, None, 2),) * a.ndim],
    "offset": lambda a: np.pad(a, 1)[(slice(1, -1),) * a.ndim],
    "read-only": read_only,
    "unaligned": unaligned,
}
TORCH_VIEWS: dict[str, Callable[[Arrays], Any]] = {
    "transposed": lambda a: tensor(np.moveaxis(a, 0, -1)).movedim(-1, 0),
    "every second": lambda a: tensor(np.kron(a, np.ones((2,) * a.ndim, a.dtype)))[(slice(None, None, 2),) * a.ndim],
    "offset": lambda a: tensor(np.pad(a, 1))[(slice(1, -1),) * a.ndim],
}
VIEWS = {
    f"{kind} {name}": (system, view)
    for kind, system in SYSTEMS.items()
    for name, view in (TORCH_VIEWS if system.put is tensor else NUMPY_VIEWS).items()
}


@pytest.mark.parametrize(("system", "view"), VIEWS.values(), ids=VIEWS)
def test_views(system: System, view: Callable[[Arrays], Any]) -> None:
    """Layout changes nothing, and no input is written to."""
    target, draft, tokens, seed, offset = make_round()
    arrays = {
        "mask": np.random.default_rng(0).random(target.shape) < 0.9,
        "prev_tokens": tokens,
        "temperature": np.linspace(0, 2, 24).astype(np.float32),
        "top_k": np.arange(24) % 5,
        "top_p": np.linspace(0.5, 1, 24),
        "min_p": np.linspace(0, 0.1, 24),
        "repetition_penalty": np.linspace(1, 2, 24),
        "num_draft_tokens": np.arange(24) % 4,
        "eos": tokens[:, :1],
        "seed": seed,
        "offset": offset,
    }
    per_row = {name: a for name, a in arrays.items() if name not in ("mask", "num_draft_tokens", "eos")}
    plain = System(lambda a: a, system.backend)

    def viewed(value: Arrays) -> Any:
        made = view(value)
        np.testing.assert_array_equal(np.asarray(made), value)
        originals.append((made, np.array(np.asarray(made))))
        return made

    originals: list[tuple[Any, Arrays]] = []
    for rule in RULES:
        expected = system("verify", target, draft, tokens, rule=rule, **arrays)
        rows = map(viewed, (target, draft, tokens))
        same(plain("verify", *rows, rule=rule, **{n: viewed(a) for n, a in arrays.items()}), expected)
        expected = system("verify_probs", np.exp(target), np.exp(draft), tokens, rule=rule, seed=seed)
        same(
            plain("verify_probs", *map(viewed, (np.exp(target), np.exp(draft), tokens)), rule=rule, seed=viewed(seed)),
            expected,
        )
    same(plain("verify_greedy", viewed(target), viewed(tokens)), system("verify_greedy", target, tokens))
    one = {**per_row, "mask": arrays["mask"][:, 0]}
    filtered = {n: a for n, a in one.items() if n not in ("seed", "offset")}
    for operation, given in (("sample_with_logprobs", one), ("sample", one), ("filter_logits", filtered)):
        result = plain(operation, viewed(target[:, 0]), **{n: viewed(a) for n, a in given.items()})
        same(result, system(operation, target[:, 0], **given))
    same(
        plain("sample_probs", viewed(np.exp(target[:, 0])), seed=seed),
        system("sample_probs", np.exp(target[:, 0]), seed=seed),
    )
    for made, original in originals:
        np.testing.assert_array_equal(np.asarray(made), original)


@EVERY
def test_one_row_expanded_over_the_batch(system: System) -> None:
    """A stride of 0 along the batch is one row in memory, and means the same as copies of it."""
    target, draft, tokens, seed, offset = make_round(50)
    for given in ({}, {"top_k": 3}, {"top_p": 0.8}, {"temperature": 0}, {"repetition_penalty": 1.5}):
        row = target[0, 0]
        expanded = np.broadcast_to(row, (50, 6)) if system.put is not tensor else tensor(row).expand(50, 6)
        plain = System(lambda a: a, system.backend)
        copies = np.tile(row, (50, 1))
        seeds = {"seed": system.put(seed), "offset": system.put(offset)}
        same(
            plain("sample_with_logprobs", expanded, **seeds, **given),
            system("sample_with_logprobs", copies, seed=seed, offset=offset, **given),
        )
        for rule in RULES:
            rows = target[0], draft[0]
            if system.put is tensor:
                wide = [tensor(a).expand(50, *a.shape) for a in rows]
            else:
                wide = [np.broadcast_to(a, (50, *a.shape)) for a in rows]
            same(
                plain("verify", *wide, system.put(tokens), rule=rule, **seeds, **given),
                system(
                    "verify",
                    *(np.tile(a, (50, 1, 1)) for a in rows),
                    tokens,
                    rule=rule,
                    seed=seed,
                    offset=offset,
                    **given,
                ),
            )


@EVERY_FAST
def test_rows_far_apart(system: System, tmp_path: Path) -> None:
    """Rows more than 2^31 elements apart: a sparse file that is never read in between."""
    far = 2**31 + 7
    file = tmp_path / "logits"
    with file.open("wb") as stream:
        stream.truncate((far + 64) * 4)
    stored = np.memmap(file, np.float32, "r+")
    rows = ROWS[:2]
    stored[:40], stored[far : far + 40] = rows
    wide = np.lib.stride_tricks.as_strided(np.asarray(stored), (2, 40), (far * 4, 4))
    wide = torch.from_numpy(wide) if system.put is tensor else wide
    plain = System(lambda a: a, system.backend)
    for given in ({}, {"top_k": 5, "top_p": 0.9}):
        seed = system.put(SEEDS[:2])
        same(plain("sample", wide, seed=seed, **given), system("sample", rows, seed=SEEDS[:2], **given))
        tokens = system.put(np.zeros((2, 0), np.int64))
        result = plain("verify", wide[:, None], None, tokens, seed=seed, **given)
        same(result, system("verify", rows[:, None], None, np.zeros((2, 0), np.int64), seed=SEEDS[:2], **given))


# --- the same token everywhere ----------------------------------------------------------------------------------------

BATCH = 64
GIVEN: dict[str, Any] = {
    "temperature": np.array([0, 0.5, 1, 2])[np.arange(BATCH) % 4],
    "top_k": np.array([0, 1, 5, 50, 1000])[np.arange(BATCH) % 5],
    "top_p": np.array([1, 0.9, 0.5])[np.arange(BATCH) % 3],
    "min_p": np.array([0, 0.05])[np.arange(BATCH) % 2],
    "repetition_penalty": np.array([1, 1.3, 0.7])[np.arange(BATCH) // 2 % 3],
}


def everywhere(vocab: int = 130) -> tuple[Round, dict[str, Any]]:
    """A batch with all parameters different, on the grid of bfloat16 so that ties abound."""
    made = make_round(BATCH, 3, vocab)
    coarse = [np.asarray(tensor(a).bfloat16().float()) for a in (made.target, made.draft)]
    history = np.random.default_rng(3).integers(-1, vocab, (BATCH, 7))
    return made._replace(target=coarse[0], draft=coarse[1]), {**GIVEN, "prev_tokens": history, **made.streams}


def all_results(system: System, made: Round, given: dict[str, Any]) -> list[Any]:
    streams = {name: given[name] for name in ("seed", "offset")}
    filters = {name: value for name, value in given.items() if name not in streams}
    probs = np.exp(made.target), np.exp(made.draft)
    return [
        system("sample_with_logprobs", made.target[:, 0], **given),
        system("sample", made.target[:, 0], draft_index=2, **given),
        system("filter_logits", made.target[:, 0], **filters),
        system("sample_probs", probs[0][:, 0], **streams),
        *(system("verify", made.target, made.draft, made.tokens, rule=rule, **given) for rule in RULES),
        *(system("verify", made.target, None, made.tokens, rule=rule, **given) for rule in RULES[:2]),
        *(system("verify_probs", *probs, made.tokens, rule=rule, **streams) for rule in RULES[:3]),
    ]


def rows_of(made: Round, given: dict[str, Any], rows: Any) -> tuple[Round, dict[str, Any]]:
    return Round(*(a[rows] for a in made)), {name: value[rows] for name, value in given.items()}


@functools.cache
def expected_everywhere() -> list[Any]:
    return all_results(EAGER, *everywhere())


@EVERY_FAST
def test_every_backend_and_library(system: System) -> None:
    for a, b in zip(expected_everywhere(), all_results(system, *everywhere()), strict=True):
        same(a, b)


@EVERY_FAST
def test_alone_and_permuted(system: System) -> None:
    """A row alone, or anywhere in any batch, gives the bits it gives among 64 others."""
    for rows in (np.random.default_rng(0).permutation(BATCH), [0], [29], [63]):
        for a, b in zip(expected_everywhere(), all_results(system, *rows_of(*everywhere(), rows)), strict=True):
            same(pick(a, rows), b)


@EVERY_FAST
def test_padded_vocabulary(system: System) -> None:
    """Ids that cannot be drawn at the end of the vocabulary change nothing."""
    made, given = everywhere()
    wide = [np.pad(a, ((0, 0), (0, 0), (0, 71)), constant_values=-INF) for a in (made.target, made.draft)]
    padded = all_results(system, made._replace(target=wide[0], draft=wide[1]), given)
    padded[2] = padded[2][:, :130]
    for a, b in zip(expected_everywhere(), padded, strict=True):
        same(a, b)


@EVERY_FAST
def test_batches_are_worked_on_in_pieces(system: System) -> None:
    """A batch of more than 2^18 logits, cut at other places than the implementation cuts it."""
    made = make_round(1200, 2, 300)
    filters = {"top_k": np.arange(1200) % 7, "top_p": np.linspace(0.5, 1, 1200)}
    given = {**filters, **made.streams}

    def run(rows: slice) -> list[Any]:
        part, own = Round(*(a[rows] for a in made)), {name: value[rows] for name, value in given.items()}
        return [
            system("sample_with_logprobs", part.target[:, 0], **own),
            *(system("verify", part.target, part.draft, part.tokens, rule=rule, **own) for rule in RULES),
        ]

    whole = run(slice(None))
    assert whole[1].tokens.max() > 0
    for rows in (slice(0, 1), slice(333, 1100)):
        for a, b in zip(whole, run(rows), strict=True):
            same(pick(a, rows), b)


@EVERY_FAST
def test_double_precision_is_rounded_first(system: System) -> None:
    made, given = everywhere()
    wide = [a.astype(np.float64) * (1 + 2**-40) for a in (made.target, made.draft)]
    result = system("verify", *wide, made.tokens, rule="token", **given)
    same(result, system("verify", made.target, made.draft, made.tokens, rule="token", **given))


HALVES = [(s, d) for s in FAST.values() for d in (("float16", "bfloat16") if s.put is tensor else ("float16",))]


@pytest.mark.parametrize(("system", "dtype"), HALVES)
def test_half_precision(system: System, dtype: str) -> None:
    """Half-precision rows give what their float32 values give."""
    made, given = everywhere()
    narrow = System(lambda a: system.put(a).to(getattr(torch, dtype)), system.backend)
    if system.put is not tensor:
        narrow = System(lambda a: a.astype(np.float16), system.backend)
    halves = [narrow.put(a) for a in (made.target, made.draft)]
    floats = [np.asarray(h.float() if system.put is tensor else h.astype(np.float32)) for h in halves]
    plain = System(lambda a: a, system.backend)
    named = {name: system.put(value) for name, value in given.items()}
    for rule in RULES[1:3]:
        result = plain("verify", *halves, system.put(made.tokens), rule=rule, **named)
        same(result, system("verify", *floats, made.tokens, rule=rule, **given))
    rows = halves[0][:, 0]
    same(plain("sample_with_logprobs", rows, **named), system("sample_with_logprobs", floats[0][:, 0], **given))
    filters = {name: value for name, value in given.items() if name not in ("seed", "offset")}
    named = {name: system.put(value) for name, value in filters.items()}
    same(plain("filter_logits", rows, **named), system("filter_logits", floats[0][:, 0], **filters))


@EVERY_FAST
def test_subnormals_flushed_by_the_caller(system: System) -> None:
    """The caller's flag is lifted while an operation runs, and stands afterwards."""
    tiny = np.tile(np.float32([[2e-38, 2.1e-38, -3e-38, 5e-38, 1e-42]]), (50, 1))
    made, given = everywhere()

    def results() -> list[Any]:
        return [
            *all_results(system, made, given),
            system("filter_logits", tiny, temperature=100, top_k=2),
            system("sample", tiny, temperature=1.3e-38, seed=np.arange(50)),
            system("sample_probs", abs(tiny), seed=np.arange(50)),
        ]

    expected = results()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        flushed = results()
        assert not (np.ones(1, np.int32).view(np.float32) * np.float32(1)).any()
    finally:
        torch.set_flush_denormal(False)
    for a, b in zip(expected, flushed, strict=True):
        same(a, b)


@hypothesis.given(rows=hard_logits(3, 9), seed=st.integers(-(2**63), 2**63 - 1), data=st.data())
@hypothesis.settings(max_examples=40)
def test_hard_rows(rows: Arrays, seed: int, data: st.DataObject) -> None:
    """Ties, signed zeros, subnormals and huge values: NumPy and torch agree, and a kept token comes out."""
    given = {
        "temperature": data.draw(st.sampled_from([0, 1e-40, 0.3, 1, 1e30])),
        "top_k": data.draw(st.sampled_from([None, 1, 3])),
        "top_p": data.draw(st.sampled_from([None, 0, 0.5, 0.999])),
        "min_p": data.draw(st.sampled_from([None, 1e-30, 0.5, 1])),
        "repetition_penalty": data.draw(st.sampled_from([None, 1e-5, 1.5])),
        "prev_tokens": np.array([[0, 1], [2, -1], [8, 9]]),
    }
    results = [system("sample_with_logprobs", rows, seed=seed, **given) for system in FAST.values()]
    filtered = [system("filter_logits", rows, **given) for system in FAST.values()]
    for result, kept in zip(results, filtered, strict=True):
        same(result, results[0])
        same(kept, filtered[0])
        assert (kept[np.arange(3), result.tokens] > -INF).all()
        assert result.kept.tolist() == (kept > -INF).sum(1).tolist()
