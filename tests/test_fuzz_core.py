"""Differential fuzzing: the C++ core against eager on NumPy, every output bit, on inputs as odd as the checks allow.

Each case follows from (DRAFTPROOF_FUZZ_SEED, number of the case); the seed comes from the clock unless that variable
gives it, and a failure names both. DRAFTPROOF_FUZZ_SECONDS (3) is how long each test runs, DRAFTPROOF_FUZZ_CASE where
it begins.
"""

import itertools
import os
import subprocess
import sys
import time

import numpy as np
import pytest

import draftproof
from draftproof import _native

pytestmark = [
    pytest.mark.fuzz,
    pytest.mark.skipif(_native.core is None, reason="this installation has no C++ core: " + _native.missing),
]

SECONDS = float(os.environ.get("DRAFTPROOF_FUZZ_SECONDS", "3"))
SEED = int(os.environ.get("DRAFTPROOF_FUZZ_SEED", str(time.time_ns())))
FIRST = int(os.environ.get("DRAFTPROOF_FUZZ_CASE", "0"))
FLT_MAX = float(np.finfo(np.float32).max)
RULES = ("token", "block", "match", "greedy")

try:
    import torch
except ImportError:
    torch = None


def pick(rng, *choices):
    return choices[rng.integers(len(choices))]


def vocabulary(rng):
    if rng.random() < 0.93:
        return int(rng.integers(1, pick(rng, 10, 301)))
    return pick(rng, 511, 512, 513, 1000, 4095, 8193, 33333, 70001)


# --- values -----------------------------------------------------------------------------------------------------------


def sprinkle(rng, a, value, chance, share):
    """Put ``value`` into some of ``a``, in some of the calls."""
    return np.where(rng.random(a.shape) < share, value, a) if rng.random() < chance else a


def logit_values(rng, shape):
    vocab = shape[-1]
    kind = rng.integers(10)
    if kind < 3:
        a = rng.standard_normal(shape) * pick(rng, 1e-3, 1, 3, 30)
    elif kind == 3:
        a = rng.integers(-3, 4, shape).astype(float)
    elif kind == 4:  # any bit pattern
        a = rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32).astype(float)
        a = np.where(np.isnan(a), 0.5, a)
    elif kind == 5:
        a = rng.choice([FLT_MAX, -FLT_MAX, 3e38, 1e30, 1.0, 0.0], shape)
    elif kind == 6:
        a = rng.integers(-9, 10, shape) * 1.4e-45
    elif kind == 7:
        a = np.full(shape, pick(rng, 0.0, -5.0, 1e30, -FLT_MAX))
    elif kind == 8:  # weights around the lightest that counts
        a = -rng.uniform(20, 30, shape) * (rng.random(shape) < 0.9)
    else:
        a = np.log(rng.dirichlet(np.full(vocab, 0.1), shape[:-1]) + 1e-300)
    a = sprinkle(rng, a, -np.inf, 0.4, pick(rng, 0.1, 0.5, 0.99, 1.0))
    a = sprinkle(rng, a, np.inf, 0.05, 0.02)
    a = sprinkle(rng, a, -0.0, 0.1, 0.3)
    if rng.random() < 0.1:  # one in each block stands out
        a[..., int(rng.integers(64)) :: 64] += pick(rng, 1.0, 1e7, -1e7) * (1 + rng.random())
    return sprinkle(rng, a, np.nan, 0.05, pick(rng, 0.3, 1 / vocab))


