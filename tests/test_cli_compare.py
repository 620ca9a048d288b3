"""``draftproof compare``: what it counts, what it makes of it, and how it fails."""

from __future__ import annotations

import csv
import json
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from command_line import field, run, save
from draftproof.cli import saving
from draftproof.cli.contest import OWN, PLAIN, Contest, Run
from draftproof.cli.prompts import OWN as OWN_PROMPTS
from draftproof.cli.prompts import read_prompts
from draftproof.cli.standings import same_tokens, speeds, standings
from draftproof.decoding import Stats

LINES = (
    '{"class": "copy", "prompt": "abc abd abc abd abc"}\n\n'
    '{"class": "copy", "prompt": "one two one two"}\n'
    '{"class": "tale", "prompt": "once"}\n'
)
FAST = ("--max-new", 24, "--lookup", 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("target"), 1)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    (tmp_path / "prompts.jsonl").write_text(LINES)
    return tmp_path / "prompts.jsonl"


def compare(prompts: Path, folder: Path, *options: Any, code: int = 0) -> str:
    return str(run("compare", "--prompts", prompts, "--model", folder, *FAST, *options, code=code).stdout)


# --- what is counted -------------------------------------------------------------------------------------------------


def test_counts_are_those_of_the_rounds(folder: Path, prompts: Path, tmp_path: Path) -> None:
    output = compare(prompts, folder, "--width", 4, "--repeat", 2, "--save", tmp_path / "runs.json")
    saved = json.loads((tmp_path / "runs.json").read_text())
    runs = saved["runs"]
    assert Counter((r["kind"], r["arm"]) for r in runs) == {
        (kind, arm): 2 * count for kind, count in (("copy", 2), ("tale", 1)) for arm in (PLAIN, "lookup 3", OWN)
    }
    assert all(r["seconds"] > 0 and r["tokens"] == 24 and r["same"] for r in runs)
    for r in runs:
        assert r["accepted"] == 24 - r["forwards"] <= r["drafted"]
        if r["arm"] == PLAIN:
            assert (r["forwards"], r["drafted"], r["stats"]) == (24, 0, None)
        if r["arm"] == OWN:
            counted = {name: r["stats"][name] for name in ("tokens", "drafted", "accepted")}
            assert counted == {name: r[name] for name in counted}
            assert r["stats"]["target_forwards"] == r["forwards"]
    assert {r["arm"] for r in runs if r["accepted"]} == {"lookup 3", OWN}
    assert "same tokens as plain decoding: lookup 3 3 of 3, draftproof 3 of 3" in output
    assert saved["settings"]["prompts"] == "prompts.jsonl"
    assert (saved["settings"]["lookup"], saved["settings"]["clock"]) == ([3], "cpu")


def test_everybody_takes_turns(folder: Path, prompts: Path, tmp_path: Path) -> None:
    compare(prompts, folder, "--repeat", 3, "--each", 1, "--save", tmp_path / "runs.csv")
    with (tmp_path / "runs.csv").open(newline="") as file:
        runs = list(csv.DictReader(file))
    arms = [PLAIN, "lookup 3", OWN]
    orders = [[r["arm"] for r in runs[i : i + 3]] for i in range(0, 18, 3)]
    assert orders == [arms[t % 3 :] + arms[: t % 3] for t in (0, 1, 2, 1, 2, 3)]
    assert [r["kind"] for r in runs] == ["copy"] * 9 + ["tale"] * 9
    assert [r["repetition"] for r in runs[:9:3]] == ["0", "1", "2"]


def test_lookups_may_run_less_often(folder: Path, prompts: Path, tmp_path: Path) -> None:
    compare(prompts, folder, "--each", 1, "--repeat", 3, "--lookup-repeat", 1, "--save", tmp_path / "runs.json")
    runs = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert Counter(r["arm"] for r in runs) == {PLAIN: 6, OWN: 6, "lookup 3": 2}
    assert [r["arm"] for r in runs[3:7]] == [OWN, PLAIN, PLAIN, OWN]


def test_sampling(folder: Path, prompts: Path, tmp_path: Path) -> None:
    options = ("--temperature", 0.8, "--top-p", 0.9, "--rule", "block", "--save", tmp_path / "runs.json")
    calls, generate = [], Contest._generate

    def spied(self: Contest, *arguments: Any, **changes: Any) -> Any:
        calls.append(self)
        return generate(self, *arguments, **changes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Contest, "_generate", spied)
        output = compare(prompts, folder, *options, "--threads", 1, "--clock", "wall")
    assert calls[0]._options == {
        "max_new_tokens": 24, "do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 0.9,
    }  # fmt: skip
    assert calls[0]._speculative.rule == "block"
    assert "same tokens" not in output
    assert {r["same"] for r in json.loads((tmp_path / "runs.json").read_text())["runs"]} == {None}


