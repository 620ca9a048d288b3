"""``draftproof generate``: text from a model, with drafts."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from ..decoding import Generation, SpeculativeDecoder
from ..types import SamplingParams
from . import options
from .console import err, out, readable_errors, wait_passively
from .models import check_folders, draft_length, encode, eos_of, load, make_drafter, sampling_rule
from .prompts import EXAMPLE, read_prompt
from .session import Session
from .text import TextStream, by_position, summary


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="Text to answer; - reads it from stdin. Default: an example.")
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Read the prompt from a file.")] = None,
    stdin: Annotated[bool, typer.Option("--stdin", help="Read the prompt from stdin.")] = False,
    model: options.Model = None,
    draft: options.Draft = "mix",
    dtype: options.Dtype = "float32",
    max_new: options.MaxNew = 128,
    width: options.Width = "auto",
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.Penalty = None,
    rule: options.Rule = None,
    seed: Annotated[int | None, typer.Option(help="Of the samples. Default: a new one, which is printed.")] = None,
    eos: Annotated[
        list[int] | None,
        typer.Option(help="Token id that ends the text; repeatable, -1 for none. Default: the model's."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Take the prompt as it is, without the chat template.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Decode without drafts too and compare.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print text, ids and all statistics as JSON.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="CPU threads. Default: torch's choice.")] = None,
) -> None:
    """Generate text, with accepted draft tokens in colour, and show what the drafts saved.

    Ctrl-C ends it with what has been emitted and exit code 130.
    """
    params = SamplingParams(temperature, top_k, top_p, min_p, repetition_penalty)
    with readable_errors():
        options.check_sampling(params, seed)
        text, most = read_prompt(prompt, prompt_file, stdin), options.read_width(width)
        check_folders(model, draft)
        wait_passively()
        with err.status("Loading torch and transformers"):
            options.use_threads(threads)
            session = prepare(model, draft, dtype, params, eos, rule, k=draft_length(most, dtype, seed), seed=seed)
        if text is EXAMPLE and not as_json:
            out.print(Text(text + "\n", style="dim"))
        run(session, encode(session.target.tokenizer, text, raw), max_new, compare, as_json)


def prepare(
    model: Path | None,
    draft: str,
    dtype: str,
    params: SamplingParams,
    eos: list[int] | None,
    rule: options.Rule,
    **how: Any,
) -> Session:
    """Load the models and build the decoder."""
    target = load(model, "--model", dtype)
    greedy = rule is None and params == SamplingParams(temperature=0.0)
    if greedy:
        how |= {"greedy": True, "rule": "greedy"}
    else:
        how |= {"greedy": False, "rule": rule or sampling_rule(draft), **asdict(params)}
    drafter = make_drafter(draft, how["rule"], target, dtype)
    from ..integrations.transformers import CausalLM

    step, ends = CausalLM(target.model), eos_of(target.model, eos)
    # The first forward of a process is slow; it belongs to loading.
    step([0], [])
    return Session(target, SpeculativeDecoder(drafter, step, eos=ends, **how), params, ends)


def run(session: Session, ids: list[int], max_new: int, compare: bool, as_json: bool) -> None:
    """Generate, and show what the drafts saved."""
    seconds, interrupted = stream(session, ids, max_new, show=not as_json)
    plain = None
    if compare and not interrupted:
        with err.status("Decoding without drafts"):
            plain = session.decode_plainly(ids, max_new)
    if as_json:
        typer.echo(json.dumps({"interrupted": interrupted} | session.figures(len(ids), seconds, plain)))
    else:
        out.print(summary(session.decoder, seconds, plain))
        out.print(by_position(session.decoder.stats))
        if plain:
            out.print(session.same_tokens(plain))
    if interrupted:
        raise typer.Exit(130)


def stream(session: Session, ids: list[int], max_new: int, show: bool) -> tuple[float, bool]:
    """Generate and perhaps print; return the seconds it took, and whether Ctrl-C ended it."""
    text = TextStream(session.target.tokenizer) if show else None
    generation, interrupted = session.decoder.stream(ids, max_new), False
    start = time.perf_counter()
    try:
        print_all(generation, text)
    except KeyboardInterrupt:
        interrupted = True
        # What the finished rounds emitted is handed out; no round follows.
        generation.end_at(len(generation.tokens))
        print_all(generation, text)
    seconds = time.perf_counter() - start
    if text:
        text.finish()
    return seconds, interrupted


def print_all(generation: Generation, text: TextStream | None) -> None:
    """Print the tokens as they come."""
    for emitted in generation:
        if text:
            text.put(emitted)
