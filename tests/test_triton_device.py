"""What a call does round its kernels on a device that is simulated: no wait, no copies, few launches, the same bits."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

import draftproof
from draftproof import _dispatch
from draftproof._dispatch import interpreted
from draftproof.types import Status

if not interpreted():
    pytest.skip("needs triton's interpreter", allow_module_level=True)

from matrix import integers, logits, spread
from simulated import OnDevice, below, simulation

B, K, V = 4, 2, 130
ROWS = torch.from_numpy(logits(B, V, 3, B))
TARGET = torch.from_numpy(spread(integers(9, B, K + 1, V)))
TOKENS = TARGET[:, :K].argmax(-1)
NUMBERS: dict[str, Any] = {"seed": 5, "offset": 7}
TENSORS: dict[str, Any] = {"seed": torch.arange(B), "offset": torch.arange(B) * 3}
FILTERS = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
HEAT = torch.tensor([1.0, 0.5, 0.0, 2.0])
MASK = torch.arange(V).repeat(B, K + 1, 1) % 5 > 0
PER_ROW = {"temperature": HEAT, "top_p": torch.full((B,), 0.9)}

# A call, what torch launches for it, and how many kernels.
CALLS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], list[str], int]] = {
    "sample, numbers": ("sample", (ROWS,), NUMBERS, ["full"] * 3, 3),
    "sample, tensors": ("sample", (ROWS,), TENSORS, ["full"], 4),
    "sample, filters": ("sample", (ROWS,), {**TENSORS, **FILTERS}, ["full"] * 4, 8),
    "sample, filters a row": ("sample", (ROWS,), {**TENSORS, **PER_ROW}, [], 6),
    "filter_logits": ("filter_logits", (ROWS,), FILTERS, ["full"] * 4, 8),
    "sample_probs": ("sample_probs", (ROWS.softmax(-1),), TENSORS, [], 5),
    "verify": (
        *("verify", (TARGET, TARGET[:, :K], TOKENS), {**NUMBERS, "eos": [3, 5]}),
        *(["full", "full", "stack", *["full"] * 5, "contiguous"], 6),
    ),
    "verify, filters": (
        *("verify", (TARGET, TARGET[:, :K], TOKENS), {**TENSORS, **FILTERS, "rule": "block"}),
        *(["full"] * 9, 19),
    ),
    "verify, top-p a row, mask": (
        *("verify", (TARGET, None, TOKENS), {**TENSORS, **PER_ROW, "rule": "match", "mask": MASK}),
        *(["full"], 11),
    ),
    "verify_probs": ("verify_probs", (TARGET.softmax(-1), None, TOKENS), NUMBERS, ["full"] * 3, 5),
    "verify_greedy": ("verify_greedy", (TARGET, TOKENS), {"eos": 3}, ["full", "stack", "full", "contiguous"], 3),
}


@pytest.fixture(autouse=True)
def poison() -> None:
    """Leave out that of the suite, whose fills would be counted."""


def device(value: Any) -> Any:
    return tree_map_only(torch.Tensor, OnDevice, value)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_waits_for_nothing_and_launches_little(name: str) -> None:
    function, rows, keywords, by_torch, kernels = CALLS[name]
    expected = getattr(draftproof, function)(*rows, **keywords, backend="eager")
    with simulation() as launched:
        found = below(getattr(draftproof, function)(*device(rows), **device(keywords)))
    for a, b in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert a.numpy().tobytes() == b.numpy().tobytes()
    assert [name for name in launched if name[0] != "<"] == by_torch
    assert len(launched) - len(by_torch) <= kernels


def test_what_waits_is_seen() -> None:
    with simulation():
        rows = device(ROWS)
        with pytest.raises(AssertionError, match="reads a value on the host"):
            bool((rows > 0).any())
        with pytest.raises(AssertionError, match="copies to the host"):
            rows.to("cpu")
        with pytest.raises(AssertionError, match="copies from the host"):
            rows + ROWS


def test_bad_parameters_of_a_device_mark_their_rows() -> None:
    heat = torch.tensor([1.0, -1.0, float("nan"), 0.5])
    offset = torch.tensor([0, 5, 7, -1])
    expected = draftproof.sample_with_logprobs(ROWS[:1], seed=TENSORS["seed"][:1], backend="eager")
    with simulation():
        stream = device({"seed": TENSORS["seed"], "offset": offset})
        found = below(draftproof.sample_with_logprobs(OnDevice(ROWS), temperature=OnDevice(heat), **stream))
    assert found.status.tolist() == [0, *[Status.BAD_PARAMETER] * 3]
    assert found.tokens.tolist() == [*expected.tokens.tolist(), -1, -1, -1]
    assert found.logprobs[1:].isnan().all()
    assert found.kept.tolist()[1:] == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32])
def test_types_of_top_k(dtype: torch.dtype) -> None:
    top_k = torch.tensor([1, 3, -1, 0]).to(dtype)
    expected = draftproof.filter_logits(ROWS, top_k=top_k, backend="eager")
    with simulation():
        found = below(draftproof.filter_logits(OnDevice(ROWS), top_k=OnDevice(top_k)))
    assert found.numpy().tobytes() == expected.numpy().tobytes()


@pytest.mark.parametrize(("version", "reason"), [("3.5.1", "must be 3.6 or newer, got 3.5.1"), (None, "no version")])
def test_a_triton_that_is_too_old(version: str | None, reason: str, tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text(f"__version__ = {version!r}\n" if version else "\n")
    script = "import draftproof; print(draftproof.backends()['sample']['triton'])"
    found = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(draftproof.__file__).parents[1])])}
    said = subprocess.run([sys.executable, "-c", script], env=found, capture_output=True, text=True, check=True)
    assert reason in said.stdout


def test_kernels_run_on_the_gpu_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext(current.append(device)))

    def implementation(*_: Any) -> Any:
        assert current == [torch.device("cuda", 1)]
        return torch.zeros(2), torch.zeros(2)

    implementation.__module__ = "draftproof.sampling.triton"
    monkeypatch.setattr(_dispatch, "resolve", lambda *_: implementation)
    monkeypatch.setattr(_dispatch, "_kernels", lambda *_: None)
    monkeypatch.setattr(_dispatch._checks, "values", lambda _, named: (named, None))
    with FakeTensorMode():
        rows = torch.empty(2, 8, device="cuda:1")
    arguments = [rows if name == "logits" else None for name in _dispatch.OPERATIONS["sample"].arguments]
    _dispatch.run("sample", tuple(arguments), False, "triton")
    assert current
