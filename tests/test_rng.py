"""Philox and the named streams: published vectors, a plain second implementation, and the frozen table.

``tests/golden/streams.json`` holds the words of every stream and the noise of some races. A changed word is a change of
every user's tokens: ``python tests/test_rng.py`` writes the file anew, and the changelog then has to say so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

import draftproof
from draftproof._arrays import namespace
from draftproof.rng import streams
from draftproof.rng.philox import key_of, philox
from draftproof.rng.streams import Purpose, RaceStream, accept_word, emit_words, race_noise, row_seeds, words

GOLDEN = Path(__file__).parent / "golden" / "streams.json"
M32 = (1 << 32) - 1
SEEDS = (0, 1, 0x0123456789ABCDEF, (1 << 63) + 5, (1 << 64) - 1)
OFFSETS = (0, 7, M32, (1 << 32) + 7, (1 << 63) - 1)
INDICES = (0, 1, 300, (1 << 24) - 1)
COUNTERS = (0, 1, 1000, (1 << 22) - 1)
IDS = (0, 1, 2, 3, 4, 31, 32, 62, 63, 64, 65, 126, 127, 128, 129, 191, 192, 255, 256, 50256, 151935, (1 << 22) - 1)
ROWS = (0, 1, 2, 63, 10**6)
LIBRARIES: dict[str, Callable[[Any], Any]] = {"numpy": lambda a: a, "torch": torch.from_numpy}

# Random123, kat_vectors: philox4x32 10, counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def hexadecimal(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


def text(numbers: Iterable[int], digits: int = 8) -> str:
    return " ".join(f"{number:0{digits}x}" for number in numbers)


def plain_philox(counter: tuple[int, ...], key: tuple[int, ...], bits: int = 32) -> tuple[int, ...]:
    """Philox4x32-10 and Philox4x64-10 in Python ints, as the paper states them."""
    multipliers, weyl = {
        32: ((0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)),
        64: ((0xD2E7470EE14C6C93, 0xCA5A826395121157), (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)),
    }[bits]
    size = 1 << bits
    x0, x1, x2, x3 = counter
    for number in range(10):
        k0, k1 = ((k + number * w) % size for k, w in zip(key, weyl, strict=True))
        high0, low0 = divmod(multipliers[0] * x0, size)
        high1, low1 = divmod(multipliers[1] * x2, size)
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
    return x0, x1, x2, x3


def plain_words(seed: int, offset: int, purpose: int, index: int, c0: int) -> tuple[int, ...]:
    """The stream table in Python ints."""
    counter = (c0, offset & M32, offset >> 32, purpose << 24 | index)
    return plain_philox(counter, (seed & M32, seed >> 32))


def signed(seed: int) -> int:
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def column(values: Any, convert: Callable[[Any], Any]) -> Any:
    return convert(np.array([[signed(value)] for value in np.atleast_1d(np.array(values, object))], np.int64))


# --- Philox -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_known_answers(counter: str, key: str, result: str) -> None:
    counter_words, key_words, expected = hexadecimal(counter), hexadecimal(key), hexadecimal(result)
    assert philox(counter_words, key_words) == expected
    assert plain_philox(counter_words, key_words) == expected
    for convert in LIBRARIES.values():
        found = philox(tuple(column(c, convert) for c in counter_words), tuple(column(k, convert) for k in key_words))
        assert tuple(w.item() for w in found) == expected


def test_the_plain_implementation_is_philox_by_numpys_standard() -> None:
    draw = np.random.default_rng(0)
    for _ in range(20):
        counter, key = (draw.integers(0, 1 << 64, n, dtype=np.uint64) for n in (4, 2))
        counter[0] = min(int(counter[0]), (1 << 64) - 2)
        # NumPy steps the counter before it uses it.
        first = tuple(int(c) + (i == 0) for i, c in enumerate(counter))
        expected = np.random.Philox(counter=counter, key=key).random_raw(4).tolist()
        assert list(plain_philox(first, tuple(key.tolist()), bits=64)) == expected


@pytest.mark.parametrize("library", LIBRARIES)
def test_arrays_agree_with_plain_ints(library: str) -> None:
    draw = np.random.default_rng(1)
    counters, keys = draw.integers(0, 1 << 32, (500, 4)), draw.integers(0, 1 << 32, (500, 2))
    counters[:50], keys[:50] = draw.choice([0, 1, M32 - 1, M32, 1 << 31], (50, 4)), draw.choice([0, M32], (50, 2))
    convert = LIBRARIES[library]
    found = philox(tuple(column(c, convert) for c in counters.T), tuple(column(k, convert) for k in keys.T))
    expected = [plain_philox(tuple(c), tuple(k)) for c, k in zip(counters.tolist(), keys.tolist(), strict=True)]
    assert np.concatenate([np.asarray(w) for w in found], axis=1).tolist() == [list(row) for row in expected]
    assert philox(tuple(counters[0].tolist()), tuple(keys[0].tolist())) == expected[0]


def test_a_seed_is_split_into_its_halves() -> None:
    for seed in SEEDS:
        assert key_of(signed(seed)) == key_of(seed) == (seed & M32, seed >> 32)


# --- the frozen table -------------------------------------------------------------------------------------------------


def table() -> dict[str, Any]:
    """Return what the golden file freezes, computed by the library on Python ints and NumPy arrays."""
    return {
        "words": {
            f"{purpose.name} seed={seed:#x} offset={offset:#x} index={index} c0={c0}": text(
                words(seed, offset, purpose, index, c0)
            )
            for purpose, seed, offset, index, c0 in table_keys()
        },
        "races": {
            f"seed={seed:#x} offset={offset:#x} draft={draft}": noise_bits(seed, offset, draft, LIBRARIES["numpy"])
            for seed, offset, draft in race_keys()
        },
        "rows": {f"{seed:#x}": text((row_seeds(seed, b) for b in ROWS), 16) for seed in SEEDS},
    }


def table_keys() -> Iterator[tuple[Purpose, int, int, int, int]]:
    """Yield every purpose with every seed and every offset; index and c0 take turns."""
    for number, (purpose, seed) in enumerate((p, s) for p in Purpose for s in SEEDS):
        for turn, offset in enumerate(OFFSETS):
            yield purpose, seed, offset, INDICES[(number + turn) % 4], COUNTERS[(number // 5 + turn) % 4]


def race_keys() -> Iterator[tuple[int, int, int | None]]:
    for number, seed in enumerate(SEEDS):
        for turn, draft in enumerate((None, 0, 5, (1 << 24) - 1)):
            yield seed, OFFSETS[(number + turn) % 5], draft


def noise_bits(seed: int, offset: int, draft: int | None, convert: Callable[[Any], Any]) -> list[str]:
    index = None if draft is None else column(draft, convert)
    stream = RaceStream(column(seed, convert), column(offset, convert), index)
    ids = convert(np.array([IDS]))
    noise = race_noise(namespace(ids), stream, ids, 1 << 22)
    return text(np.asarray(noise)[0].view(np.int32).tolist())


def test_the_table_is_the_frozen_one() -> None:
    assert table() == json.loads(GOLDEN.read_text())


def test_the_frozen_words_are_those_of_the_plain_implementation() -> None:
    frozen = json.loads(GOLDEN.read_text())
    plain = [text(plain_words(s, o, int(p), i, c)) for p, s, o, i, c in table_keys()]
    assert list(frozen["words"].values()) == plain
    for seed, rows in zip(SEEDS, frozen["rows"].values(), strict=True):
        low_high = [plain_words(seed, 0, 6, 0, b)[:2] for b in ROWS[1:]]
        assert rows == text([seed, *(high << 32 | low for low, high in low_high)], 16)


def test_the_frozen_noise_is_that_of_the_plain_implementation_in_real_numbers() -> None:
    frozen = json.loads(GOLDEN.read_text())["races"]
    for (seed, offset, draft), bits in zip(race_keys(), frozen.values(), strict=True):
        noise = np.array(hexadecimal(bits), dtype=np.int32).view(np.float32)
        expected = [plain_noise(seed, offset, draft, x) for x in IDS]
        # The pinned exponential's bound and one rounded addition.
        np.testing.assert_allclose(noise, expected, rtol=3.8e-7)


def plain_noise(seed: int, offset: int, draft: int | None, x: int) -> float:
    token, block, index = (0, 1, 0) if draft is None else (2, 3, draft)
    pair = plain_words(seed, offset, block, index, x >> 7)[(x >> 6 & 1) * 2 :][:2]
    least = plain_exponential(pair[0]) / 64
    if x & 63 == pair[1] >> 26:
        return least
    return least + plain_exponential(plain_words(seed, offset, token, index, x >> 2)[x & 3])


def plain_exponential(word: int) -> float:
    u = min((np.float32(word) + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1 - 2.0**-24))
    return float(-np.log1p(-np.float64(u)))


@pytest.mark.parametrize("library", LIBRARIES)
def test_arrays_give_the_frozen_words_and_noise(library: str) -> None:
    convert = LIBRARIES[library]
    frozen = json.loads(GOLDEN.read_text())
    found = []
    for purpose in Purpose:
        keys = [key[1:] for key in table_keys() if key[0] == purpose]
        seed, offset, index, c0 = (column(part, convert) for part in zip(*keys, strict=True))
        four = words(seed, offset, purpose, index, c0)
        found += [text(row) for row in np.concatenate(four, axis=1).tolist()]
    assert found == list(frozen["words"].values())
    assert [noise_bits(*key, convert) for key in race_keys()] == list(frozen["races"].values())
    for seed, expected in zip(SEEDS, frozen["rows"].values(), strict=True):
        derived = row_seeds(column(seed, convert), column(ROWS, convert))
        assert text((s % (1 << 64) for s in derived[:, 0].tolist()), 16) == expected


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("draft", [None, 3])
def test_noise_of_all_ids_is_that_of_each(library: str, draft: int | None) -> None:
    convert = LIBRARIES[library]
    index = None if draft is None else column([draft, 0, draft], convert)
    stream = RaceStream(column(SEEDS[2:], convert), column(OFFSETS[2:], convert), index)
    for vocab in (1, 2, 63, 64, 65, 127, 128, 129, 1000):
        ids = convert(np.arange(vocab)[None, :])
        xp = namespace(ids)
        whole = np.asarray(race_noise(xp, stream, None, vocab))
        some = np.asarray(race_noise(xp, stream, ids, vocab))
        assert whole.shape == (3, vocab)
        assert whole.tobytes() == some.tobytes()
        # The noise of an id does not depend on how many there are.
        assert whole.tobytes() == np.asarray(race_noise(xp, stream, None, 2000))[:, :vocab].tobytes()


# --- no draw is used twice --------------------------------------------------------------------------------------------


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Every (seed, counter) that the streams ask Philox for, in order."""
    seen: list[tuple[int, ...]] = []

    def recording(counter: Any, key: Any) -> Any:
        arrays = np.broadcast_arrays(*(np.asarray(part) for part in (*key, *counter)))
        seen.extend(map(tuple, np.stack([a.reshape(-1) for a in arrays], axis=1).tolist()))
        return philox(counter, key)

    monkeypatch.setattr(streams, "philox", recording)
    return seen


