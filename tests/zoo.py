"""Tiny random causal models of transformers, for each kind of attention, position and cache that drafts must fit."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.modeling_outputs import CausalLMOutputWithPast as CausalLMOutput  # noqa: E402

from draftproof.types import Draft  # noqa: E402

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    # Wide initial weights: logits far enough apart that rounding does not decide.
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WINDOW = {"sliding_window": 8}
GPT2 = {"vocab_size": VOCAB, "n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
UNTIED = {"tie_word_embeddings": False}
IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES),
    "qwen": ("Qwen3", SIZES),
    "gemma": ("Gemma3Text", SIZES | WINDOW | UNTIED | {"layer_types": ["sliding_attention", "full_attention"]}),
    "mistral": ("Mistral", SIZES | WINDOW),
    "gpt2": ("GPT2", GPT2 | IDS),
    "mixtral": ("Mixtral", SIZES | EXPERTS),
}
CLASSES = {"gemma": "Gemma3ForCausalLM", "gpt2": "GPT2LMHeadModel"}


def build(name: str, seed: int = 0, **changes: Any) -> Any:
    """Build a model with random weights."""
    family, settings = CONFIGS[name]
    config = getattr(transformers, f"{family}Config")(**settings | changes)
    torch.manual_seed(seed)
    return getattr(transformers, CLASSES.get(name, f"{family}ForCausalLM"))(config).eval()


@functools.cache
def model(name: str) -> Any:
    """Return the model of that name, built once."""
    return build(name)


@functools.cache
def draft_model(name: str, scale: float = 0.02) -> Any:
    """Return a copy of the model that agrees with it most of the time."""
    draft = copy.deepcopy(model(name))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += scale * torch.randn(weight.shape, generator=generator)
    return draft


def prompts(count: int, seed: int = 0, length: int = 9) -> list[list[int]]:
    """Return prompts of different lengths that repeat themselves."""
    generator = torch.Generator().manual_seed(seed)
    halves = [torch.randint(VOCAB, (length + 2 * i,), generator=generator).tolist() for i in range(count)]
    return [half + half[: len(half) // 2] for half in halves]


def batch(rows: list[list[int]], pad: int = 0) -> dict[str, Any]:
    """Return the rows as a left-padded batch with its attention mask."""
    width = max(map(len, rows))
    ids = [[pad] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


class ToyConfig(transformers.PreTrainedConfig):  # type: ignore[misc]
    model_type = "toy"

    def __init__(self, vocab_size: int = 13, hidden_size: int = 4, num_hidden_layers: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers


class Toy(transformers.PreTrainedModel, transformers.GenerationMixin):  # type: ignore[misc]
    """A model without rounding: what batch, padding and width a forward has changes no bit of its rows.

    A row is picked from a table by a checksum over the tokens before it and their positions, which are kept in the
    cache: a stale, missing or displaced entry picks another row.
    """

    config_class = ToyConfig

    def __init__(self, config: ToyConfig, seed: int = 0, rows: int = 251, scale: float = 3.0) -> None:
        super().__init__(config)
        self.embedding = torch.nn.Embedding(config.vocab_size, 1)
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("table", scale * torch.randn(rows, config.vocab_size, generator=generator))
        self.post_init()

    def get_input_embeddings(self) -> Any:
        return self.embedding

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        cache: Any = None,
        use_cache: bool = True,
        logits_to_keep: int = 0,
        **_: Any,
    ) -> Any:
        held = int(cache.get_seq_length())
        if position_ids is None:
            position_ids = held + torch.arange(input_ids.shape[1])[None].expand_as(input_ids)
        entry = ((input_ids + 1) * (position_ids + 7) % 8191).double()[:, None, :, None]
        keys = cache.update(entry, entry, 0)[0][:, 0, :, 0].long()
        columns = torch.arange(keys.shape[1])
        visible = columns <= (held + torch.arange(input_ids.shape[1]))[:, None]
        if attention_mask is not None and attention_mask.ndim == 4:
            visible = attention_mask[:, 0] if attention_mask.dtype == torch.bool else attention_mask[:, 0] == 0
        elif attention_mask is not None:
            visible = visible & (attention_mask[:, None, : keys.shape[1]] != 0)
        checksum = (keys[:, None] * visible).sum(-1)
        rows = self.table[checksum * checksum % len(self.table)]
        return CausalLMOutput(logits=rows[:, -logits_to_keep:], cache=cache)


def toy(seed: int = 0, vocab: int = 13, **changes: Any) -> Any:
    """Build a toy."""
    return Toy(ToyConfig(vocab_size=vocab), seed, **changes).eval()


class Guesser:
    """A drafter that knows how each sequence goes on and is wrong at fixed places: accepted runs of every length."""

    has_q = False
    noise = None

    def __init__(self, sequences: list[list[int]], vocab: int = 13) -> None:
        self.sequences, self.vocab = sequences, vocab
        self.proposed: list[tuple[list[int], list[int]]] = []

    def start(self) -> Guesser:
        return self

    def propose(self, context: Any, width: int, **_: Any) -> Draft:
        seen = context.tolist()
        whole = next((tokens for tokens in self.sequences if tokens[: len(seen)] == seen), [])
        guess = whole[len(seen) : len(seen) + width]
        guess = [(token + 1) % self.vocab if sum(seen[-3:]) % 5 == i else token for i, token in enumerate(guess)]
        self.proposed.append((seen, guess))
        return Draft(np.array(guess, dtype=np.int64), None)

    def accept(self, num_accepted: int, next_token: int, target_logits: Any) -> None:
        pass


def unpadded(output: Any, inputs: dict[str, Any]) -> list[list[int]]:
    """Return the rows of an output without the padding on the left."""
    return [row[skip:].tolist() for row, skip in zip(output, (inputs["attention_mask"] == 0).sum(1), strict=True)]
