"""The published interfaces of spec-verify-xpu and spec-verify."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import draftproof.compat.spec_verify as spec
import draftproof.compat.spec_verify_xpu as xpu
from published import BOTH, Arrays, assert_law, draw, mismatched, rows_of, softmax, torch


def scalar_verify(p: Arrays, q: Arrays, draft: Arrays, accept: Arrays, sample: Arrays) -> tuple[int, int]:
    """One sequence in float64, token by token: the reference of every sampled test here."""
    p, q = (rows / rows.sum(-1, keepdims=True) for rows in (p.astype(np.float64), q.astype(np.float64)))
    accepted, weights = 0, p[len(draft)].tolist()
    for accepted, token in enumerate(draft):
        if not accept[accepted] * q[accepted][token] < p[accepted][token]:
            weights = [max(a - b, 0.0) for a, b in zip(p[accepted], q[accepted], strict=True)]
            break
    else:
        accepted = len(draft)
    left = float(sample[accepted]) * sum(weights)
    for token, weight in enumerate(weights):  # noqa: B007
        left -= weight
        if left < 0:
            break
    return accepted, token


def xpu_case(name: str) -> tuple[Arrays, ...]:
    """Return draft tokens, draft and target probabilities, and both uniforms, float32."""
    rng = np.random.default_rng(sorted(name.encode()))
    batch, drafted, vocab = {"V = 4096": (8, 5, 4096), "one draft": (1, 1, 32), "V = 2": (32, 5, 2)}.get(
        name, (32, 5, 64)
    )
    concentration = 0.1 if name == "peaked" else 1.0
    target = rows_of(rng, (batch, drafted + 1, vocab), concentration)
    draft = rows_of(rng, (batch, drafted, vocab), concentration)
    if name == "sparse":
        target[target < 0.02] = draft[draft < 0.02] = 0
    if name == "identical":
        draft = target[:, :drafted].copy()
    tokens = np.array([[draw(rng, row) for row in rows] for rows in draft])
    accept = rng.random((batch, drafted), np.float32)
    if name == "accept all":
        accept[:] = 0
    if name == "reject at 0":
        target[np.arange(batch), 0, tokens[:, 0]] = 0
    return tokens, draft, target, accept, rng.random((batch, drafted + 1), np.float32)


class TestSpecVerifyXpu:
    """Published: nine checks against a scalar reference, draw for draw; default generator; traced without a break."""

    @BOTH
    @pytest.mark.parametrize(
        "name",
        [
            "mixed",
            "accept all",
            "reject at 0",
            "identical",
            "V = 4096",
            "V = 2",
            "one draft",
            "sparse",
            "peaked",
        ],
    )
    def test_scalar_reference(self, name: str, put: Any) -> None:
        tokens, draft, target, accept, sample = case = xpu_case(name)
        accepted, next_token = xpu.verify(*map(put, case))
        assert [str(x.dtype).removeprefix("torch.") for x in (accepted, next_token)] == ["int64", "int64"]
        pairs = list(zip(accepted.tolist(), next_token.tolist(), strict=True))
        assert pairs == [scalar_verify(*row) for row in zip(target, draft, tokens, accept, sample, strict=True)]
        counts, drafted = {a for a, _ in pairs}, tokens.shape[1]
        if name in ("accept all", "identical"):
            assert counts == {drafted}
        elif name == "reject at 0":
            assert counts == {0}
        elif name != "one draft":
            assert len(counts) > 1
        if name == "sparse":
            assert (target == 0).any(-1).all()

    def test_default_generator(self) -> None:
        case = [torch.tensor(x) for x in xpu_case("mixed")[:3]]

        def call(seed: int) -> list[list[int]]:
            torch.manual_seed(seed)
            return [x.tolist() for x in xpu.verify(*case)]

        assert call(1) == call(1)
        assert call(1) != call(2)
        torch.manual_seed(1)
        uniforms = torch.rand(32, 5), torch.rand(32, 6)
        assert [x.tolist() for x in xpu.verify(*case, *uniforms)] == call(1)
        torch.manual_seed(1)
        assert [x.tolist() for x in xpu.verify(*(x.numpy() for x in case))] == call(1)

    @pytest.mark.parametrize("arguments", [3, 5])
    def test_traces_without_a_break(self, arguments: int) -> None:
        case = [torch.tensor(x) for x in xpu_case("mixed")[:arguments]]
        traced = torch.compile(xpu.verify, fullgraph=True, backend="aot_eager")
        torch.manual_seed(0)
        expected = xpu.verify(*case)
        torch.manual_seed(0)
        assert [x.tolist() for x in traced(*case)] == [x.tolist() for x in expected]

    def test_wrong_shape(self) -> None:
        tokens, draft, target, _, _ = xpu_case("mixed")
        with pytest.raises(ValueError, match="target_probs must be"):
            xpu.verify(tokens, draft, target[:, 1:])
        with pytest.raises(ValueError, match="draft_tokens must be"):
            xpu.verify(tokens[0], draft, target)


class Bigram:
    """Tables of next-token rows behind the callbacks of the published decoder; it records what they are given."""

    def __init__(self, vocab: int, seed: int, greedy: bool) -> None:
        self.rng = np.random.default_rng(seed)
        self.target, self.draft = rows_of(self.rng, (2, vocab, vocab))
        self.greedy = greedy
        self.prefixes: list[Any] = []

    def draft_step(self, prefix: Any, k: int) -> tuple[list[int], Arrays]:
        self.prefixes.append(prefix)
        context = [int(prefix[-1])]
        for _ in range(k):
            row = self.draft[context[-1]]
            context.append(int(row.argmax() if self.greedy else draw(self.rng, row)))
        return context[1:], self.draft[context[:-1]]

    def target_step(self, prefix: Any, proposed: Any) -> Arrays:
        self.prefixes.append(prefix)
        return self.target[[int(prefix[-1]), *map(int, proposed)]]


class TestSpecVerify:
    """Published: greedy is plain greedy decoding, sampling follows the law, 600 rounds, unnormalised rows."""

    @BOTH
    def test_verify_greedy(self, put: Any) -> None:
        rows = rows_of(np.random.default_rng(8), (5, 30))
        best = rows.argmax(-1)
        for first_miss in range(5):
            draft = best[:4].copy()
            draft[first_miss:] = (draft[first_miss:] + 1) % 30
            n_accepted, next_token = spec.verify_greedy(put(rows), put(draft))
            assert (n_accepted, next_token) == (first_miss, best[first_miss])
            assert (type(n_accepted), type(next_token)) == (int, int)

    @BOTH
    @pytest.mark.parametrize("scale", [1.0, 0.25, 3.7])
    def test_verify_scalar_reference(self, scale: float, put: Any) -> None:
        assert spec.accept is spec.verify
        tokens, draft, target, accept, sample = xpu_case("mixed")
        for row in zip(target * np.float32(scale), draft, tokens, accept, sample, strict=True):
            p, q, x, *uniforms = row
            assert spec.verify(*map(put, (p, q, x, *uniforms))) == scalar_verify(p, q, x, *uniforms)

    @pytest.mark.parametrize("generator", [np.random.default_rng, lambda seed: torch.Generator().manual_seed(seed)])
    def test_fixed_generator_fixed_result(self, generator: Callable[[int], Any]) -> None:
        tokens, draft, target, _, _ = xpu_case("mixed")

        def results(made: Any) -> list[tuple[int, int]]:
            return [spec.verify(p, q, x, generator=made) for p, q, x in zip(target, draft, tokens, strict=True)]

        assert results(generator(3)) == results(generator(3))
        assert results(generator(3)) != results(generator(4))
        assert spec.verify(target[0], draft[0], tokens[0], seed=5) == spec.verify(
            target[0], draft[0], tokens[0], seed=5
        )

    @pytest.mark.parametrize(
        ("overlaps", "law"),
        [([0.678] * 4, 1.661), ([0.76437, 0.70679, 0.64921, 0.59163], 1.86)],
        ids=["same at each position", "mean over the positions"],
    )
    def test_600_rounds(self, overlaps: list[float], law: float) -> None:
        """Mean accepted length over 600 rounds at ``sum min(p, q) = 0.678``, against the law within 4 standard errors.

        The published law, 1.86, needs an overlap that changes with the position; 0.678 everywhere has 1.66.
        """
        reach = np.cumprod(overlaps)
        assert np.mean(overlaps) == pytest.approx(0.678, abs=1e-5)
        assert reach.sum() == pytest.approx(law, abs=5e-3)
        pairs = [mismatched(64, overlap, seed) for seed, overlap in enumerate(overlaps)]
        target = np.array([softmax(p) for p, _ in pairs] + [softmax(pairs[0][0])], np.float32)
        draft = np.array([softmax(q) for _, q in pairs], np.float32)
        rng = np.random.default_rng(600)
        lengths = []
        for _ in range(600):
            tokens = np.array([draw(rng, row) for row in draft])
            lengths.append(spec.verify(target, draft, tokens, generator=rng)[0])
        variance = ((2 * np.arange(1, 5) - 1) * reach).sum() - reach.sum() ** 2
        assert abs(np.mean(lengths) - reach.sum()) < 4 * np.sqrt(variance / 600)

    @pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
    @pytest.mark.parametrize("k", [1, 4])
    def test_generate_greedy_is_plain_greedy(self, k: int, kind: Any) -> None:
        model = Bigram(40, seed=9, greedy=True)
        prompt = kind([5, 17])
        expected = [17]
        for _ in range(50):
            expected.append(int(model.target[expected[-1]].argmax()))
        dec = spec.SpeculativeDecoder(model.draft_step, model.target_step, k=k, greedy=True, generator=None, seed=None)
        out = dec.generate(prompt, max_new=50)
        assert [int(token) for token in out] == expected[1:]
        assert {type(prefix) for prefix in model.prefixes} == {type(prompt)}
        for prefix in model.prefixes:
            assert [5, *expected][: len(prefix)] == [int(token) for token in prefix]

    def test_generate_sampled_law(self) -> None:
        model = Bigram(4, seed=10, greedy=False)
        dec = spec.SpeculativeDecoder(
            model.draft_step, model.target_step, k=3, greedy=False, generator=np.random.default_rng(11)
        )
        pairs = np.array([dec.generate([0], max_new=2) for _ in range(1500)])
        assert_law(pairs @ [4, 1], (model.target[0][:, None] * model.target).astype(np.float64).ravel())

    def test_generate_seed(self) -> None:
        def generate(**randomness: Any) -> list[int]:
            model = Bigram(40, seed=12, greedy=False)
            dec = spec.SpeculativeDecoder(model.draft_step, model.target_step, greedy=False, **randomness)
            return dec.generate([0], max_new=30)

        assert generate(seed=1) == generate(seed=1)
        assert generate(seed=1) != generate(seed=2)
        torch.manual_seed(3)
        first = generate()
        assert generate() != first
        torch.manual_seed(3)
        assert generate() == first
        assert generate(generator=torch.Generator().manual_seed(3)) == first
