"""Models, tokenizers and drafters from what the command line names; torch and transformers are imported here, late."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..decoding.draft_length import COSTS, DraftLength, LengthPolicy
from ..drafters import MixDrafter, NgramDrafter, RecyclingDrafter, SuffixDrafter
from ..drafters.base import Drafter, Noise
from .console import err, fail

DRAFTERS = {"mix": MixDrafter, "suffix": SuffixDrafter, "recycling": RecyclingDrafter, "ngram": NgramDrafter}


class Loaded(NamedTuple):
    """A causal language model with its tokenizer."""

    model: Any
    tokenizer: Any


def check_folders(model: Path | None, draft: str) -> None:
    """Refuse folders that are not there, before the target is fetched and loaded."""
    draft_folder = None if draft in DRAFTERS else Path(draft)
    for option, names, folder in (("--model", "", model), ("--draft", f"{', '.join(DRAFTERS)} or ", draft_folder)):
        if folder is not None and not folder.is_dir():
            what = "a file" if folder.exists() else "nothing there"
            fail(f"{option}: expected {names}a folder of a causal language model, got {folder}: {what}; give its path")


def load(folder: Path | None, option: str, dtype: str) -> Loaded:
    """Load the model in ``folder``, or the default model, without network."""
    # Both are read on import: no network, and no progress bars from the GGUF reader, which has no other switch.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    from ..integrations.default_model import load_default_model, require

    require("torch", "transformers", "safetensors")
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if folder is None:
        return Loaded(*load_default_model(dtype, announce=err.print))
    return _load_folder(folder, option, dtype)


def _load_folder(folder: Path, option: str, dtype: str) -> Loaded:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **local)
        tokenizer = AutoTokenizer.from_pretrained(folder, **local)
    # Readers of configs, weights and tokenizers raise whatever a damaged file makes them stumble over.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        fail(
            f"{option}: expected a folder that transformers can read as a causal language model with its tokenizer, "
            f"got {folder}: {reason}; save both there with save_pretrained"
        )
    return Loaded(model.eval(), tokenizer)


def sampling_rule(draft: str) -> Literal["match", "token"]:
    """Return the rule that sampling uses unless told otherwise."""
    return "match" if draft in DRAFTERS else "token"


def draft_length(width: int | Literal["auto"], dtype: str, seed: int | None) -> int | LengthPolicy:
    """Return how many tokens to draft.

    A clock has a say where rows do not depend on the width of the forward and no seed asks for the same again.
    """
    return width if width != "auto" else DraftLength(COSTS[dtype], measure=dtype == "float32" and seed is None)


def make_drafter(draft: str, rule: str, target: Loaded, dtype: str) -> Drafter:
    """Return the drafter of that name, or one that runs the model in the folder ``draft``."""
    if draft in DRAFTERS:
        return DRAFTERS[draft]()
    loaded = load(Path(draft), "--draft", dtype)
    from ..integrations.transformers import model_drafter

    noises: dict[str, Noise] = {"match": "shared", "greedy": None}
    return model_drafter(
        loaded.model,
        target.model,
        noise=noises.get(rule, "private"),
        tokenizer=target.tokenizer,
        draft_tokenizer=loaded.tokenizer,
    )


def encode(tokenizer: Any, prompt: str, raw: bool) -> list[int]:
    """Return the prompt's ids, wrapped as a user's message where the tokenizer has a chat template."""
    if raw or not tokenizer.chat_template:
        return list(tokenizer(prompt)["input_ids"])
    chat = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])


def eos_of(model: Any, given: list[int] | None) -> list[int]:
    """Return the ids that end the text: those given, else the model's own."""
    if given is not None:
        return [token for token in given if token != -1]
    own = model.generation_config.eos_token_id
    return [] if own is None else own if isinstance(own, list) else [own]
