"""The published interface of nuvec."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import draftproof.compat.nuvec as nv
from published import BOTH, Arrays, assert_law, draw, mismatched, rows_of, softmax, torch


def greedy_reference(logits: Arrays, draft: list[int], eos: list[int]) -> tuple[int, int, bool]:
    best = logits.argmax(-1).tolist()
    accepted = next((i for i, token in enumerate(draft) if best[i] != token), len(draft))
    ends = [i for i in range(accepted) if draft[i] in eos]
    if ends:
        accepted = ends[0] + 1
    return accepted, best[accepted], bool(ends) or best[accepted] in eos


def nuvec_cases() -> list[tuple[Any, ...]]:
    """Random logits, draft and eos: every dtype, length, id dtype and layout at least once."""
    rng = np.random.default_rng(13)
    cases = []
    for drafted, eos_count, ids in itertools.product((0, 1, 2, 5, 12), (0, 1, 3), (np.uint32, np.int32)):
        logits = rng.normal(size=(drafted + 1, 9)).astype(np.float32)
        draft = logits.argmax(-1)[:drafted]
        draft[rng.random(drafted) < 0.15] = 0
        cases.append((logits, draft.astype(ids), rng.choice(9, eos_count, replace=False).astype(ids)))
    return cases


LAYOUTS = {
    "contiguous": lambda x: x,
    "slice of [1, L, V]": lambda x: torch.nn.functional.pad(x[None], (3, 2, 1, 4))[0, 1:-4, 3:-2],
    "transposed": lambda x: x.T.contiguous().T,
    "every second": lambda x: x.repeat_interleave(2, 1)[:, ::2],
}


class TestNuvec:
    """Published: random cases over dtypes, layouts, lengths, ids; law of the sampled rule; repeats; invalid inputs."""

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    def test_accept_greedy(self, dtype: str, layout: str) -> None:
        outcomes = set()
        for logits, draft, eos in nuvec_cases():
            rows = LAYOUTS[layout](torch.tensor(logits).to(getattr(torch, dtype)))
            expected = greedy_reference(rows.float().numpy(), draft.tolist(), eos.tolist())
            result = nv.accept_greedy(rows, torch.from_numpy(draft), torch.from_numpy(eos))
            assert (result.dtype, tuple(result.shape)) == (torch.int64, (3,))
            assert nv.read(result) == expected
            outcomes.add((expected[0] == len(draft), expected[2]))
            if dtype != "bfloat16":
                result = nv.accept_greedy(rows.numpy(), draft, eos)
                assert (result.dtype, result.shape) == (np.uint32, (3,))
                assert nv.read(result) == expected
        assert len(outcomes) == 4

    def test_published_example(self) -> None:
        logits = np.zeros((3, 4), np.float16)
        logits[[0, 1, 2], [2, 0, 1]] = 1
        draft, none = np.array([2, 0], np.uint32), np.array([], np.uint32)
        assert nv.read(nv.accept_greedy(logits, draft, none)) == (2, 1, False)
        assert nv.read(nv.accept_greedy(logits, draft, np.array([2], np.uint32))) == (1, 0, True)
        assert nv.read(nv.accept_greedy(logits, draft, np.array([1], np.uint32))) == (2, 1, True)

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    def test_accept_sampled_end_of_sequence(self, dtype: str, layout: str) -> None:
        """The kept prefix of the draft does not depend on eos, but for the cut after the first one kept."""
        cuts = 0
        for key, (logits, draft, eos) in enumerate(nuvec_cases()):
            p = LAYOUTS[layout](torch.softmax(3 * torch.tensor(logits), -1).to(getattr(torch, dtype)))
            q = torch.softmax(2 * torch.tensor(logits[:-1]), -1).to(getattr(torch, dtype))
            draft, eos = torch.from_numpy(draft), torch.from_numpy(eos)
            for rows in (q, None):
                free = nv.read(nv.accept_sampled(p, draft, rows, eos[:0], key))
                cut = nv.read(nv.accept_sampled(p, draft, rows, eos, key))
                kept = draft.tolist()[: free[0]]
                ends = [i for i, token in enumerate(kept) if token in eos.tolist()]
                if ends:
                    assert cut[::2] == (ends[0] + 1, True)
                    assert p[cut[0], cut[1]] > 0
                    cuts += 1
                else:
                    assert cut == (*free[:2], free[1] in eos.tolist())
        assert cuts >= 10

    @pytest.mark.parametrize("point_mass", [False, True])
    def test_accept_sampled_law(self, point_mass: bool) -> None:
        """First token and accepted length of 1e5 rows with a key each, mapped over the keys."""
        rng = np.random.default_rng(14)
        target, draft = (softmax(row).astype(np.float32) for row in mismatched(8, 0.6, seed=15))
        rows = 100_000
        tokens = np.full((rows, 2), 3) if point_mass else draw(rng, draft, (rows, 2))
        keys = rng.integers(0, 2**32, (rows, 2), np.uint32)
        p, q = torch.tensor(np.array([target] * 3)), None if point_mass else torch.tensor(np.array([draft] * 2))
        mapped = torch.vmap(nv.accept_sampled, in_dims=(None, 0, None, None, 0))
        accepted, token, eos_hit = mapped(
            p, torch.tensor(tokens), q, torch.tensor([5]), torch.from_numpy(keys)
        ).numpy().T  # fmt: skip
        first = np.where(accepted > 0, tokens[:, 0], token)
        assert_law(first, target.astype(np.float64) / target.sum(dtype=np.float64))
        rate = float(target[3]) if point_mass else np.minimum(target, draft).sum()
        assert abs((accepted > 0).mean() - rate) < 4 * np.sqrt(rate * (1 - rate) / rows)
        ends = np.where(np.arange(2) < accepted[:, None], tokens == 5, False).any(1) | (token == 5)
        assert (eos_hit == ends).all()

    def test_vmap_is_the_loop(self) -> None:
        rng = np.random.default_rng(16)
        p, q = (torch.tensor(rows_of(rng, (6, n, 9))) for n in (4, 3))
        draft, eos = (
            torch.tensor(rng.integers(0, 9, (6, 3)), dtype=torch.int32),
            torch.tensor([2, 7], dtype=torch.int32),
        )
        keys = torch.from_numpy(rng.integers(0, 2**32, (6, 2), np.uint32))
        one_by_one = torch.stack([nv.accept_greedy(p[b], draft[b], eos) for b in range(6)])
        assert torch.equal(torch.vmap(nv.accept_greedy, in_dims=(0, 0, None))(p, draft, eos), one_by_one)
        for rows in (q, None):
            one_by_one = torch.stack(
                [nv.accept_sampled(p[b], draft[b], None if rows is None else rows[b], eos, keys[b]) for b in range(6)]
            )
            mapped = torch.vmap(nv.accept_sampled, in_dims=(0, 0, None if rows is None else 0, None, 0))
            assert torch.equal(mapped(p, draft, rows, eos, keys), one_by_one)

    @BOTH
    def test_key(self, put: Any) -> None:
        rng = np.random.default_rng(17)
        p, q = (put(rows_of(rng, (n, 50))) for n in (7, 6))
        draft, eos = put(rng.integers(0, 50, 6)), put(np.array([4]))

        def results(keys: Any) -> list[Any]:
            return [nv.accept_sampled(p, draft, q, eos, key).tolist() for key in keys]

        whole = range(2**32 - 8, 2**32 + 8)
        assert results(whole) == results(whole)
        assert len(set(map(tuple, results(whole)))) > 8
        halves = [np.array([key & 0xFFFFFFFF, key >> 32], np.uint32) for key in whole]
        assert results(halves) == results(whole)
        assert results(map(np.int64, whole)) == results(whole)
        if put is torch.tensor:
            assert results(map(torch.from_numpy, halves)) == results(whole)

    def test_no_gradient(self) -> None:
        rows = torch.rand(3, 4, requires_grad=True)
        draft, eos = torch.tensor([1, 2]), torch.tensor([0])
        assert not nv.accept_greedy(rows, draft, eos).requires_grad
        assert not nv.accept_sampled(rows, draft, rows[:2], eos, 1).requires_grad

    @BOTH
    @pytest.mark.parametrize(
        ("wrong", "error", "text"),
        [
            ({"probs": np.ones(5, np.float32)}, ValueError, r"accept_sampled: probs .*\[N\+1, V\].*got \[5\] float32"),
            ({"probs": np.ones((3, 5))}, TypeError, r"accept_sampled: probs .*float16.*got \[3, 5\] float64"),
            ({"probs": np.ones((3, 5), np.int32)}, TypeError, r"accept_sampled: probs .*got \[3, 5\] int32"),
            (
                {"probs": np.ones((4, 5), np.float32)},
                ValueError,
                r"probs .*N\+1 = 3 rows for N = 2.*got \[4, 5\] float32",
            ),
            ({"draft": np.ones((1, 2), np.int32)}, ValueError, r"accept_sampled: draft .*\[N\].*got \[1, 2\] int32"),
            ({"draft": np.ones(2, np.float32)}, TypeError, r"accept_sampled: draft .*uint32.*got \[2\] float32"),
            ({"draft_probs": np.ones((3, 5), np.float32)}, ValueError, r"draft_probs .*\[2, 5\].*got \[3, 5\] float32"),
            ({"draft_probs": np.ones((2, 4), np.float32)}, ValueError, r"draft_probs .*\[2, 5\].*got \[2, 4\] float32"),
            ({"draft_probs": np.ones((2, 5))}, TypeError, r"accept_sampled: draft_probs .*got \[2, 5\] float64"),
            ({"eos": np.ones((1, 1), np.int32)}, ValueError, r"accept_sampled: eos .*\[E\].*got \[1, 1\] int32"),
            ({"eos": np.ones(0, np.float32)}, TypeError, r"accept_sampled: eos .*got \[0\] float32"),
            ({"key": np.ones(3, np.uint32)}, ValueError, r"accept_sampled: key .*\[2\].*got \[3\] uint32"),
            ({"key": np.ones(2, np.float32)}, TypeError, r"accept_sampled: key .*uint32.*got \[2\] float32"),
        ],
    )
    def test_invalid(self, wrong: dict[str, Arrays], error: type[Exception], text: str, put: Any) -> None:
        given = {
            "probs": np.ones((3, 5), np.float32),
            "draft": np.ones(2, np.int32),
            "draft_probs": np.ones((2, 5), np.float32),
            "eos": np.ones(1, np.int32),
            "key": np.ones(2, np.uint32),
        }
        arguments = {name: put(array) for name, array in (given | wrong).items()}
        with pytest.raises(error, match=text):
            nv.accept_sampled(**arguments)
        (name,) = wrong
        if name in ("probs", "draft", "eos"):
            greedy = {"logits" if name == "probs" else name: arguments[name] for name in ("probs", "draft", "eos")}
            greedy_text = text.replace("accept_sampled", "accept_greedy").replace("probs", "logits")
            with pytest.raises(error, match=greedy_text):
                nv.accept_greedy(**greedy)

    def test_invalid_kinds(self) -> None:
        rows, draft, eos = np.ones((3, 5), np.float32), np.ones(2, np.int32), np.ones(1, np.int32)
        with pytest.raises(TypeError, match=r"accept_greedy: eos .*got list"):
            nv.accept_greedy(rows, draft, [1])
        with pytest.raises(TypeError, match=r"accept_sampled: key .*got float"):
            nv.accept_sampled(rows, draft, None, eos, 1.0)

    @BOTH
    @pytest.mark.parametrize("shape", [(2,), (4,), (1, 3), ()])
    def test_read_refuses(self, shape: tuple[int, ...], put: Any) -> None:
        with pytest.raises(ValueError, match=r"read: result must be .*\[3\]"):
            nv.read(put(np.ones(shape, np.int64)))