def probability_values(rng, shape):
    kind = rng.integers(7)
    if kind < 3:
        a = rng.dirichlet(np.full(shape[-1], pick(rng, 0.05, 1.0)), shape[:-1])
    elif kind == 3:
        a = rng.integers(0, 4, shape) * pick(rng, 1.0, 2.0**-20, 1.4e-45, 2.0**126)
    elif kind == 4:
        a = rng.integers(0, 0x7F800000, shape, dtype=np.uint32).view(np.float32).astype(float)
    elif kind == 5:
        a = (np.arange(shape[-1]) == rng.integers(0, shape[-1], (*shape[:-1], 1))) * pick(rng, 1.0, 1e-40, FLT_MAX)
    else:
        a = np.full(shape, pick(rng, 1.0, 1.4e-45, FLT_MAX))
    a = sprinkle(rng, a, 0.0, 0.3, pick(rng, 0.2, 0.9, 1.0))
    a = sprinkle(rng, a, -0.0, 0.1, 0.2)
    return sprinkle(rng, a, pick(rng, np.nan, np.inf, -1.0, -1e-45), 0.05, 0.02)


NUMBERS = {
    "temperature": (0, 1, 0.7, 2.0, 50.0, 1e-8, 1e-38, 1e-40, 1.4e-45, 1e38, 3.4e38, FLT_MAX),
    "top_k": (0, -1, 1, 2, 3, 7, 50, 64, 299, 2**22, 2**40, 2**62),
    "top_p": (0, 1.4e-45, 1e-10, 2.0**-30, 2.0**-21, 4.7e-7, 0.1, 0.5, 0.9, 0.95, 1 - 2.0**-24, 1 - 2.0**-22, 1),
    "min_p": (0, 1.4e-45, 1e-30, 2.0**-40, 9.2e-13, 0.01, 0.2, 0.5, 1 - 2.0**-24, 1),
    "repetition_penalty": (1, 0.5, 1.3, 1e-7, 1e7, 1e-30, 1e30, 1e-45, FLT_MAX, 1 + 2.0**-23, 1 - 2.0**-24),
}


def numbers(rng, name, size):
    values = np.array([pick(rng, *NUMBERS[name]) for _ in range(size)], dtype=np.int64 if name == "top_k" else float)
    if name == "temperature":
        return np.where(rng.random(size) < 0.3, 10.0 ** rng.uniform(-2, 2, size), values)
    if name in ("top_p", "min_p"):
        return np.where(rng.random(size) < 0.4, rng.random(size), values)
    return values


def filters(rng, batch, prefix=""):
    given = {}
    for name in NUMBERS:
        form = rng.random()
        if form < 0.5:
            continue
        if form < 0.7:
            given[prefix + name] = numbers(rng, name, 1)[0].item()
        elif name == "top_k":
            given[prefix + name] = laid(rng, numbers(rng, name, batch))
        else:
            given[prefix + name] = laid(rng, numbers(rng, name, batch).astype(pick(rng, np.float32, np.float64)))
    return given