def test_no_two_names_share_a_counter(used: list[tuple[int, ...]]) -> None:
    xp = namespace(np.zeros(1))
    for seed in (0, -1):
        for offset in (0, 1, 1 << 32):
            s, o = column(seed, np.asarray), column(offset, np.asarray)
            race_noise(xp, RaceStream(s, o), None, 1000)
            for index in (0, 1, 255, (1 << 24) - 1):
                race_noise(xp, RaceStream(s, o, column(index, np.asarray)), None, 1000)
                accept_word(s, o, index)
                emit_words(s, o, index)
        row_seeds(column(seed, np.asarray), np.arange(5))
    assert len(used) == len(set(used)) == 2 * (3 * (5 * (250 + 8) + 4 * 2) + 5)
    assert {counter[-1] >> 24 for counter in used} == set(Purpose) == set(range(7))


@pytest.mark.parametrize("rule", ["token", "block"])
def test_rounds_of_speculation_use_no_counter_twice(used: list[tuple[int, ...]], rule: str) -> None:
    draw = np.random.default_rng(2)
    drafted, vocab, offset = 3, 40, 17
    for _ in range(8):
        target, draft = (draw.standard_normal((1, n, vocab)).astype(np.float32) for n in (drafted + 1, drafted))
        # `used` listens to the Python streams, which the C++ core does not call.
        given = {"seed": [5], "offset": offset, "backend": "eager"}
        tokens = [draftproof.sample(draft[:, i], draft_index=i, **given).item() for i in range(drafted)]
        result = draftproof.verify(target, draft, np.array([tokens]), rule=rule, **given)
        offset += int(result.num_emitted[0])
    assert len(used) > 8 * (drafted * 11 + 2)
    assert len(used) == len(set(used))


