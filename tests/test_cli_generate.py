"""``draftproof generate``: the model's own text, drafts, options, interrupts, what is printed."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console

from command_line import field, run, save, tokenizer
from command_line import folder as folder
from draftproof.cli import models, text
from draftproof.decoding import COSTS, Emitted, SpeculativeDecoder
from draftproof.drafters import MixDrafter
from draftproof.integrations.transformers import CausalLM

PROMPT = "abc abd abc abd abc"


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("draft"), 2)


def generate(folder: Path, *options: Any, **how: Any) -> str:
    return str(run("generate", PROMPT, "--model", folder, "--max-new", 24, *options, **how).stdout)


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
    generate(folder, "--temperature", 1, "--seed", 0)
    assert [drafter for drafter, _ in used] == [MixDrafter] * 3
    # In bfloat16 rows depend on the width of the forward, so no clock may choose it; nor may it where a seed is to
    # give the same again.
    assert [(length.costs, length.measure) for _, length in used] == [
        (COSTS["float32"], True),
        (COSTS["bfloat16"], False),
        (COSTS["float32"], False),
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