def history(rng, rows):
    """Ids for the penalty of some rows, at times the largest of a block of 64, which bounds the block."""
    if rng.random() < 0.3:
        return None
    batch, vocab = rows.shape
    size = (batch, int(rng.integers(0, 9)))
    ids = rng.integers(-1, vocab, size)
    if rng.random() < 0.4:
        start = 64 * int(rng.integers(-(-vocab // 64)))
        largest = start + rows[:, start : start + 64].argmax(1)
        ids = np.where(rng.random(size) < 0.5, largest[:, None], ids)
    ids = sprinkle(rng, ids, pick(rng, -2, vocab, 2**62, -(2**63)), 0.3, 0.2)
    return laid(rng, ids.astype(pick(rng, np.int64, np.int64, np.int32)))


def mask(rng, shape):
    if rng.random() < 0.5:
        return None
    allowed = rng.random(shape) < pick(rng, 0.01, 0.5, 0.95)
    if rng.random() < 0.5:
        return laid(rng, allowed)
    words = -(-shape[-1] // 32)
    bits = rng.random((*shape[:-1], words * 32)) < 0.5  # those beyond the vocabulary say nothing
    bits[..., : shape[-1]] = allowed
    return laid(rng, np.packbits(bits, axis=-1, bitorder="little").view(np.int32))


def stream(rng, batch, drafted=0):
    seed = pick(rng, int(rng.integers(-(2**63), 2**63)), laid(rng, rng.integers(-(2**63), 2**63, batch)))
    high = 2**63 - drafted - 1
    offset = pick(rng, 0, high, int(rng.integers(0, high)), laid(rng, rng.integers(0, 2**62, batch)))
    return {"seed": seed, "offset": offset}


# --- layouts ----------------------------------------------------------------------------------------------------------


def laid(rng, a):
    """The same values with other strides, another start, or in a larger array."""
    a = np.asarray(a)
    kind = rng.integers(8)
    if kind < 2 or a.ndim == 0:
        return a
    if kind == 2:
        return np.asfortranarray(a)
    axis = int(rng.integers(a.ndim))
    if kind == 3:
        return np.flip(np.flip(a, axis).copy(), axis)
    if kind == 4:
        wide = np.repeat(a, 3, axis)
        return wide[(slice(None),) * axis + (slice(1, None, 3),)]
    if kind == 5:
        table = np.zeros(a.shape, dtype=[("before", "i1"), ("value", a.dtype), ("after", "i2")])
        table["value"] = a
        return table["value"]
    if kind == 6:  # not aligned to its items
        raw = np.frombuffer(b"\0" + a.tobytes(), np.uint8, offset=1)
        return raw.view(a.dtype).reshape(a.shape) if a.size else a
    out = np.full(tuple(n + 3 for n in a.shape), a.flat[0] if a.size else 0, a.dtype)
    inner = out[tuple(slice(2, 2 + n) for n in a.shape)]
    inner[...] = a
    inner.flags.writeable = bool(rng.integers(2))
    return inner


def repeated(rng, make, shape):
    """Rows of the given shape; now and then one row stands for all of an axis."""
    if rng.random() < 0.9:
        return make(rng, shape)
    axis = int(rng.integers(len(shape) - 1))
    return np.broadcast_to(make(rng, (*shape[:axis], 1, *shape[axis + 1 :])), shape)


def tensor(rng, a, dtype):
    made = torch.from_numpy(np.array(a)).to(dtype)
    kind = rng.integers(4)
    if kind == 0 and made.ndim > 1:
        return made.transpose(0, 1).contiguous().transpose(0, 1)
    if kind == 1:
        return torch.stack([made, made], -1)[..., 1]
    if kind == 2:
        return torch._neg_view(-made)
    return made


def rows(rng, make, shape, library):
    """``(given, plain)``: rows for the core, and the same rows for eager as contiguous float32 NumPy."""
    with np.errstate(all="ignore"):
        values = repeated(rng, make, shape)
        if library == "torch":
            dtype = pick(rng, torch.float32, torch.bfloat16, torch.float16, torch.float64)
            given = tensor(rng, values, dtype)
            return given, np.ascontiguousarray(given.resolve_neg().float().numpy())
        values = values.astype(pick(rng, np.float32, np.float32, np.float16, np.float64), copy=False)
        given = values if 0 in values.strides else laid(rng, values)
        return given, np.ascontiguousarray(given).astype(np.float32)


# --- running ----------------------------------------------------------------------------------------------------------


def outcome(function, *arrays, **given):
    """What a call says, as bytes, or the library's own error."""
    try:
        said = function(*arrays, **given)
    except (draftproof.ShapeError, draftproof.DtypeError, draftproof.ValueRangeError) as error:
        return type(error).__name__, str(error)
    said = said if isinstance(said, tuple) else (said,)
    return [(str(a.dtype), a.shape, np.where(np.isnan(a), np.nan, a).tobytes()) for a in map(np.asarray, said)]


def to_library(library, value):
    if library == "torch" and isinstance(value, np.ndarray):
        return torch.from_numpy(np.array(value))
    return value


def compare(note, library, function, given, plain, /, **settings):
    """The core on the given arrays says what eager says on plain ones, whatever its level and thread count."""
    expected = outcome(function, *plain, **settings, backend="eager")
    other = {name: to_library(library, value) for name, value in settings.items()}
    for backend in ("cpu", "auto"):
        got = outcome(function, *(to_library(library, a) for a in given), **other, backend=backend)
        assert got == expected, f"{note} {function.__name__} {backend}: {settings}"


def cases(check):
    """Run a check on case after case for as long as the test may take."""
    core = _native.core
    level, threads = core.level(), core.num_threads()
    libraries = ("numpy", "torch") if torch is not None else ("numpy",)
    print(f"DRAFTPROOF_FUZZ_SEED={SEED}", end=" ")  # noqa: T201
    end = time.monotonic() + SECONDS
    try:
        for case in itertools.count(FIRST):
            if time.monotonic() > end:
                break
            rng = np.random.default_rng([SEED, case])
            core.set_level(pick(rng, *core.levels()))
            core.set_num_threads(int(rng.integers(1, 4)))
            check(rng, pick(rng, *libraries), f"DRAFTPROOF_FUZZ_SEED={SEED} DRAFTPROOF_FUZZ_CASE={case}")
        print(f"{case - FIRST} cases")  # noqa: T201
    finally:
        core.set_level(level)
        core.set_num_threads(threads)


def test_sampling():
    def check(rng, library, note):
        batch, vocab = int(rng.integers(0, 6)), vocabulary(rng)
        given, plain = rows(rng, logit_values, (batch, vocab), library)
        settings = filters(rng, batch) | {"prev_tokens": history(rng, plain), "check": False}
        settings["mask"] = mask(rng, (batch, vocab))
        compare(note, library, draftproof.filter_logits, (given,), (plain,), **settings)
        settings |= stream(rng, batch)
        settings["draft_index"] = pick(rng, None, None, 0, 2**24 - 1)
        compare(note, library, draftproof.sample, (given,), (plain,), **settings)
        compare(note, library, draftproof.sample_with_logprobs, (given,), (plain,), **settings)

    cases(check)


def test_the_cut_of_top_p():
    """A top_p that falls on a prefix sum, often that of the token which wins without it, or one float next to it."""

    def check(rng, library, note):
        vocab = vocabulary(rng)
        given, plain = rows(rng, logit_values, (1, vocab), library)
        where = stream(rng, 1)
        order = np.argsort(-plain[0], kind="stable")
        winner = draftproof.sample(plain, **where, check=False, backend="eager")[0]
        rank = pick(rng, int(rng.integers(vocab)), int(np.flatnonzero(order == winner)[0]) if winner >= 0 else 0)
        with np.errstate(all="ignore"):
            weights = np.exp(plain[0, order].astype(float) - plain.max())
            sums = np.nan_to_num(np.cumsum(weights) / weights.sum(), nan=0.5).astype(np.float32)
        top_p = np.nextafter(sums[max(0, rank - int(rng.integers(2)))], np.float32(pick(rng, 0, 2)))
        settings = {"top_p": np.minimum(top_p, 1).item(), "top_k": pick(rng, None, int(rng.integers(1, vocab + 1)))}
        compare(note, library, draftproof.filter_logits, (given,), (plain,), check=False, **settings)
        settings |= where
        compare(note, library, draftproof.sample, (given,), (plain,), check=False, **settings)
        compare(note, library, draftproof.sample_with_logprobs, (given,), (plain,), check=False, **settings)

    cases(check)


def test_penalties_on_the_largest_of_each_block():
    """They move what bounds a block, by any amount and in both directions."""

    def check(rng, library, note):
        vocab, batch = int(rng.integers(4096, 40001)), 64
        few = np.where(rng.random(vocab) < 0.003, -0.5, -1.0 - rng.integers(0, 3, vocab) / 2)
        row = pick(rng, few, 0.1 * rng.standard_normal(vocab))
        stands_out = np.arange(int(rng.integers(64)), vocab, 64)
        row[stands_out] += pick(rng, 0.0, 1.0, 1e7, -1e7) * (1 + rng.random(len(stands_out)) * rng.integers(2))
        blocks = np.pad(row, (0, -vocab % 64), constant_values=-np.inf).reshape(-1, 64)
        largest = blocks.argmax(1) + 64 * np.arange(len(blocks))
        largest = largest[rng.random(len(largest)) < pick(rng, 0.01, 0.5, 1.0)]
        given = np.broadcast_to(row.astype(np.float32), (batch, vocab))
        settings = {
            "temperature": pick(rng, 1, 0.7, 1e-38, 1e30),
            "repetition_penalty": pick(rng, 0.5, 2, 1e-7, 1e7),
            "prev_tokens": np.broadcast_to(largest, (batch, len(largest))),
            "seed": rng.integers(-(2**63), 2**63, batch),
        }
        compare(note, library, draftproof.sample, (given,), (given,), **settings, check=False)

    cases(check)


def test_top_p_on_the_widest_rows():
    """Sums near 2**62: who wins the race without top-p wins with it, if it is kept, and else a kept token does."""

    def check(rng, _library, note):
        vocab, batch = pick(rng, 2**22, 2**22 - 1, 2**21 + 17), 32
        row = pick(rng, rng.standard_normal(vocab), rng.integers(0, 3, vocab), np.zeros(vocab)).astype(np.float32)
        given = np.broadcast_to(row, (batch, vocab))
        settings = {"temperature": pick(rng, 1, 1e3, 1e30), "check": False, "backend": "cpu"}
        top_p = pick(rng, 0.9999, 1 - 2.0**-24, rng.random(), rng.uniform(0.99, 1))
        seed = rng.integers(-(2**63), 2**63, batch)
        kept = np.isfinite(draftproof.filter_logits(row[None], top_p=top_p, **settings)[0])
        first = draftproof.sample(given, seed=seed, **settings)
        drawn = draftproof.sample(given, seed=seed, top_p=top_p, **settings)
        assert np.array_equal(drawn == first, kept[first]), f"{note} {vocab} {settings} {top_p}"
        assert kept[drawn].all(), f"{note} {vocab} {settings} {top_p}"

    cases(check)


def test_sampling_from_probabilities():
    def check(rng, library, note):
        batch = int(rng.integers(0, 6))
        given, plain = rows(rng, probability_values, (batch, vocabulary(rng)), library)
        compare(note, library, draftproof.sample_probs, (given,), (plain,), check=False, **stream(rng, batch))

    cases(check)


def drafts(rng, target, draft, drafted):
    """Ids that are often likely ones, now and then padding or no ids at all."""
    vocab = max(target.shape[-1], 0 if draft is None else draft.shape[-1])
    batch = target.shape[0]
    ids = rng.integers(0, vocab, (batch, drafted))
    likely = (target[:, :drafted] if draft is None else draft).argmax(-1)
    ids = np.where(rng.random(ids.shape) < pick(rng, 0.0, 0.7, 1.0), likely, ids)
    ids = sprinkle(rng, ids, pick(rng, -1, -2, vocab, target.shape[-1], 2**62, -(2**63)), 0.3, 0.2)
    return laid(rng, ids.astype(pick(rng, np.int64, np.int64, np.int32)))


def verified(rng, make, library):
    """``(given, plain, settings)`` of a round: rows on both sides, drafts, where they end."""
    batch, drafted, vocab = int(rng.integers(0, 5)), int(rng.integers(0, 6)), vocabulary(rng)
    target, plain_target = rows(rng, make, (batch, drafted + 1, vocab), library)
    draft, plain_draft = None, None
    kind = rng.random()
    if kind < 0.2:  # the same law on both sides: no residual
        draft, plain_draft = target[:, :drafted], plain_target[:, :drafted]
    elif kind < 0.7:
        draft_vocab = vocab if rng.random() < 0.6 else vocabulary(rng)
        draft, plain_draft = rows(rng, make, (batch, drafted, draft_vocab), library)
    tokens = drafts(rng, plain_target, plain_draft, drafted)
    ended = laid(rng, rng.integers(0, drafted + 1, batch))
    ids = rng.integers(-1, vocab, (batch, int(rng.integers(0, 4))))
    settings = {
        "num_draft_tokens": pick(rng, None, None, drafted, ended),
        "eos": pick(rng, None, int(rng.integers(0, vocab)), laid(rng, ids), ids[0] if batch else None),
        "check": False,
    }
    return (target, draft, tokens), (plain_target, plain_draft, np.ascontiguousarray(tokens)), settings


def test_verification():
    def check(rng, library, note):
        given, plain, settings = verified(rng, logit_values, library)
        target, draft, tokens = plain
        batch, positions, vocab = target.shape
        greedy = given[0], given[2]
        compare(note, library, draftproof.verify_greedy, greedy, (target, tokens), **settings)
        settings |= filters(rng, batch) | {"prev_tokens": history(rng, target[:, 0])}
        settings |= filters(rng, batch, "draft_") if rng.random() < 0.4 else {}
        settings["mask"] = mask(rng, (batch, positions, vocab))
        draft_vocab = vocab if draft is None else draft.shape[-1]
        settings["draft_mask"] = mask(rng, (batch, positions - 1, draft_vocab)) if rng.random() < 0.3 else None
        settings |= stream(rng, batch, positions - 1)
        for rule in RULES:
            compare(note, library, draftproof.verify, given, plain, rule=rule, **settings)

    cases(check)


def uniforms(rng, shape):
    if rng.random() < 0.4:
        return None
    edges = rng.choice([0.0, 1.0, 1 - 2.0**-24, 2.0**-24, 1.4e-45, 0.5], shape)
    values = np.where(rng.random(shape) < 0.5, edges, rng.random(shape))
    return laid(rng, values.astype(pick(rng, np.float32, np.float64, np.float16)))


def test_verification_from_probabilities():
    def check(rng, library, note):
        given, plain, settings = verified(rng, probability_values, library)
        batch, positions, _ = plain[0].shape
        settings |= stream(rng, batch, positions - 1)
        settings["uniform_accept"] = uniforms(rng, (batch, positions - 1))
        settings["uniform_sample"] = uniforms(rng, (batch, positions))
        for rule in RULES:
            compare(note, library, draftproof.verify_probs, given, plain, rule=rule, **settings)

    cases(check)


MEANWHILE = """
import sys, threading, time
import numpy as np
import draftproof

rng = np.random.default_rng(int(sys.argv[1]))
logits = rng.standard_normal((1, 2, 100_000)).astype(np.float32) * 3
other = np.full_like(logits, -np.inf)
other[..., rng.integers(100_000, size=9)] = 50
rows, drafts = logits.copy(), np.array([[5]])

def write():
    while True:
        for values in (logits, other, np.exp(logits), np.exp(other)):
            np.copyto(rows, values)

threading.Thread(target=write, daemon=True).start()
end = time.monotonic() + float(sys.argv[2])
for seed in range(10**9):
    if time.monotonic() > end:
        break
    for settings in ({}, {"top_p": 0.9}, {"top_p": 0.1, "min_p": 0.01}, {"top_k": 9, "top_p": 0.9}, {"temperature": 0}):
        draftproof.filter_logits(rows[0], **settings, check=False)
        draftproof.sample_with_logprobs(rows[0], **settings, seed=seed, check=False)
        for rule in ("token", "block", "match"):
            draftproof.verify(rows, rows[:, :1], drafts, rule=rule, **settings, seed=seed, check=False)
    draftproof.sample_probs(rows[0], seed=seed, check=False)
    for rule in ("token", "block", "match", "greedy"):
        draftproof.verify_probs(rows, rows[:, :1], drafts, rule=rule, seed=seed, check=False)
"""


def test_rows_that_another_thread_writes_to():
    """The results are any, but the process neither crashes nor hangs."""
    command = [sys.executable, "-X", "faulthandler", "-c", MEANWHILE, str(SEED % 2**32), str(SECONDS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS + 60)
    assert done.returncode == 0, f"DRAFTPROOF_FUZZ_SEED={SEED}\n{done.stderr}"