# --- seeds of rows ----------------------------------------------------------------------------------------------------


def test_row_seeds_are_distinct_and_only_the_first_is_the_given_one() -> None:
    rows = np.arange(100_000)
    derived = row_seeds(np.array([[42], [43]]), rows)
    assert derived[:, 0].tolist() == [42, 43]
    assert np.unique(derived).size == 200_000
    assert np.unique(derived & M32).size > 199_000 - 2 * 5
    # Batches of any size begin alike.
    assert (row_seeds(np.array([[42]]), rows[:7]) == derived[:1, :7]).all()


def test_a_scalar_seed_is_the_seeds_of_its_rows() -> None:
    logits = np.random.default_rng(3).standard_normal((6, 50)).astype(np.float32)
    for seed in SEEDS:
        given = row_seeds(np.array(signed(seed)), np.arange(6))
        expected = draftproof.sample(logits, seed=given, offset=3)
        assert (draftproof.sample(logits, seed=seed, offset=3) == expected).all()
        assert (draftproof.sample(logits, seed=given.view(np.uint64), offset=3) == expected).all()
        assert draftproof.sample(logits[:1], seed=seed, offset=3) == expected[0]
        assert (draftproof.sample(logits, seed=signed(seed), offset=3) == expected).all()


# --- randomness -------------------------------------------------------------------------------------------------------

