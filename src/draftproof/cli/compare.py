"""``draftproof compare``: drafts against plain decoding and prompt lookup, over many prompts."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .. import __version__
from ..types import SamplingParams
from . import options
from .console import err, out, readable_errors, wait_passively
from .contest import Contest, Run
from .models import load, make_drafter, sampling_rule
from .prompts import OWN, Prompt, read_prompts
from .saving import check_files, write
from .standings import same_tokens, standings, table


def compare(
    context: typer.Context,
    prompts: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help='JSON lines {"class": ..., "prompt": ...}. Default: 48 of our own.', show_default=False
        ),
    ] = OWN,
    each: Annotated[int | None, typer.Option(min=1, help="Most prompts of each class. Default: all.")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each prompt; their medians are compared.")] = 1,
    lookup: Annotated[
        list[int] | None,
        typer.Option(min=1, help="prompt_lookup_num_tokens of transformers; repeatable. Default: 5 and 10."),
    ] = None,
    model: options.Model = None,
    draft: options.Draft = "mix",
    dtype: options.Dtype = "float32",
    max_new: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 64,
    width: options.Width = "auto",
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    rule: options.Rule = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the samples; repetitions count on from it.")] = 0,
    threads: Annotated[int, typer.Option(min=1, max=1024, help="CPU threads.")] = 1,
    clock: Annotated[
        Literal["cpu", "wall"] | None, typer.Option(help="Default: CPU time at one thread, else wall time.")
    ] = None,
    save: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Also write a .json, .csv or .png; repeatable.")
    ] = None,
) -> None:
    """Time plain decoding, prompt lookup and drafts on prompts, taking turns in one process.

    Ctrl-C ends it with the prompts that are done and exit code 130.
    """
    params = SamplingParams(temperature, top_k, top_p)
    lookup, clock = lookup or [5, 10], clock or ("cpu" if threads == 1 else "wall")
    with readable_errors():
        options.check_sampling(params, seed)
        chosen, most = read_prompts(prompts, each), options.read_width(width)
        check_files(save or [])
        wait_passively()
        with err.status("Loading torch and transformers"):
            options.use_threads(threads)
            target = load(model, "--model", dtype)
            greedy = "greedy" if temperature == 0 else None
            drafter = make_drafter(draft, greedy or rule or sampling_rule(draft), target, dtype)
            contest = Contest(target, drafter, most, rule, lookup, params, max_new, seed, clock)
            contest.warm_up()
        runs, interrupted = run(contest, chosen, repeat)
        if runs:
            results = standings(runs)
            out.print(table(results))
            if same := same_tokens(results):
                out.print(same)
            for file in save or []:
                settings = context.params | {"prompts": prompts.name, "lookup": lookup, "clock": clock}
                del settings["save"]
                write(file, machine() | settings, runs, results)
    if interrupted:
        raise typer.Exit(130)


def run(contest: Contest, prompts: list[Prompt], repeat: int) -> tuple[list[Run], bool]:
    """Return the runs of all prompts, or of those that were done before Ctrl-C, and whether it came."""
    runs: list[Run] = []
    try:
        # Redrawing is paid from the time that is measured.
        with err.status("", refresh_per_second=1) as status:
            for number, prompt in enumerate(prompts):
                status.update(f"Prompt {number + 1} of {len(prompts)}: {prompt.kind}")
                runs += contest.run(number, prompt, repeat)
    except KeyboardInterrupt:
        return runs, True
    return runs, False


def machine() -> dict[str, Any]:
    """Return what the times depend on besides the options."""
    versions = {"python": platform.python_version(), **{name: version(name) for name in ("torch", "transformers")}}
    place = {"system": platform.system(), "machine": platform.machine(), "cores": os.cpu_count()}
    return {"draftproof": __version__, **versions, **place}
