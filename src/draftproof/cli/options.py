"""Options that sub-commands share, and what is made of them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import typer

from .._native import core, set_num_threads
from ..sampling.api import sample
from ..types import SamplingParams
from .console import fail, note

Model = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder of a causal language model. Default: SmolLM2-135M-Instruct.")
]
Draft = Annotated[
    str,
    typer.Option(
        metavar="mix|suffix|recycling|ngram|DIR",
        help="Guess from the text and from the model's own rows (suffix and recycling, mixed), or ask a smaller model.",
    ),
]
Dtype = Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the models' weights.")]
MaxNew = Annotated[int, typer.Option(min=0, help="Most tokens to generate.")]
Width = Annotated[
    str,
    typer.Option(
        metavar="auto|N", help="Most tokens to draft at a time: as many as are expected to pay, or N; 0: none."
    ),
]
Temperature = Annotated[
    float,
    typer.Option(
        help="0 takes the most likely token each time; above 0 samples, which the filters and the seed shape."
    ),
]
TopK = Annotated[int | None, typer.Option(help="Sample among the k most likely tokens.")]
TopP = Annotated[float | None, typer.Option(help="Sample among the most likely tokens of this total mass.")]
MinP = Annotated[float | None, typer.Option(help="Drop tokens below this share of the likeliest one.")]
Penalty = Annotated[float | None, typer.Option(help="Above 1 makes seen tokens less likely.")]
Rule = Annotated[
    Literal["token", "block", "match"] | None,
    typer.Option(help="How drafts are verified when sampling. Default: token for a draft model, else match."),
]


def check_sampling(params: SamplingParams, seed: int | None) -> None:
    """Refuse parameters out of range, before a model is fetched and loaded; say which have no effect."""
    sample(np.zeros((1, 1), dtype=np.float32), **asdict(params), seed=seed or 0)
    of_samples = {"--top-k": params.top_k, "--top-p": params.top_p, "--min-p": params.min_p, "--seed": seed}
    given = [option for option, value in of_samples.items() if value is not None]
    if given and params.temperature == 0:
        note(f"no effect at --temperature 0: {', '.join(given)}; --temperature 1 samples")


def read_width(width: str) -> int | Literal["auto"]:
    """Return what ``--width`` says."""
    if width == "auto":
        return "auto"
    if not width.isdecimal():
        fail(f"--width must be auto or a number of tokens, got {width!r}: 0 drafts none")
    return int(width)


def use_threads(threads: int | None) -> None:
    """Set the CPU threads of torch and of the C++ core, unless there is no wish."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
        if core is not None:
            set_num_threads(threads)
