"""The command line, on tiny models: what it prints, and how it fails."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import typer.testing
from rich.console import Console
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

import draftproof
from draftproof import _native, cli
from draftproof.cli import check, models, text
from draftproof.cli.app import app
from draftproof.cli.prompts import read_prompt
from draftproof.decoding import COSTS, Emitted, SpeculativeDecoder
from draftproof.drafters import MixDrafter
from draftproof.integrations.transformers import CausalLM

PROMPT = "abc abd abc abd abc"


def tokenizer(extra: tuple[str, ...] = ()) -> Any:
    """One token a byte, and ``<eos>``."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*letters, "<eos>", *extra])}
    model = Tokenizer(BPE(vocab=vocab, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>")


def save(folder: Path, seed: int, extra: tuple[str, ...] = ()) -> Path:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=260, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, initializer_range=0.3, eos_token_id=256, bos_token_id=256,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer(extra).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("target"), 1)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("draft"), 2)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    (tmp_path / "prompts.jsonl").write_text('{"class": "copy", "prompt": "abc abd abc abd abc"}\n')
    return tmp_path / "prompts.jsonl"


def run(*arguments: Any, code: int = 0, stdin: str | None = None) -> Any:
    result = typer.testing.CliRunner().invoke(app, [*map(str, arguments)], input=stdin, env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def generate(folder: Path, *options: Any, **how: Any) -> str:
    return str(run("generate", PROMPT, "--model", folder, "--max-new", 24, *options, **how).stdout)


def field(output: str, name: str) -> list[str]:
    return next(line.removeprefix(name).split() for line in output.splitlines() if line.startswith(name))


# --- generate --------------------------------------------------------------------------------------------------------


def test_greedy_equals_the_models_own_generate(folder: Path) -> None:
    output = generate(folder, "--compare", "--width", 8)
    assert "same tokens as plain decoding: yes" in output
    assert field(output, "tokens ") == ["24", "24"]
    forwards = int(field(output, "target forwards")[0])
    assert forwards < 24
    assert field(output, "tokens per forward") == [f"{24 / forwards:.2f}", "1.00"]
    accepted, _, drafted, share = field(output, "drafts accepted")
    assert share == f"({int(accepted) / int(drafted):.0%})"
    assert len(field(output, "acceptance by position:")) == 8
    assert all(float(rate) > 0 for rate in field(output, "tokens/s"))
    assert "seed" not in output


@pytest.fixture(scope="module")
def own(folder: Path) -> list[int]:
    """The tokens of the model's own greedy ``generate``."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([tokenizer()(PROMPT).input_ids])
    made = model.generate(ids, attention_mask=ids * 0 + 1, do_sample=False, max_new_tokens=24, pad_token_id=0)
    return list(made[0, ids.shape[1] :].tolist())


def test_prints_the_models_text(folder: Path, own: list[int]) -> None:
    assert generate(folder).startswith(tokenizer().decode(own, skip_special_tokens=True) + "\n")


@pytest.mark.parametrize("options", [("--repetition-penalty", "1.3"), ("--eos", "32", "--eos", "97"), ("--eos", "-1")])
def test_greedy_with_penalty_and_eos(folder: Path, options: tuple[str, ...]) -> None:
    assert "same tokens as plain decoding: yes" in generate(folder, "--compare", *options)


def test_eos_ends_the_text(folder: Path, own: list[int]) -> None:
    assert field(generate(folder, "--eos", own[5]), "tokens ") == [str(own.index(own[5]) + 1)]


def test_the_models_own_eos_ends_the_text(own: list[int], tmp_path: Path) -> None:
    save(tmp_path, 1)
    for eos in (own[5], [256, own[5]]):
        transformers.GenerationConfig(eos_token_id=eos).save_pretrained(tmp_path)
        output = generate(tmp_path, "--compare")
        assert field(output, "tokens ") == [str(own.index(own[5]) + 1)] * 2
        assert "same tokens as plain decoding: yes" in output


def test_sampling_by_match_equals_sampling_without_drafts(folder: Path) -> None:
    sampled = ("--temperature", 0.7, "--top-k", 20, "--top-p", 0.95, "--min-p", 0.01, "--repetition-penalty", 1.8)
    output = generate(folder, "--compare", "--seed", 5, *sampled)
    assert "same tokens as plain decoding: yes" in output
    assert field(output, "seed") == ["5"]
    again, other = generate(folder, "--seed", 5, *sampled), generate(folder, "--seed", 6, *sampled)
    assert again.splitlines()[0] == output.splitlines()[0] != other.splitlines()[0]


def test_a_new_seed_is_printed_and_repeats(folder: Path) -> None:
    output = generate(folder, "--temperature", 1)
    (seed,) = field(output, "seed")
    assert generate(folder, "--temperature", 1, "--seed", seed).splitlines()[0] == output.splitlines()[0]


@pytest.mark.parametrize("rule", ["token", "block"])
def test_other_rules_say_that_draws_differ(folder: Path, rule: str) -> None:
    output = generate(folder, "--compare", "--temperature", 1, "--seed", 1, "--rule", rule)
    assert f"same tokens as plain decoding: no (rule {rule} keeps the law, with other draws)" in output


@pytest.mark.parametrize("options", [(), ("--temperature", 1, "--seed", 3, "--rule", "match")])
def test_draft_model(folder: Path, draft: Path, options: tuple[Any, ...]) -> None:
    assert "same tokens as plain decoding: yes" in generate(folder, "--draft", draft, "--compare", *options)
    perfect = generate(folder, "--draft", folder, "--width", 3, *options)
    assert field(perfect, "tokens per forward") == ["4.00"]
    assert field(perfect, "acceptance by position:") == ["100%"] * 3


def test_far_positions_are_left_out(folder: Path) -> None:
    assert field(generate(folder, "--draft", folder, "--width", 10), "acceptance by position:") == ["100%"] * 10
    far = field(generate(folder, "--draft", folder, "--width", 12), "acceptance by position:")
    assert far == [*["100%"] * 10, "...", "(of", "12)"]


def test_no_drafts_no_tokens(folder: Path) -> None:
    plain = generate(folder, "--width", 0)
    assert field(plain, "tokens per forward") == ["1.00"]
    assert "nothing was drafted" in plain
    assert "same tokens as plain decoding: yes" in generate(folder, "--max-new", 0, "--compare")


def test_bfloat16_stdin_threads(folder: Path) -> None:
    threads = torch.get_num_threads()
    try:
        arguments = ("--model", folder, "--max-new", 3, "--dtype", "bfloat16", "--threads", 3)
        assert field(run("generate", "-", *arguments, stdin=PROMPT).stdout, "tokens ") == ["3"]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["mix", "suffix", "recycling", "ngram"])
def test_drafters_by_name(folder: Path, own: list[int], name: str) -> None:
    made = json.loads(generate(folder, "--draft", name, "--width", 4, "--json"))
    assert made["tokens"] == own
    assert 0 < max(made["stats"]["drafted_by_position"]) <= made["stats"]["rounds"]
    assert len(made["stats"]["drafted_by_position"]) == 4


def test_adaptive_mix_is_the_default(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    whole = SpeculativeDecoder.stream

    def stream(self: SpeculativeDecoder, *arguments: Any) -> Any:
        used.append((type(self.draft_step), self.length))
        return whole(self, *arguments)

    monkeypatch.setattr(SpeculativeDecoder, "stream", stream)
    generate(folder)
    generate(folder, "--dtype", "bfloat16")
    assert [drafter for drafter, _ in used] == [MixDrafter] * 2
    # In bfloat16 rows depend on the width of the forward, so no clock may choose it.
    assert [(length.costs, length.measure) for _, length in used] == [
        (COSTS["float32"], True),
        (COSTS["bfloat16"], False),
    ]


def test_a_draft_model_knows_its_cost(folder: Path, draft: Path) -> None:
    target = models.load(folder, "--model", "float32")
    assert models.make_drafter(str(draft), "token", target, "float32").cost == 1.0  # type: ignore[attr-defined]


def test_prompt_from_file_and_stdin(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_bytes(b"one\r\ntwo\n")
    options = ("--model", folder, "--max-new", 8, "--raw", "--json")
    expected = json.loads(run("generate", "one\ntwo", *options).stdout)
    for arguments, stdin in ((("--prompt-file", tmp_path / "prompt"), None), (("--stdin",), "one\ntwo\n")):
        made = json.loads(run("generate", *arguments, *options, stdin=stdin).stdout)
        assert (made["tokens"], made["prompt_tokens"]) == (expected["tokens"], 7)


def test_json(folder: Path, own: list[int]) -> None:
    made = json.loads(generate(folder, "--json", "--compare", "--width", 3))
    stats = made.pop("stats")
    assert made["text"] == tokenizer().decode(own, skip_special_tokens=True)
    assert made["tokens"] == made["plain"]["tokens"] == own
    assert made["plain"]["same_tokens"] is True
    assert (made["rule"], made["seed"], made["prompt_tokens"], made["interrupted"]) == ("greedy", None, 19, False)
    assert made["tokens_per_forward"] == 24 / stats["target_forwards"]
    assert made["acceptance"] == stats["accepted"] / stats["drafted"]
    assert made["tokens_per_second"] == pytest.approx(24 / made["seconds"])
    assert 0 < sum(stats["seconds"].values()) < made["seconds"]
    sampled = json.loads(generate(folder, "--json", "--temperature", 1, "--seed", 4))
    assert (sampled["rule"], sampled["seed"], sampled["plain"]) == ("match", 4, None)


def interrupt(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Let Ctrl-C come during a forward."""
    calls, forward = iter(range(1000)), CausalLM.__call__

    def interrupted(self: CausalLM, prefix: Any, proposed: Any) -> Any:
        if next(calls) == after:
            signal.raise_signal(signal.SIGINT)
        return forward(self, prefix, proposed)

    monkeypatch.setattr(CausalLM, "__call__", interrupted)


def test_ctrl_c_keeps_what_was_emitted(folder: Path, own: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(monkeypatch, after=6)
    output = generate(folder, "--compare", "--draft", folder, "--width", 1, code=130)
    # One forward to warm up, then drafts and their verification in turns.
    emitted = tokenizer().decode(own[:4], skip_special_tokens=True)
    assert output.startswith(emitted + "\ntokens")
    assert field(output, "tokens ") == ["4"]
    assert "plain" not in output


def test_ctrl_c_within_json(folder: Path, own: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(monkeypatch, after=6)
    made = json.loads(generate(folder, "--json", "--compare", "--width", 0, code=130))
    assert (made["interrupted"], made["tokens"], made["plain"]) == (True, own[:5], None)


def test_ctrl_c_before_the_first_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(monkeypatch, after=1)
    assert field(generate(folder, code=130), "tokens ") == ["0"]


def test_ctrl_c_between_rounds_prints_the_round(folder: Path, own: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    put, calls = text.TextStream.put, iter(range(1000))

    def interrupted(self: text.TextStream, emitted: Emitted) -> None:
        put(self, emitted)
        if next(calls) == 4:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(text.TextStream, "put", interrupted)
    output = generate(folder, "--draft", folder, "--width", 7, code=130)
    assert output.startswith(tokenizer().decode(own[:8], skip_special_tokens=True) + "\ntokens")
    assert field(output, "tokens ") == ["8"]


def test_chat_template(folder: Path, tmp_path: Path) -> None:
    save(tmp_path, 1)
    codec = tokenizer()
    codec.chat_template = (
        "{{ messages[0]['role'] }}: {{ messages[0]['content'] }}{% if add_generation_prompt %}>{% endif %}"
    )
    codec.save_pretrained(tmp_path)
    wrapped = run("generate", "hello", "--model", tmp_path, "--max-new", 8).stdout.splitlines()[0]
    assert wrapped == run("generate", "user: hello>", "--model", folder, "--max-new", 8).stdout.splitlines()[0]
    raw = run("generate", "hello", "--model", tmp_path, "--max-new", 8, "--raw").stdout.splitlines()[0]
    assert raw == run("generate", "hello", "--model", folder, "--max-new", 8).stdout.splitlines()[0] != wrapped


def terminal(monkeypatch: pytest.MonkeyPatch, tokens: list[tuple[str, bool]], color: Any) -> str:
    console = Console(file=io.StringIO(), force_terminal=color is not None, color_system=color, soft_wrap=True)
    monkeypatch.setattr(text, "out", console)
    codec = tokenizer()
    stream = text.TextStream(codec)
    for characters, drafted in tokens:
        for token in codec(characters).input_ids:
            stream.put(Emitted(token, drafted))
    stream.finish()
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_accepted_drafts_are_coloured(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [("a", False), ("b", True), (" [c]", False)]
    assert terminal(monkeypatch, tokens, "standard").startswith("a\x1b[32mb\x1b[0m [c]")
    assert terminal(monkeypatch, tokens, None) == "ab [c]\n"


def test_characters_of_several_tokens_are_printed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    assert terminal(monkeypatch, [("a é漢 🙂", True)], "standard").count("\x1b[32m🙂\x1b[0m") == 1
    codec = tokenizer()
    stream = text.TextStream(codec)
    console = Console(file=io.StringIO())
    monkeypatch.setattr(text, "out", console)
    for token in codec("x🙂").input_ids[:-1]:
        stream.put(Emitted(token, False))
    assert console.file.getvalue() == "x"  # type: ignore[attr-defined]
    stream.finish()
    assert console.file.getvalue() == "x\ufffd\n"  # type: ignore[attr-defined]


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
        "'<extra>' is 257 in the draft and None in the target",
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


# --- check and backends ----------------------------------------------------------------------------------------------


def test_check_passes() -> None:
    lines = run("check").stdout.splitlines()
    assert len(lines) >= 9
    assert [line for line in lines if not line.startswith("ok ")] == []
    assert any("bits on eager (torch cpu)" in line for line in lines)


def test_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any, **__: Any) -> Any:
        raise RuntimeError("broken")

    whole = check.filter_logits
    monkeypatch.setattr(check, "philox", lambda counter, _: tuple(word * 0 for word in counter))
    monkeypatch.setattr(check, "RULES", {"token": check.testing.MUTANTS["p and q swapped"].system.rule})
    monkeypatch.setattr(check.testing, "MUTANTS", {})
    monkeypatch.setattr(check, "verify_probs", wrong)
    monkeypatch.setattr(
        check, "filter_logits", lambda logits, **o: whole(logits, **o) + (0 if isinstance(logits, np.ndarray) else 1)
    )
    lines = run("check", code=1).stdout.splitlines()
    failed = dict(line.removeprefix("FAILED ").split(": ", 1) for line in lines if line.startswith("FAILED"))
    places = [place.name for place in check.places()]
    assert places[0] == "eager (NumPy)"
    tensors = [f"bits on {name}" for name in places if "torch" in name]
    assert list(failed) == ["Philox4x32-10", "law of rule token", *(f"verification on {p}" for p in places), *tensors]
    assert failed["law of rule token"].startswith("the law is off by")
    assert failed[f"verification on {places[1]}"].startswith("RuntimeError('broken')")
    assert failed[tensors[0]].startswith("filter_logits differs from eager (NumPy)")


def test_check_notices_a_mutant_that_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = check.testing.MUTANTS["p and q swapped"]
    monkeypatch.setattr(check.testing, "MUTANTS", {"alive": dataclasses.replace(mutant, system=mutant.original)})
    with pytest.raises(AssertionError, match="'alive' passed as lossless"):
        check.mutants()


def test_backends() -> None:
    header, *rows = run("backends").stdout.splitlines()
    assert header.split()[0] == "operation"
    assert {"eager", "reference"} <= set(header.split())
    assert [row.split()[0] for row in rows][: len(draftproof.backends())] == list(draftproof.backends())
    assert rows[0].count("available") >= 2


@pytest.mark.skipif(not _native.levels(), reason=_native.missing)
def test_the_level_of_the_core_can_be_forced() -> None:
    listed = "instruction-set levels of the C++ core: "
    core, levels = _native.core, _native.levels()
    before = core.level()
    try:
        for level in levels:
            line = run("--level", level, "backends").stdout.splitlines()[-1]
            assert line == listed + ", ".join(f"{name} (in use)" if name == level else name for name in levels)
            assert core.level() == level
        for wrong in ("x86_64_v9", "\udcff"):
            refused = run("--level", wrong, "backends", code=2)
            assert refused.stderr.startswith(f"error: level must be one of {', '.join(levels)}, got '")
    finally:
        core.set_level(before)


def test_a_level_needs_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "core", None)
    monkeypatch.setattr(_native, "missing", "no core here")
    assert run("--level", "x86_64_v2", "backends", code=2).stderr == "error: no core here\n"


@pytest.mark.parametrize("command", [("generate", "x"), ("compare",)])
def test_more_threads_than_the_core_takes_are_refused_before_torch_starts_them(command: tuple[str, ...]) -> None:
    said = run(*command, "--threads", 100_000, code=2).stderr
    assert "--threads" in said
    assert "1024" in said