def test_a_draft_model(folder: Path, prompts: Path) -> None:
    output = compare(prompts, folder, "--draft", folder, "--width", 3, "--each", 1)
    # 24 tokens: six rounds of four.
    assert field(output, "      draftproof")[4:] == ["4.00", "100%", "0"]


# --- what is made of it ----------------------------------------------------------------------------------------------


def made(kind: str, prompt: int, arm: str, seconds: list[float], **counts: Any) -> list[Run]:
    standard: dict[str, Any] = {"inside": 0.1, "tokens": 10, "forwards": 10, "drafted": 0, "accepted": 0}
    standard |= {"same": True, "stats": None}
    return [Run(kind, prompt, i, arm, s, **standard | counts) for i, s in enumerate(seconds)]


RUNS = [
    *made("a", 0, PLAIN, [4.0, 1.0, 2.0]),
    *made("a", 0, OWN, [1.0, 9.0, 0.5], forwards=5, drafted=8, accepted=5),
    *made("a", 1, PLAIN, [3.0]),
    *made("a", 1, OWN, [6.0], drafted=2),
    *made("b", 2, PLAIN, [1.0]),
    *made("b", 2, OWN, [0.25], tokens=5, forwards=5, same=False),
    *made("b", 2, "lookup 10", [1.0]),
    *made("b", 2, "lookup 5", [1.0]),
    *made("a", 0, "lookup 10", [1.0]),
    *made("a", 1, "lookup 10", [1.0]),
    *made("a", 0, "lookup 5", [1.0]),
    *made("a", 1, "lookup 5", [1.0]),
]


def test_standings() -> None:
    results = standings(RUNS)
    assert [(s.kind, s.arm) for s in results] == [
        (kind, arm) for kind in ("a", "b", "all") for arm in (PLAIN, "lookup 5", "lookup 10", OWN)
    ]
    own = {s.kind: s for s in results if s.arm == OWN}
    # Medians 2 against 1, 3 against 6, and 1 second for 10 tokens against 1 for 20.
    assert [own[kind].speed for kind in ("a", "b", "all")] == pytest.approx([1.0, 2.0, 2 ** (1 / 3)])
    assert [own[kind].worst for kind in ("a", "b", "all")] == pytest.approx([0.5, 2.0, 0.5])
    assert own["a"].tokens_per_forward == 40 / 25
    assert own["a"].tokens_per_second == pytest.approx(40 / 16.5)
    assert (own["a"].drafted, own["a"].accepted, own["a"].acceptance) == (26, 15, 15 / 26)
    assert (own["b"].acceptance, own["a"].prompts, own["all"].prompts) == (0.0, 2, 3)
    assert same_tokens(results) == (
        "same tokens as plain decoding: lookup 5 3 of 3, lookup 10 3 of 3, draftproof 2 of 3"
    )
    assert {s.kind for s in standings(RUNS[:8])} == {"a"}


def test_intervals_hold_what_repetitions_say() -> None:
    first, second, *_ = [s for s in speeds(RUNS) if s.arm == OWN]
    assert (first.low, first.speed, first.high) == pytest.approx((1 / 9, 2.0, 8.0))
    assert (second.low, second.high) == (0.5, 0.5)
    assert {(s.low, s.speed, s.high) for s in speeds(RUNS) if s.arm == PLAIN} == {(1.0, 1.0, 1.0)}


def test_what_a_class_comes_to() -> None:
    stats = [
        Stats(drafted_by_position=[4, 2], accepted_by_position=[2, 1]),
        Stats(drafted_by_position=[4], accepted_by_position=[4]),
    ]
    runs = [*made("a", 0, PLAIN, [1.0, 1.0]), *made("a", 1, PLAIN, [1.0, 1.0])]
    runs += [*made("a", 0, OWN, [1.1], stats=stats[0], forwards=5), *made("a", 1, OWN, [1.0], stats=stats[1])]
    own = next(s for s in standings(runs) if s.arm == OWN)
    assert (own.slow, own.by_position) == (1, [0.75, 0.5])
    assert own.overhead == pytest.approx(1e3 * (1.0 + 0.9) / 15)


