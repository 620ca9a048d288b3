"""``draftproof compare``: drafts against plain decoding and prompt lookup, over many prompts."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .. import __version__
from ..types import SamplingParams
from . import options
from .console import err, fail, out, readable_errors, wait_passively
from .contest import Contest, Run
from .models import check_folders, load, make_drafter, sampling_rule
from .prompts import OWN, Prompt, read_prompts
from .saving import check_files, read_json, write
from .standings import Standing, same_tokens, standings, table

# These do not change what is measured.
_APART = ("save", "done", "each", "kinds")


Prompts = Annotated[
    Path,
    typer.Option(
        metavar="FILE", help='JSON lines {"class": ..., "prompt": ...}. Default: 48 of our own.', show_default=False
    ),
]
Kinds = Annotated[list[str] | None, typer.Option("--class", metavar="CLASS", help="Prompts of this class; repeatable.")]
Lookups = Annotated[
    list[int] | None,
    typer.Option(min=1, help="prompt_lookup_num_tokens of transformers; repeatable. Default: 3, 5, 8 and 10."),
]
LookupRepeat = Annotated[
    int | None, typer.Option(min=1, help="Runs of each prompt by prompt lookup, if fewer than --repeat.")
]
Clock = Annotated[Literal["cpu", "wall"] | None, typer.Option(help="Default: CPU time at one thread, else wall time.")]
Save = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="Also write a .json, .csv, .md or .png, after every prompt; repeatable."),
]
Done = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="A saved .json: its runs count, its prompts are not run again; repeatable."),
]


def compare(
    context: typer.Context,
    prompts: Prompts = OWN,
    each: Annotated[int | None, typer.Option(min=1, help="Most prompts of each class. Default: all.")] = None,
    kinds: Kinds = None,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each prompt; their medians are compared.")] = 1,
    lookup: Lookups = None,
    lookup_repeat: LookupRepeat = None,
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
    clock: Clock = None,
    save: Save = None,
    done: Done = None,
) -> None:
    """Time plain decoding, prompt lookup and drafts on prompts, taking turns in one process.

    Ctrl-C ends it with the prompts that are done and exit code 130.
    """
    params = SamplingParams(temperature, top_k, top_p)
    lookup, clock = lookup or [3, 5, 8, 10], clock or ("cpu" if threads == 1 else "wall")
    with readable_errors():
        options.check_sampling(params, seed or None)
        chosen, most = read_prompts(prompts, each, kinds), options.read_width(width)
        check_files(save or [])
        check_folders(model, draft)
        settings = context.params | {"prompts": prompts.name, "lookup": lookup, "clock": clock}
        made = begin(settings, save or [], done or [])
        left = [prompt for prompt in chosen if prompt.number not in {run.prompt for run in made.runs}]
        interrupted = False
        if left:
            how = {"width": most, "lookups": lookup, "max_new": max_new, "seed": seed, "clock": clock}
            contest = prepare(model, draft, dtype, threads, params, rule, **how)
            interrupted = run(contest, left, repeat, lookup_repeat, made)
        show(made)
    if interrupted:
        raise typer.Exit(130)


@dataclass
class Made:
    """The runs so far and the files they go to."""

    files: list[Path]
    settings: dict[str, Any]
    places: list[dict[str, Any]]
    runs: list[Run]

    def write(self) -> list[Standing]:
        """Write the files; return the standings."""
        self.runs.sort(key=lambda run: run.prompt)
        results = standings(self.runs)
        for file in self.files:
            write(file, (self.places or [machine()])[0] | self.settings, self.runs, results)
        return results


def begin(settings: dict[str, Any], files: list[Path], done: list[Path]) -> Made:
    """Return what there is before the first run: the runs that were ``done`` with these settings."""
    settings = {name: value for name, value in settings.items() if name not in _APART}
    return Made(files, settings, *read_done(done, settings))


def prepare(
    model: Path | None,
    draft: str,
    dtype: str,
    threads: int,
    params: SamplingParams,
    rule: options.Rule,
    **how: Any,
) -> Contest:
    """Load the models and let every contestant warm up."""
    wait_passively()
    with err.status("Loading torch and transformers"):
        options.use_threads(threads)
        target = load(model, "--model", dtype)
        greedy = "greedy" if params.temperature == 0 else None
        drafter = make_drafter(draft, greedy or rule or sampling_rule(draft), target, dtype)
        contest = Contest(target, drafter, rule=rule, params=params, **how)
        contest.warm_up()
    return contest


def run(contest: Contest, prompts: list[Prompt], repeat: int, of_lookup: int | None, made: Made) -> bool:
    """Add the runs of all prompts, or of those that were done before Ctrl-C; return whether it came."""
    try:
        # Redrawing is paid from the time that is measured.
        with err.status("", refresh_per_second=1) as status:
            for number, prompt in enumerate(prompts):
                status.update(f"Prompt {number + 1} of {len(prompts)}: {prompt.kind}")
                made.runs += contest.run(prompt, repeat, of_lookup)
                made.write()
    except KeyboardInterrupt:
        return True
    return False


def show(made: Made) -> None:
    """Write the files, and print how the contestants stand."""
    if made.runs:
        results = made.write()
        out.print(table(results))
        if same := same_tokens(results):
            out.print(same)


def read_done(files: list[Path], settings: dict[str, Any]) -> tuple[list[dict[str, Any]], list[Run]]:
    """Return where the runs in saved files were made, and the runs; they must have been made with these settings."""
    places: list[dict[str, Any]] = []
    runs: dict[int, list[Run]] = {}
    wanted = json.loads(json.dumps(settings, default=str))
    for file in files:
        saved, found = read_json(file)
        for name, value in wanted.items():
            if saved.get(name) != value:
                got = f"{saved.get(name)}: leave it out"
                fail(f"--done {file}: expected runs with {name} {value}, as asked for, got {got}")
        places.append({name: value for name, value in saved.items() if name not in wanted})
        # Of a prompt that is in two files the later runs count.
        runs |= {number: [run for run in found if run.prompt == number] for number in {run.prompt for run in found}}
    return places, [run for prompt in runs.values() for run in prompt]


def machine() -> dict[str, Any]:
    """Return what the times depend on besides the options."""
    versions = {"python": platform.python_version(), **{name: version(name) for name in ("torch", "transformers")}}
    place = {"system": platform.system(), "machine": platform.machine(), "cores": os.cpu_count()}
    return {"draftproof": __version__, **versions, **place}
