"""Rows whose ends do not fit a list are searched: the same ends."""

import numpy as np
import pytest

import draftproof
from draftproof import _dispatch

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
launcher = pytest.importorskip("draftproof.sampling.triton")
pytestmark = pytest.mark.skipif(not _dispatch.interpreted(), reason="the kernels are compiled for a device")


@pytest.mark.parametrize("high", [-3.0, 3.0])
@pytest.mark.parametrize("given", [{"top_p": 0.8}, {"top_k": 100, "top_p": 0.9}], ids=str)
def test_ties_beyond_the_list(given: dict[str, float], high: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens tie at the boundary than a list of 16 holds; in negative rows too, whose padding must not count."""
    monkeypatch.setattr(launcher, "LISTED", 16)
    rng = np.random.default_rng(3)
    rows = (high - np.abs(np.round(rng.normal(size=(2, 170)), 0))).astype(np.float32)
    expected = draftproof.filter_logits(rows, **given, backend="eager")
    got = draftproof.filter_logits(torch.from_numpy(rows), **given, backend="triton").numpy()
    assert got.tobytes() == expected.tobytes()
