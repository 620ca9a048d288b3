"""Prompts: one for ``generate``, a file of them for ``compare``."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from .console import fail

EXAMPLE = """Correct the spelling mistakes in this text and return the whole text:

The lighthouse keeper climed the stairs every evening to light the lamp. From the top he could see the fishing boats \
on their way home, the gulls circling over the harbor, and the lights of the town on the other side of the bay. He \
wrote the weather in his book, drank a cup of tea, and waitd for the nite. When the storm came, he did not sleep, \
because the sailors needed the light."""
OWN = Path(__file__).with_name("prompts.jsonl")


class Prompt(NamedTuple):
    """What to ask, the class of tasks it belongs to, and its place in the whole file when classes take turns."""

    kind: str
    text: str
    number: int = 0


def read_prompt(prompt: str | None, file: Path | None, stdin: bool) -> str:
    """Return the one prompt that was given, or the example. A last line end is not part of it."""
    stdin = stdin or prompt == "-"
    given = [prompt not in (None, "-"), file is not None, stdin]
    if sum(given) > 1:
        fail("expected one prompt, got several: give the text, --prompt-file or --stdin")
    if file is not None:
        return _read(file, "--prompt-file").removesuffix("\n")
    if stdin:
        return _read_stdin().removesuffix("\n")
    # Python keeps bytes of an argument that are no text in this form.
    return EXAMPLE if prompt is None else _decode(prompt.encode(errors="surrogateescape"), "the prompt")


def read_prompts(file: Path, each: int | None, kinds: list[str] | None = None) -> list[Prompt]:
    """Return the prompts of a file of JSON lines, at most ``each`` of a class, classes (all or ``kinds``) in turn."""
    counts: Counter[str] = Counter()
    turns: list[tuple[int, Prompt]] = []
    for number, line in enumerate(_read(file, "--prompts").splitlines(), 1):
        if line.strip():
            prompt = _parse(line, f"{file}, line {number}")
            turns.append((counts[prompt.kind], prompt))
            counts[prompt.kind] += 1
    if unknown := set(kinds or ()) - set(counts):
        fail(f"--class: expected classes of {file} ({', '.join(counts)}), got {', '.join(sorted(unknown))}")
    ordered = enumerate(sorted(turns, key=lambda pair: pair[0]))
    chosen = [
        prompt._replace(number=number)
        for number, (turn, prompt) in ordered
        if (each is None or turn < each) and (not kinds or prompt.kind in kinds)
    ]
    if not chosen:
        fail(f"--prompts: expected at least one prompt, got none in {file}")
    return chosen


def _parse(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
        prompt = Prompt(entry.get("class", "prompts"), entry["prompt"])
    except (ValueError, KeyError, AttributeError):
        prompt = Prompt("", "")
    if not (prompt.text and isinstance(prompt.text, str) and isinstance(prompt.kind, str)):
        fail(f'--prompts: expected lines such as {{"class": "story", "prompt": "Once"}}, got in {where}: {line[:60]}')
    return prompt


def _read_stdin() -> str:
    # Python has none where it was closed.
    if sys.stdin is None:
        fail("--stdin: expected text, got a closed stdin; give the text, or --prompt-file")
    return _decode(sys.stdin.buffer.read(), "--stdin")


def _read(file: Path, option: str) -> str:
    try:
        return _decode(file.read_bytes(), f"{option} {file}")
    except OSError as error:
        fail(f"{option} {file}: expected a file to read, got: {error.strerror}")


def _decode(data: bytes, what: str) -> str:
    try:
        return data.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        fail(f"{what}: expected text in UTF-8, got byte {data[error.start]:#04x} at {error.start}; convert it first")
