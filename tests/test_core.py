"""The C++ core: levels, threads, and what the compiler made of the pinned arithmetic."""

import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import draftproof
from draftproof import _native

needs_core = pytest.mark.skipif(_native.core is None, reason="this installation has no C++ core: " + _native.missing)
pytestmark = needs_core

SETTINGS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    {"top_p": 0.9},
    {"top_p": 0.3, "min_p": 0.01},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3},
]


@pytest.fixture
def core():
    """The core at its own level and thread count, put back afterwards."""
    level, threads = _native.core.level(), _native.core.num_threads()
    yield _native.core
    _native.core.set_level(level)
    _native.core.set_num_threads(threads)


def rows(batch: int, vocab: int, positions: int | None = None) -> np.ndarray:
    shape = (batch, vocab) if positions is None else (batch, positions, vocab)
    logits = np.random.default_rng(vocab).standard_normal(shape).astype(np.float32) * 3
    logits[np.random.default_rng(1).random(shape) < 0.05] = -np.inf
    return np.round(logits, 1)  # ties


def results(backend: str, vocab: int) -> list[np.ndarray]:
    """Everything the operations say about a small batch."""
    target = rows(9, vocab, 4)
    draft = rows(9, vocab, 3) * np.float32(0.9)
    history = np.random.default_rng(2).integers(-1, vocab, (9, 20))
    said = []
    for settings in SETTINGS:
        given = {**settings, "prev_tokens": history, "check": False, "backend": backend}
        said.extend(draftproof.sample_with_logprobs(target[:, 0], seed=5, offset=11, **given))
        said.append(draftproof.filter_logits(target[:, 0], **given))
        drafts = np.stack(
            [draftproof.sample(draft[:, i], seed=5, offset=11, draft_index=i, **given) for i in range(3)], axis=1
        )
        for rule in ("token", "block", "match", "greedy"):
            said.extend(draftproof.verify(target, draft, drafts, rule=rule, seed=5, offset=11, **given))
    return said


@pytest.mark.parametrize("vocab", [1, 63, 200, 5001])
def test_every_level_has_the_bits_of_eager(core, vocab):
    expected = [array.tobytes() for array in results("eager", vocab)]
    assert len(core.levels()) >= 1
    for level in core.levels():
        assert core.set_level(level)
        assert [array.tobytes() for array in results("cpu", vocab)] == expected, level


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_threads_change_nothing(core, threads):
    logits = rows(40, 32001)
    core.set_num_threads(1)
    alone = draftproof.sample(logits, temperature=0.8, top_p=0.9, seed=3)
    draftproof.set_num_threads(threads)
    assert core.num_threads() == threads
    for _ in range(5):
        assert np.array_equal(draftproof.sample(logits, temperature=0.8, top_p=0.9, seed=3), alone)


@pytest.mark.parametrize("wrong", [0, -1, True, 1.0, "2", None, np.timedelta64(1, "s")])
def test_thread_count_is_checked(wrong):
    with pytest.raises(draftproof.ValueRangeError, match="n must be an int in"):
        draftproof.set_num_threads(wrong)


def test_an_unknown_level_is_refused(core):
    with pytest.raises(draftproof.BackendError, match="level must be one of"):
        _native.set_level("x86_64_v9")
    assert core.level() in core.levels()


def test_no_fused_multiply_add():
    """A fused multiply-add rounds once where the pinned arithmetic rounds twice."""
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("objdump is not installed")
    listing = subprocess.run([objdump, "-d", _native.core.__file__], capture_output=True, text=True, check=True).stdout
    assert "mulps" in listing or "fmul" in listing
    fused = re.compile(r"\s(vfn?m(add|sub)|fn?m(add|sub)\s|fml[as])")
    assert [line for line in listing.splitlines() if fused.search(line)] == []