def test_saved_runs_are_not_run_again(
    folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, both, report = tmp_path / "copy.json", tmp_path / "both.json", tmp_path / "both.md"
    compare(prompts, folder, "--class", "copy", "--save", copy)
    table = compare(prompts, folder, "--done", copy, "--save", both)
    saved = [json.loads(file.read_text())["runs"] for file in (copy, both)]
    assert [len(runs) for runs in saved] == [6, 9]
    assert all(run in saved[1] for run in saved[0])
    assert {run["kind"] for run in saved[1] if run not in saved[0]} == {"tale"}
    monkeypatch.setattr(Contest, "run", None)
    assert compare(prompts, folder, "--done", both, "--save", report) == table
    lines = report.read_text().splitlines()
    assert sum(line.startswith(("| copy |", "| tale |")) for line in lines) == 11
    assert sum(line.startswith("| all | draftproof |") for line in lines) == 1
    fails_to_go_on = run("compare", "--prompts", prompts, "--model", folder, "--done", both, code=2)
    assert "expected runs with lookup [3, 5, 8, 10], as asked for, got [3]" in fails_to_go_on.stderr


def test_every_prompt_is_saved(folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, seen = Contest.run, []

    def watched(self: Contest, *arguments: Any) -> Any:
        seen.append(len(json.loads(file.read_text())["runs"]) if file.exists() else 0)
        return whole(self, *arguments)

    file = tmp_path / "runs.json"
    monkeypatch.setattr(Contest, "run", watched)
    compare(prompts, folder, "--save", file)
    assert seen == [0, 3, 6]
    assert [path.name for path in tmp_path.glob("*run*")] == ["runs.json"]


def test_picture(tmp_path: Path) -> None:
    saving.write(tmp_path / "speed.png", {}, RUNS, standings(RUNS))
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_classes_take_turns(prompts: Path) -> None:
    prompts.write_text('{"prompt": "x"}\n' + LINES)
    kinds = ["prompts", "copy", "tale", "copy"]
    assert [p.kind for p in read_prompts(prompts, None)] == kinds
    assert [p.kind for p in read_prompts(prompts, 1)] == kinds[:3]


def test_our_own_prompts() -> None:
    chosen = read_prompts(OWN_PROMPTS, None)
    assert Counter(p.kind for p in chosen) == dict.fromkeys(
        ("copying", "editing", "summary", "structure", "story", "questions"), 8
    )
    assert len({p.text for p in chosen}) == 48
    assert all(30 < len(p.text) < 1500 and p.text == p.text.strip() for p in chosen)


# --- how it ends and fails -------------------------------------------------------------------------------------------


def test_ctrl_c_keeps_the_prompts_that_are_done(
    folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Contest.run

    def interrupted(self: Contest, prompt: Any, *arguments: Any) -> Any:
        if prompt.number == 1:
            signal.raise_signal(signal.SIGINT)
        return whole(self, prompt, *arguments)

    monkeypatch.setattr(Contest, "run", interrupted)
    output = compare(prompts, folder, "--save", tmp_path / "runs.csv", code=130)
    assert "copy" in output
    assert "tale" not in output
    assert len((tmp_path / "runs.csv").read_text().splitlines()) == 4


def fails(message: str, *options: Any) -> None:
    result = run("compare", "--model", "nowhere", *options, code=2)
    assert re.fullmatch(f"error: {message}\n", result.stderr), result.stderr
    assert result.stdout == ""


def test_bad_files_fail_before_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = {
        "text": "Once",
        "array": "[1]",
        "empty": '{"prompt": ""}',
        "none": '{"class": "a"}',
        "kind": '{"class": 1, "prompt": "x"}',
    }
    for name, line in lines.items():
        (tmp_path / name).write_text(LINES + line)
        where = re.escape(f"{tmp_path / name}, line 5: {line}")
        fails(f"--prompts: expected lines such as .*, got in {where}", "--prompts", tmp_path / name)
    (tmp_path / "blank").write_text("\n")
    fails("--prompts: expected at least one prompt, got none in .*blank", "--prompts", tmp_path / "blank")
    fails(".*No such file.*", "--prompts", tmp_path / "missing")
    fails("--class: expected classes of .* \\(copying, .*\\), got poem", "--class", "poem")
    fails(r"--save: expected a name that ends in .json, .csv, .md, .png, got a.txt", "--save", "a.txt")
    fails("--save: expected a folder that exists, got .*/no: make it first", "--save", tmp_path / "no" / "a.csv")
    fails("--width must be .*", "--width", "wide")
    fails(r"temperature must be .*, got -1\.0", "--temperature", -1)
    monkeypatch.setattr(saving, "find_spec", lambda _: None)
    fails(r"--save: a picture needs matplotlib.*; run: python -m pip install 'draftproof\[bench\]'", "--save", "a.png")
