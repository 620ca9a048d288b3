"""How the command line fails: missing files and packages, bad values, what is no text."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.testing

import draftproof
from command_line import folder as folder
from command_line import run, save
from draftproof import cli
from draftproof.cli import models
from draftproof.cli.prompts import read_prompt


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    (tmp_path / "prompts.jsonl").write_text('{"class": "copy", "prompt": "abc abd abc abd abc"}\n')
    return tmp_path / "prompts.jsonl"


# --- how it fails ----------------------------------------------------------------------------------------------------


def fails(message: str, *arguments: Any) -> None:
    result = run("generate", "x", *arguments, code=2)
    assert re.fullmatch(f"error: {message}\n", result.stderr), result.stderr
    assert result.stdout == ""


def test_missing_model(tmp_path: Path, folder: Path) -> None:
    fails(
        r"--model: expected a folder .*, got \S+nowhere: nothing there; give its path", "--model", tmp_path / "nowhere"
    )
    (tmp_path / "file").write_text("")
    fails(r"--model: expected a folder .*, got \S+file: a file; .*", "--model", tmp_path / "file")
    fails(
        "--draft: expected mix, .* or a folder .* nothing there; .*", "--model", folder, "--draft", tmp_path / "nowhere"
    )


@pytest.mark.parametrize("damage", ["empty", "config", "weights", "tokenizer"])
def test_unreadable_model(damage: str, tmp_path: Path) -> None:
    save(tmp_path, 1)
    if damage == "empty":
        for file in tmp_path.iterdir():
            file.unlink()
    name = {"config": "config.json", "weights": "model.safetensors", "tokenizer": "tokenizer.json"}.get(damage)
    if name:
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-20])
    fails(r"--model: expected a folder that transformers can read .*, got \S+: .+; save both .*", "--model", tmp_path)


def test_mismatched_tokenizers(folder: Path, tmp_path: Path) -> None:
    save(tmp_path, 1, extra=("<extra>",))
    fails(
        "the draft's tokenizer must be the target's, got 258 tokens against 257: "
        "'<extra>' is 257 in the draft and None in the target, take another draft",
        *("--model", folder, "--draft", tmp_path),
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--temperature", "-1"), r"temperature must be finite and at least 0 .*, got -1\.0"),
        (("--top-p", "1.5"), r"top_p must be in \[0, 1\] .*, got 1\.5"),
        (("--top-k", "-2"), "top_k must be .*, got -2"),
        (("--min-p", "nan"), "min_p must be .*, got nan"),
        (("--repetition-penalty", "0"), r"repetition_penalty must be .*, got 0\.0"),
        (("--seed", str(2**64)), "seed must be .*, got 18446744073709551616"),
    ],
)
def test_bad_values_fail_before_loading(options: tuple[str, ...], message: str) -> None:
    fails(message, "--model", "nowhere", *options)


def test_bad_sources_fail_before_loading(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes("né".encode("latin-1"))
    options = ("--model", "nowhere")
    fails("expected one prompt, got several: give .*", "--stdin", *options)
    fails("--width must be auto or a number of tokens, got '-1': .*", "--width", "-1", *options)
    result = run("generate", "--prompt-file", tmp_path / "latin", *options, code=2)
    assert result.stderr == (
        f"error: --prompt-file {tmp_path / 'latin'}: expected text in UTF-8, got byte 0xe9 at 1; convert it first\n"
    )
    missing = tmp_path / "none"
    said = run("generate", "--prompt-file", missing, *options, code=2).stderr
    assert said == f"error: --prompt-file {missing}: expected a file to read, got: No such file or directory\n"


@pytest.mark.parametrize("command", [("generate", "x"), ("compare",)])
def test_a_draft_that_is_not_there_is_found_before_the_target_loads(
    command: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(models, "_load_folder", load)
    said = run(*command, "--model", folder, "--draft", "sufix", code=2).stderr
    assert said.startswith("error: --draft: expected mix, suffix, recycling, ngram or a folder")
    assert said.endswith("got sufix: nothing there; give its path\n")


def test_what_has_no_effect_is_said(folder: Path, prompts: Path) -> None:
    given = ("--model", folder, "--max-new", 4)
    unused = ("--top-k", 5, "--top-p", 0.9, "--seed", 3)
    said = run("generate", "x", *given, *unused, "--min-p", 0.1, "--json")
    assert said.stderr == (
        "note: no effect at --temperature 0: --top-k, --top-p, --min-p, --seed; --temperature 1 samples\n"
    )
    assert json.loads(said.stdout)["tokens"] == json.loads(run("generate", "x", *given, "--json").stdout)["tokens"]
    assert run("generate", "x", *given, "--seed", 0).stderr.startswith("note: no effect at --temperature 0: --seed;")
    for quiet in (("--repetition-penalty", 1.3), ("--temperature", 1, *unused)):
        assert run("generate", "x", *given, *quiet).stderr == ""
    compared = ("compare", "--prompts", prompts, *given, "--lookup", 3)
    assert run(*compared, *unused).stderr.startswith("note: no effect at --temperature 0: --top-k, --top-p, --seed;")
    assert run(*compared).stderr == ""


def test_arguments_that_are_no_text() -> None:
    """As Python hands on the byte 0xff of an argument."""
    for arguments, message in (
        (("generate", "a\udcff"), "the prompt: expected text in UTF-8, got byte 0xff at 1; convert it first"),
        (("generate", "x", "--model", "\udcff"), "--model: expected a folder .* nothing there; give its path"),
        (("generate", "x", "--draft", "\udcff"), "--draft: expected .* nothing there; give its path"),
        (("generate", "--prompt-file", "\udcff"), "--prompt-file .*: expected a file to read, got: No such file .*"),
    ):
        assert re.fullmatch(f"error: {message}\n", run(*arguments, code=2).stderr)


def test_closed_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(typer.Exit):
        read_prompt(None, None, True)
    code = "import os, sys; os.close(0); os.execl(sys.executable, sys.executable, '-m', 'draftproof', 'generate', '-')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --stdin: expected text, got a closed stdin; give the text, or --prompt-file\n"


def test_bad_prompt_and_eos(folder: Path) -> None:
    result = run("generate", "", "--raw", "--model", folder, code=2)
    assert result.stderr.startswith("error: prompt_ids must have at least one token")
    fails("eos must be at least -1, got -2: .*", "--model", folder, "--eos", "-2")


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "rich" else object())
    with pytest.raises(SystemExit, match=r"missing: rich; run: python -m pip install 'draftproof\[cli\]'"):
        cli.main()


def test_main_runs_the_application() -> None:
    code = "import sys; sys.argv = ['draftproof', '--version']; from draftproof.cli import main; main()"
    light = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); {code}"
    done = subprocess.run([sys.executable, "-c", light], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"draftproof \d+\.\d+\S*\nFalse\n", done.stdout)


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "draftproof", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"draftproof {draftproof.__version__}\n"