def test_a_system_without_threads_to_spare():
    resource = pytest.importorskip("resource")
    if not Path("/proc/self/statm").exists():
        pytest.skip("the address space in use is not known here")
    script = f"""
import numpy as np, draftproof
logits = np.random.default_rng(0).standard_normal((8, 50000)).astype(np.float32)
draftproof.set_num_threads(1)
alone = [draftproof.sample(logits, seed=seed).tolist() for seed in range(3)]
import resource
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20), {resource.RLIM_INFINITY}))
draftproof.set_num_threads(8)
assert [draftproof.sample(logits, seed=seed).tolist() for seed in range(3)] == alone
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_nested_tensors_are_refused():
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the nested layout is a prototype, torch says
        nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(2)])
    with pytest.raises(draftproof.DtypeError, match="logits must be a NumPy array or a torch tensor"):
        draftproof.sample(nested, seed=1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_works_and_starts_threads_of_its_own(core):
    logits = rows(64, 32000)
    core.set_num_threads(2)
    expected = draftproof.sample(logits, top_p=0.9, seed=3).tolist()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"same" if draftproof.sample(logits, top_p=0.9, seed=3).tolist() == expected else b"other")
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    assert os.read(reader, 10) == b"same"
    os.close(reader)


def both_backends(operation, *arguments, **options):
    """The results of eager and of the core, one beside the other."""
    results = [operation(*arguments, check=False, backend=backend, **options) for backend in ("eager", "cpu")]
    return zip(*results, strict=True)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_what_rough_bounds_leave_open_is_decided_exactly(rule):
    """Target and draft rows agree within 1 %, so that uniforms near 1 fall inside the bounds."""
    rng = np.random.default_rng(3)
    target = rng.standard_normal((3000, 4, 70)).astype(np.float32)
    draft = target[:, :3] + np.float32(0.003) * rng.standard_normal((3000, 3, 70)).astype(np.float32)
    drafts = rng.integers(0, 70, (3000, 3))
    said = list(both_backends(draftproof.verify, target, draft, drafts, rule=rule, seed=np.arange(3000)))
    for expected, got in said:
        assert np.asarray(got).tobytes() == np.asarray(expected).tobytes()
    assert 1 <= np.sum(said[0][0] < 3) <= 60  # only uniforms next to 1 refuse


@pytest.mark.parametrize("rule", ["token", "block"])
def test_what_bounds_on_the_sum_of_probabilities_leave_open_is_decided_exactly(rule):
    """Uniforms within 1e-5 of p / q, where the bounds on the two sums leave 1e-4 open."""
    rng = np.random.default_rng(4)
    n = 3000
    target = rng.random((n, 2, 70)).astype(np.float32)
    draft = rng.random((n, 1, 70)).astype(np.float32)
    drafts = np.argmax(draft[:, 0] - target[:, 0], axis=1)[:, None]
    p, q = (
        np.take_along_axis(rows / rows.sum(axis=2, keepdims=True, dtype=np.float64), drafts[:, None], 2)[:, 0]
        for rows in (target[:, :1], draft)
    )
    uniform = (p / q * (1 + 1e-5 * rng.uniform(-1, 1, (n, 1)))).astype(np.float32)
    sample = rng.random((n, 2)).astype(np.float32)
    options = {"rule": rule, "uniform_accept": uniform, "uniform_sample": sample}
    accepted = None
    for expected, got in both_backends(draftproof.verify_probs, target, draft, drafts, **options):
        assert np.asarray(got).tobytes() == np.asarray(expected).tobytes()
        accepted = got if accepted is None else accepted
    assert 0.4 < np.mean(accepted) < 0.6


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("temperature", [1.0, 0.05])
@pytest.mark.parametrize("start", [-np.inf, -1e30, -1000.0, -30.0, 30.0, 1000.0, 1e30, np.inf])
def test_rows_whose_first_blocks_do_not_tell_what_the_rest_weighs(rule, temperature, start):
    rng = np.random.default_rng(5)
    target = rng.standard_normal((100, 3, 1301)).astype(np.float32)
    draft = target[:, :2] + np.float32(0.1) * rng.standard_normal((100, 2, 1301)).astype(np.float32)
    target[::2, :, :1100] += np.float32(start)
    draft[1::3, :, :1100] += np.float32(start)
    drafts = np.argmax(draft, axis=2)
    options = {"rule": rule, "temperature": temperature, "seed": np.arange(100)}
    for expected, got in both_backends(draftproof.verify, target, draft, drafts, **options):
        assert np.asarray(got).tobytes() == np.asarray(expected).tobytes()


@pytest.mark.parametrize("operation", [draftproof.verify, draftproof.verify_probs])
def test_block_verification_of_drafts_from_their_law(operation):
    """Most prefixes are decided by the scale alone; it differs from 0 and 1 in a third of them."""
    rng = np.random.default_rng(6)
    target = rng.standard_normal((3000, 5, 70)).astype(np.float32)
    draft = target[:, :4] + np.float32(0.7) * rng.standard_normal((3000, 4, 70)).astype(np.float32)
    seed = np.arange(3000)
    drafts = np.stack([draftproof.sample(draft[:, i], seed=seed, draft_index=i) for i in range(4)], axis=1)
    rows = (target, draft) if operation is draftproof.verify else (np.exp(target), np.exp(draft))
    for expected, got in both_backends(operation, *rows, drafts, rule="block", seed=seed):
        assert np.asarray(got).tobytes() == np.asarray(expected).tobytes()


@pytest.mark.parametrize("k", [1, 60, 700, 3000, 39_999])
def test_top_k_of_fewer_and_of_more_than_there_are_blocks(k):
    logits = np.random.default_rng(k).standard_normal((2, 40_000)).astype(np.float32)
    for rounded in (logits, np.round(logits, 1)):
        expected, got = (draftproof.filter_logits(rounded, top_k=k, backend=b) for b in ("eager", "cpu"))
        assert got.tobytes() == expected.tobytes()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks glibc how much memory is in use")
def test_scratch_is_a_few_bytes_a_block():
    """64 KiB a thread, and 4 bytes of block maxima for every 64 ids of each row at work; nothing more later."""
    script = """
