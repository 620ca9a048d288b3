"""``draftproof generate``: text from a model, with drafts."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer
from rich.text import Text

from .._native import core, set_num_threads
from ..decoding import SpeculativeDecoder
from ..sampling.api import sample
from ..types import SamplingParams
from .console import err, out, readable_errors, wait_passively
from .models import encode, eos_of, load, make_drafter
from .session import Session
from .text import TextStream, by_position, summary

PROMPT = """Correct the spelling mistakes in this text and return the whole text:

The lighthouse keeper climed the stairs every evening to light the lamp. From the top he could see the fishing boats \
on their way home, the gulls circling over the harbor, and the lights of the town on the other side of the bay. He \
wrote the weather in his book, drank a cup of tea, and waitd for the nite. When the storm came, he did not sleep, \
because the sailors needed the light."""


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="Text to answer; - reads it from stdin. Default: an example.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of a causal language model. Default: SmolLM2-135M-Instruct."),
    ] = None,
    draft: Annotated[
        str, typer.Option(metavar="ngram|DIR", help="Copy what followed the last words before, or ask a smaller model.")
    ] = "ngram",
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the models' weights.")] = "float32",
    max_new: Annotated[int, typer.Option(min=0, help="Most tokens to generate.")] = 128,
    width: Annotated[int, typer.Option(min=0, help="Most tokens to draft at a time; 0 drafts none.")] = 8,
    temperature: Annotated[
        float,
        typer.Option(
            help="0 takes the most likely token each time; above 0 samples, which the filters and the seed shape."
        ),
    ] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Sample among the k most likely tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample among the most likely tokens of this total mass.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens below this share of the likeliest one.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1 makes seen tokens less likely.")] = None,
    rule: Annotated[
        Literal["token", "block", "match"] | None,
        typer.Option(help="How drafts are verified. Default: match for n-grams, token for a draft model."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the samples. Default: a new one, which is printed.")] = None,
    eos: Annotated[
        list[int] | None,
        typer.Option(help="Token id that ends the text; repeatable, -1 for none. Default: the model's."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Take the prompt as it is, without the chat template.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Decode without drafts too and compare.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: torch's choice.")] = None,
) -> None:
    """Generate text, with accepted draft tokens in colour, and show what the drafts saved."""
    params = SamplingParams(temperature, top_k, top_p, min_p, repetition_penalty)
    with readable_errors():
        # Parameters out of range are refused before a model is fetched and loaded.
        sample(np.zeros((1, 1), dtype=np.float32), **asdict(params), seed=seed or 0)
        text = PROMPT if prompt is None else sys.stdin.read() if prompt == "-" else prompt
        wait_passively()
        with err.status("Loading torch and transformers"):
            session = prepare(model, draft, dtype, params, eos, rule, k=width, seed=seed)
            if threads is not None:
                import torch

                torch.set_num_threads(threads)
                if core is not None:
                    set_num_threads(threads)
        if prompt is None:
            out.print(Text(PROMPT + "\n", style="dim"))
        run(session, encode(session.target.tokenizer, text, raw), max_new, compare)


def prepare(
    model: Path | None,
    draft: str,
    dtype: str,
    params: SamplingParams,
    eos: list[int] | None,
    rule: Literal["token", "block", "match"] | None,
    **options: Any,
) -> Session:
    """Load the models and build the decoder."""
    target = load(model, "--model", dtype)
    greedy = rule is None and params == SamplingParams(temperature=0.0)
    if greedy:
        options |= {"greedy": True, "rule": "greedy"}
    else:
        default = "match" if draft == "ngram" else "token"
        options |= {"greedy": False, "rule": rule or default, **asdict(params)}
    drafter = make_drafter(draft, options["rule"], target, dtype)
    from ..integrations.transformers import CausalLM

    step, ends = CausalLM(target.model), eos_of(target.model, eos)
    # The first forward of a process is slow; it belongs to loading.
    step([0], [])
    return Session(target, SpeculativeDecoder(drafter, step, eos=ends, **options), params, ends)


def run(session: Session, ids: list[int], max_new: int, compare: bool) -> None:
    """Generate, and show what the drafts saved."""
    seconds = stream(session, ids, max_new)
    plain = None
    if compare:
        with err.status("Decoding without drafts"):
            plain = session.decode_plainly(ids, max_new)
    out.print(summary(session.decoder, seconds, plain))
    out.print(by_position(session.decoder.stats))
    if plain:
        out.print(session.same_tokens(plain))


def stream(session: Session, ids: list[int], max_new: int) -> float:
    """Generate and print; return the seconds it took."""
    text = TextStream(session.target.tokenizer)
    start = time.perf_counter()
    for emitted in session.decoder.stream(ids, max_new):
        text.put(emitted)
    seconds = time.perf_counter() - start
    text.finish()
    return seconds
