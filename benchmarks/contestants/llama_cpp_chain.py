"""llama.cpp: its sampler chain through llama-cpp-python's low-level interface, a sequence at a time, one thread.

Top-k comes before the temperature, which gives the same law and spares it a pass; candidates are filled by NumPy, from
a template, since llama.cpp orders them in place. Verification samples the target and goes on while that is the draft.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import llama_cpp
import numpy as np

from ..cells import CALL, SAMPLING
from .base import Contestant, Given

CANDIDATE = np.dtype(llama_cpp.llama_token_data)


def contestant(name: str, given: Given) -> Contestant | None:
    """Return the chain on float32 rows; for verification by ``greedy`` and ``match`` its sample-and-compare."""
    cell = given.cell
    if cell.dtype != "float32" or cell.operation == CALL or (cell.verifies and cell.rule not in ("greedy", "match")):
        return None
    if not cell.verifies:
        picks = [_picker(cell.vocab, SAMPLING[cell.operation], ids, b) for b, ids in enumerate(given.history)]
        return Contestant(name, lambda i: [pick(row) for pick, row in zip(picks, given.buffer(i).target, strict=True)])
    pick = _picker(cell.vocab, {"temperature": 0.0 if cell.rule == "greedy" else 1.0}, given.history[0], 0)

    def call(i: int) -> list[tuple[int, int]]:
        buffer = given.buffer(i)
        return [_verify(*request, pick) for request in zip(buffer.target, buffer.tokens, strict=True)]

    return Contestant(name, call)


def _verify(target: np.ndarray, tokens: np.ndarray, pick: Callable[[np.ndarray], int]) -> tuple[int, int]:
    for i, row in enumerate(target):
        token = pick(row)
        if i == len(tokens) or token != tokens[i]:
            break
    return i, token


def _picker(vocab: int, settings: dict[str, float], history: np.ndarray, seed: int) -> Callable[[np.ndarray], int]:
    """Return a call that samples one row with a chain of its own."""
    chain = _chain(vocab, settings, history, seed)
    template = np.zeros(vocab, dtype=CANDIDATE)
    template["id"] = np.arange(vocab)
    candidates = template.copy()
    array = llama_cpp.llama_token_data_array(
        candidates.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data)), vocab, -1, False
    )
    pointer = ctypes.pointer(array)
    ids, logits = candidates["id"], candidates["logit"]
    words, template_words = candidates.view(np.int32), template.view(np.int32)

    def pick(row: np.ndarray) -> int:
        words[:] = template_words
        logits[:] = row
        array.size, array.selected, array.sorted = vocab, -1, False
        llama_cpp.llama_sampler_apply(chain, pointer)
        return int(ids[array.selected])

    return pick


def _chain(vocab: int, settings: dict[str, float], history: np.ndarray, seed: int) -> object:
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())

    def add(sampler: object) -> None:
        llama_cpp.llama_sampler_chain_add(chain, sampler)

    if settings.get("temperature") == 0.0:
        add(llama_cpp.llama_sampler_init_greedy())
        return chain
    if "repetition_penalty" in settings:
        repeat = settings["repetition_penalty"]
        penalties = llama_cpp.llama_sampler_init_penalties(vocab, len(history), repeat, 0.0, 0.0)
        for token in history:
            llama_cpp.llama_sampler_accept(penalties, int(token))
        add(penalties)
    if "top_k" in settings:
        add(llama_cpp.llama_sampler_init_top_k(int(settings["top_k"])))
    add(llama_cpp.llama_sampler_init_temp(settings.get("temperature", 1.0)))
    if "top_p" in settings:
        add(llama_cpp.llama_sampler_init_top_p(settings["top_p"], 1))
    if "min_p" in settings:
        add(llama_cpp.llama_sampler_init_min_p(settings["min_p"], 1))
    add(llama_cpp.llama_sampler_init_dist(seed))
    return chain