import ctypes, numpy as np, draftproof
class Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena a b c mapped d e small f g".split()]
if not hasattr(ctypes.CDLL(None), "mallinfo2"):
    raise SystemExit
ask = ctypes.CDLL(None).mallinfo2
ask.restype = Memory
in_use = lambda: ask().small + ask().mapped
draftproof.set_num_threads(1)
V, K = 1 << 20, 3
rows = np.random.default_rng(0).standard_normal((1, K + 1, V)).astype(np.float32)
history, drafts = np.arange(512)[None], np.zeros((1, K), dtype=np.int64)
calls = {
    "sample": lambda x: draftproof.sample(x[:, 0], top_p=0.9, seed=1),
    "top-k": lambda x: draftproof.sample(x[:, 0], top_k=50, top_p=0.9, seed=1),
    "token": lambda x: draftproof.verify(x, x[:, :K], drafts, rule="token", seed=1),
    "block": lambda x: draftproof.verify(x, x[:, :K], drafts, rule="block", seed=1),
}
for name, call in calls.items():
    call(rows[..., :64])
    before = in_use()
    call(rows)
    first = in_use() - before
    call(rows)
    again = in_use() - before
    rows_at_work = 2 * K + 1 if name == "block" else 2
    assert first <= (64 << 10) + rows_at_work * V // 64 * 4, (name, first)
    assert again <= first + 4096, (name, first, again)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_penalty_that_moves_maxima_far_leaves_the_race_right():
    rng = np.random.default_rng(0)
    overflow = np.full((64, 4096), -2, np.float32)  # the penalised -3 becomes another maximum of -1.5
    overflow[:, :64], overflow[:, 5], overflow[:, 1000] = -3.5, -3, -1.5
    falls = 0.1 * rng.standard_normal((64, 16384)).astype(np.float32)
    falls[:, ::64] = 1e7 * (1 + rng.random((64, 256)))
    every = np.arange(0, 16384, 64)
    rises = np.where(np.arange(16384) % 64 == 0, -1e7 * (1 + rng.random((64, 16384))), -3e7).astype(np.float32)
    for logits, temperature, penalty, history in (
        (overflow, 1e-38, 0.5, np.array([5])),
        (falls, 1.0, 1e7, every),
        (rises, 1.0, 1e-7, every),
    ):
        given = {"temperature": temperature, "repetition_penalty": penalty, "seed": np.arange(64), "check": False}
        given["prev_tokens"] = history[None].repeat(64, axis=0)
        expected, got = (draftproof.sample(logits, **given, backend=backend) for backend in ("eager", "cpu"))
        assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("levels", [0, 1, 3, 40])