N = 100_000
# Kolmogorov-Smirnov at N draws: p below 1e-4 means a distance of the distribution functions above .0071.
P_VALUE = 1e-4


@pytest.mark.parametrize("vary", ["seed", "offset", "index"])
def test_accept_uniforms_are_uniform_and_neighbours_independent(vary: str) -> None:
    line = np.arange(N)
    seed, offset, index = (line if vary == name else 11 for name in ("seed", "offset", "index"))
    u = accept_word(seed, offset + line * 0, index + line * 0) * 2.0**-32
    assert scipy.stats.kstest(u, "uniform").pvalue > P_VALUE
    # The correlation of independent pairs has a standard deviation of 1/sqrt(N): .0032.
    for lag in (1, 2, 64):
        assert abs(np.corrcoef(u[:-lag], u[lag:])[0, 1]) < 4 / N**0.5


def test_race_noise_is_standard_exponential_and_independent() -> None:
    # 256 ids, four blocks, at 10,000 positions.
    offsets = np.arange(10_000)[:, None]
    noise = race_noise(namespace(offsets), RaceStream(np.array([[9]]), offsets), None, 256)

    def exponential(times: Any) -> float:
        return scipy.stats.kstest(times, "expon", method="asymp").pvalue

    assert min(exponential(noise[:, x]) for x in (0, 1, 63, 64, 200, 255)) > P_VALUE
    # The first to arrive is any id alike, within a block and across blocks, and its time is the least of 256.
    first = noise.argmin(axis=1)
    assert scipy.stats.chisquare(np.bincount(first, minlength=256)).pvalue > P_VALUE
    assert exponential(noise.min(axis=1) * 256) > P_VALUE
    # Of the 32,640 correlations, of standard deviation .01 each, one in a hundred runs would lie beyond 5.2 of them.
    correlation = np.corrcoef(noise, rowvar=False)[np.triu_indices(256, 1)]
    assert np.abs(correlation).max() < 0.052
    assert abs(correlation.mean()) < 4 * 0.01 / correlation.size**0.5


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(table(), indent=1) + "\n")
