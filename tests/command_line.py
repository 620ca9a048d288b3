"""What tests of the command line share: tiny models in folders, and runs of the application."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer.testing
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from draftproof.cli.app import app


def tokenizer(extra: tuple[str, ...] = ()) -> Any:
    """One token a byte, and ``<eos>``."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*letters, "<eos>", *extra])}
    model = Tokenizer(BPE(vocab=vocab, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>")


def save(folder: Path, seed: int, extra: tuple[str, ...] = ()) -> Path:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=260, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, initializer_range=0.3, eos_token_id=256, bos_token_id=256,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer(extra).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("target"), 1)


def run(*arguments: Any, code: int = 0, stdin: str | None = None) -> Any:
    result = typer.testing.CliRunner().invoke(app, [*map(str, arguments)], input=stdin, env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def field(output: str, name: str) -> list[str]:
    return next(line.removeprefix(name).split() for line in output.splitlines() if line.startswith(name))