@pytest.mark.parametrize("top_p", [0.5, 0.9])
def test_where_top_p_ends(levels, top_p):
    """Rows with few values end among ties. Flat and steep rows in turns: none may inherit from the one before."""
    rng = np.random.default_rng(levels)
    logits = rng.standard_normal((800, 5003)).astype(np.float32)
    if levels:
        logits = np.round(logits * levels) / levels
    logits[1::2] *= 4
    given = {"top_p": top_p, "seed": np.arange(800)}
    expected, got = (draftproof.sample(logits, **given, backend=backend) for backend in ("eager", "cpu"))
    assert got.tolist() == expected.tolist()


def test_top_p_of_the_largest_flat_row():
    """The masses of such a row come near 2^62. The seeds have their first winner next to the end of the set."""
    logits = np.random.default_rng(0).standard_normal((1, 1 << 22)).astype(np.float32)
    for seed in (467, 959):
        given = {"temperature": 1e30, "top_p": 0.9999, "seed": seed}
        expected, got = (draftproof.sample(logits, **given, backend=b) for b in ("eager", "cpu"))
        assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("noise", [1.0, 1e-2, 1e-4, 0.0])
@pytest.mark.parametrize("steepness", [1, 6])
def test_the_token_after_a_rejection(core, rule, noise, steepness):
    """Mostly from one pass over both rows. The more alike they are, the more tokens it leaves to exact masses."""
    rng = np.random.default_rng(0)
    target = steepness * rng.standard_normal((32, 4, 9001)).astype(np.float32)
    draft = target[:, :3] + noise * rng.standard_normal((32, 3, 9001)).astype(np.float32)
    draft[::2, :, :5] += 3  # equal otherwise where there is no noise
    drafts = draftproof.sample(draft.reshape(96, -1), temperature=1.5, seed=1).reshape(32, 3)
    drafts[::4, 1] = 3
    given = {"rule": rule, "seed": np.arange(32)}
    expected = draftproof.verify(target, draft, drafts, **given, backend="eager")
    for threads in (1, 3):
        core.set_num_threads(threads)
        got = draftproof.verify(target, draft, drafts, **given, backend="cpu")
        assert [part.tolist() for part in got] == [part.tolist() for part in expected]
    assert (expected.num_accepted < 3).sum() > 5


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("temperature", [1e36, 3e38])
def test_distances_that_overflow(rule, temperature):
    """To the maximum, but not to the reference of the row's rough weight."""
    target = np.zeros((200, 2, 4096), dtype=np.float32)
    target[:, :, 1024:] = -3e38
    target[:, :, 2000] = 3e38
    draft = np.full((200, 1, 4096), -np.inf, dtype=np.float32)
    draft[..., :500] = 0
    given = {"temperature": temperature, "rule": rule, "seed": np.arange(200)}
    drafts = np.full((200, 1), 5)
    got, expected = (draftproof.verify(target, draft, drafts, **given, backend=b).tokens for b in ("cpu", "eager"))
    assert got.tolist() == expected.tolist()


def test_a_masked_nan_leaves_one_bit_pattern():
    logits = np.zeros((1, 4), dtype=np.float32)
    logits.view(np.uint32)[0, 1] = 0xFFC00000  # what inf - inf is on x86
    mask = np.array([[True, False, True, True]])
    for backend in ("cpu", "eager"):
        result = draftproof.sample_with_logprobs(logits, mask=mask, seed=1, backend=backend)
        assert result.raw_logprobs.view(np.uint32).tolist() == [0x7FC00000], backend


def test_a_wrong_level_in_the_environment_is_named():
    done = subprocess.run(
        [sys.executable, "-c", "import draftproof"],
        env={**os.environ, "DRAFTPROOF_LEVEL": "fast"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "DRAFTPROOF_LEVEL" in done.stderr
    assert _native.core.levels()[0] in done.stderr
