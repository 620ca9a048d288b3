"""The packages for the `kernels` loader: what is laid out, how it loads, and calls that give the library's results."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import draftproof
from draftproof.compat import spec_decode_ops, spec_verify, spec_verify_xpu

torch = pytest.importorskip("torch")
kernels = pytest.importorskip("kernels")

from kernels import _rust, variants  # noqa: E402
from kernels.backends import CPU, CUDA, XPU, Metal, ROCm  # noqa: E402
from packaging.version import Version  # noqa: E402

from hub_calls import CALLS, DRAFTED, FILTERED, normal, plain, probs  # noqa: E402

ROOT = Path(__file__).parents[1]
STABLE = "torch-stable-abi211-cpu-x86_64-linux"
LIBRARY = {
    "draftproof": draftproof,
    "spec-decode-ops": spec_decode_ops,
    "spec-verify": spec_verify,
    "spec-verify-xpu": spec_verify_xpu,
}
VARIANTS = {
    "draftproof": {"torch-cpu", "torch-cuda", "torch-rocm", "torch-universal", "torch-xpu"},
    "spec-decode-ops": {"torch-cuda", "torch-rocm", "torch-universal"},
    "spec-verify": {"torch-cpu"},
    "spec-verify-xpu": {"torch-xpu", "torch-universal"},
}


def run(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The packages, built where no compiler works, and what the build said."""
    out = tmp_path_factory.mktemp("hub")
    return out, run(sys.executable, ROOT / "hub" / "build.py", out, CXX="false")


@pytest.fixture(scope="module")
def packages(built: tuple[Path, str]) -> Path:
    return built[0]


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of sources in which the seed of ``sample`` is 7 unless another one is given."""
    copy = tmp_path_factory.mktemp("later")
    for folder in ("hub", "src", "csrc"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ROOT / "LICENSE", copy)
    source = copy / "src" / "draftproof" / "compat" / "spec_decode_ops.py"
    text = source.read_text()
    assert text.count("    seed: int | Array = 0,\n") == 2
    source.write_text(text.replace("    seed: int | Array = 0,\n", "    seed: int | Array = 7,\n"))
    run(sys.executable, copy / "hub" / "build.py", copy / "out", CXX="false")
    return copy / "out"


def modules(packages: Path) -> dict[str, Path]:
    """Every text that is laid out, with one of its places."""
    found = {path.read_text(): path for path in packages.rglob("*.py")}
    assert len(found) > 50
    return found


# --- what is laid out -------------------------------------------------------------------------------------------------


def test_the_loader_parses_what_is_laid_out(packages: Path) -> None:
    assert {path.name for path in packages.iterdir()} == set(VARIANTS)
    identities = set()
    for name, expected in VARIANTS.items():
        folders = list((packages / name / "build").iterdir())
        assert {folder.name for folder in folders} == expected
        declared = {str(backend).lower() for backend in _rust.Build.open(packages / name).general.backends}
        assert declared == {folder.name.removeprefix("torch-").replace("universal", "cpu") for folder in folders}
        for folder in folders:
            assert variants.parse_variant(folder.name).variant_str == folder.name
            metadata = _rust.Metadata.read_from_file(folder / "metadata.json")
            assert (str(metadata.name), metadata.version, metadata.license) == (name, 1, "Apache-2.0")
            assert str(metadata.backend.backend_type).lower() in declared
            assert metadata.python_depends == metadata.kernel_depends == []
            assert metadata.id.isidentifier()
            identities.add(metadata.id)
    assert len(identities) == sum(map(len, VARIANTS.values()))


@pytest.mark.parametrize(
    ("package", "backend", "variant"),
    [
        ("draftproof", CPU(), "torch-cpu"),
        ("draftproof", Metal(), "torch-universal"),
        ("spec-decode-ops", CUDA(Version("13.0")), "torch-cuda"),
        ("spec-decode-ops", ROCm(Version("7.1")), "torch-rocm"),
        ("spec-decode-ops", CPU(), "torch-universal"),
        ("spec-verify", CPU(), "torch-cpu"),
        ("spec-verify-xpu", XPU(Version("2025.3")), "torch-xpu"),
        ("spec-verify-xpu", CUDA(Version("13.0")), "torch-universal"),
    ],
)
def test_the_loader_takes(packages: Path, package: str, backend: Any, variant: str) -> None:
    given = variants.get_variants_local(packages / package / "build")
    system = {"cpu": "x86_64", "os": "linux", "torch_version": Version("2.13"), "torch_cxx11_abi": True}
    accepted, _ = variants._resolve_variant_for_system(given, backend, **system, tvm_ffi_version=None)
    assert accepted[0].variant_str == variant


def test_modules_parse_as_python_3_9(packages: Path) -> None:
    with pytest.raises(SyntaxError):
        ast.parse("match x:\n  case 1: pass", feature_version=(3, 9))
    for text, path in modules(packages).items():
        ast.parse(text, str(path), feature_version=(3, 9))


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the packages that a module imports by name, but for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from imported(ast.Module(node.orelse, []))
        elif isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module).partition(".")[0]
        else:
            yield from imported(node)


def test_modules_import_only_the_standard_library_and_torch(packages: Path) -> None:
    others: dict[str, set[str]] = {}
    for text, path in modules(packages).items():
        for name in set(imported(ast.parse(text))) - sys.stdlib_module_names - {"torch"}:
            others.setdefault(name, set()).add(path.name if path.parent.name != "kernels" else "kernels")
    assert set(others) <= {"triton"}
    assert others.get("triton", set()) <= {"kernels", "triton.py", "triton_math.py", "triton_philox.py"}


def test_where_no_compiler_works_the_build_says_so(built: tuple[Path, str]) -> None:
    packages, said = built
    assert said.startswith(f"spec-verify: without {STABLE[:-13]}")
    assert "does not compile here" in said
    loaded = kernels.get_local_kernel(packages / "spec-verify")
    assert loaded.implementation.startswith("pure Python: the C++ core is not in this installation")


# --- calls ------------------------------------------------------------------------------------------------------------


PLACES = [(name, variant, call) for name in CALLS for variant in sorted(VARIANTS[name]) for call in CALLS[name]]


@pytest.mark.parametrize(("name", "variant", "call"), PLACES)
def test_calls_give_the_results_of_the_library(packages: Path, name: str, variant: str, call: str) -> None:
    loaded = kernels.get_local_kernel(packages / name / "build" / variant)
    assert Path(str(loaded.__file__)).parent.name == variant
    assert plain(CALLS[name][call](loaded)) == plain(CALLS[name][call](LIBRARY[name]))


# The interpreter takes seconds for others.
QUICK = {"sample, defaults", "sample, greedy", "sample, [B]", "filter_logits", "verify", "verify, block"}
QUICK |= {"verify, uniforms", "verify_probs", "verify_greedy"}
INTERPRETED = [
    pytest.param(name, variant, call, marks=() if call in QUICK else pytest.mark.slow)
    for name, variant in (
        ("draftproof", "torch-cuda"),
        ("spec-decode-ops", "torch-rocm"),
        ("spec-verify-xpu", "torch-xpu"),
    )
    for call in CALLS[name]
    if "NumPy" not in call and call not in ("drafters", "reference")
]


@pytest.mark.parametrize(("name", "variant", "call"), INTERPRETED)
def test_triton_in_variants_for_devices(
    packages: Path, monkeypatch: pytest.MonkeyPatch, name: str, variant: str, call: str
) -> None:
    """Interpreted on the CPU: the one thing changed is that tensors of the CPU go where those of a device go."""
    loaded = kernels.get_local_kernel(packages / name / "build" / variant)
    dispatch = importlib.import_module("._dispatch", loaded.__name__)
    monkeypatch.setitem(dispatch.BACKENDS, "cpu", dispatch.BACKENDS["cuda"])
    ran = []

    def resolve(*given: Any) -> Any:
        ran.append(original(*given))
        return ran[-1]

    original = dispatch.resolve
    monkeypatch.setattr(dispatch, "resolve", resolve)
    assert plain(CALLS[name][call](loaded)) == plain(CALLS[name][call](LIBRARY[name]))
    assert {implementation.__module__.rpartition(".")[2] for implementation in ran} == {"triton"}


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_public_names_are_those_of_the_library(packages: Path, name: str) -> None:
    loaded = kernels.get_local_kernel(packages / name)
    assert set(loaded.__all__) - {"implementation"} == set(LIBRARY[name].__all__)
    assert all(getattr(loaded, public) is not None for public in loaded.__all__)
    assert inspect.getdoc(loaded) == inspect.getdoc(LIBRARY[name])


def test_compiled_without_a_break(packages: Path) -> None:
    loaded = kernels.get_local_kernel(packages / "spec-decode-ops")

    def step(logits: Any, offset: int) -> Any:
        return loaded.sample(logits * 2, **FILTERED, seed=1234, offset=offset)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for offset in range(3):
        assert compiled(normal(3, 500), offset).tolist() == step(normal(3, 500), offset).tolist()
    verify = torch.compile(
        kernels.get_local_kernel(packages / "spec-verify-xpu").verify, fullgraph=True, backend="aot_eager"
    )
    uniforms = (torch.full((2, 4), 0.25), torch.full((2, 5), 0.5))
    given = (DRAFTED[2], DRAFTED[1], DRAFTED[0], *uniforms)
    assert plain(verify(*given)) == plain(spec_verify_xpu.verify(*given))


def test_registered_ops_hold_what_torch_asks_of_them(packages: Path) -> None:
    loaded = kernels.get_local_kernel(packages / "draftproof")
    loaded.verify_probs(*DRAFTED, seed=1)
    ops = importlib.import_module("._ops", loaded.__name__).ops
    seed, offset = torch.tensor([1, 2]), torch.tensor([0, 0])
    torch.library.opcheck(ops.sample_probs.default, (probs(2, 9), seed, offset, None, "auto"))


# --- loading ----------------------------------------------------------------------------------------------------------


def test_two_versions_side_by_side(packages: Path, later: Path) -> None:
    first, second = (kernels.get_local_kernel(place / "spec-decode-ops") for place in (packages, later))
    assert first.__name__ != second.__name__
    for _ in range(2):
        assert first.sample(normal(3, 500)).tolist() == spec_decode_ops.sample(normal(3, 500), seed=0).tolist()
        assert second.sample(normal(3, 500)).tolist() == spec_decode_ops.sample(normal(3, 500), seed=7).tolist()


def test_one_version_from_two_places(packages: Path, tmp_path: Path) -> None:
    shutil.copytree(packages / "spec-decode-ops", tmp_path / "copy")
    for place in (packages / "spec-decode-ops", tmp_path / "copy"):
        assert kernels.get_local_kernel(place).sample(normal(3, 500)).shape == (3,)


def test_a_repeated_build_is_the_same_build(packages: Path, tmp_path: Path) -> None:
    run(sys.executable, ROOT / "hub" / "build.py", tmp_path, CXX="false")
    for path in packages.rglob("metadata.json"):
        assert path.read_text() == (tmp_path / path.relative_to(packages)).read_text()


LOADED = """
import json, os, sys, torch, kernels
first, second = (kernels.get_kernel("nobody/spec-decode-ops", version=n, trust_remote_code=True) for n in (1, 2))
local = kernels.get_kernel("nobody/spec-verify", version=1)
rows = torch.eye(3)[None]
print(json.dumps([kernels.has_kernel("nobody/spec-decode-ops", version=2), first.__file__, second.__file__,
                  first.sample(9 * rows[0]).tolist(), second.sample(9 * rows[0]).tolist(),
                  local.verify_greedy(rows[0], torch.tensor([0, 2]))]))
"""


def test_from_a_cache_and_by_local_kernels_offline(packages: Path, later: Path, tmp_path: Path) -> None:
    cached = tmp_path / "kernels--nobody--spec-decode-ops"
    (cached / "refs").mkdir(parents=True)
    for version, place in (("v1", packages), ("v2", later)):
        commit = version[1] * 40
        (cached / "refs" / version).write_text(commit)
        shutil.copytree(place / "spec-decode-ops", cached / "snapshots" / commit)
    said = run(
        *(sys.executable, "-W", "error", "-c", LOADED),
        HF_HUB_OFFLINE="1",
        KERNELS_CACHE=str(tmp_path),
        LOCAL_KERNELS=f"nobody/spec-verify={packages / 'spec-verify'}",
    )
    found, first, second, *results = json.loads(said)
    assert found
    assert Path(first).is_relative_to(cached / "snapshots" / ("1" * 40) / "build" / "torch-universal")
    assert Path(second).is_relative_to(cached / "snapshots" / ("2" * 40) / "build" / "torch-universal")
    rows = 9 * torch.eye(3)
    assert results == [spec_decode_ops.sample(rows, seed=seed).tolist() for seed in (0, 7)] + [[1, 1]]


CALLED = """
rows = 9 * torch.eye(3)
print(sdo.sample(rows, 0.8, 2, 0.9, 0.1, 1.1, torch.tensor([[1, -1]] * 3), 1, 2).tolist(),
      [a.tolist() for a in sdo.verify(rows[None], rows[None, :2], torch.tensor([[0, 2]]))],
      [a.tolist() for a in xpu.verify(torch.tensor([[0, 2]]), torch.full((1, 2, 3), 1 / 3), torch.eye(3)[None])],
      sv.verify(torch.eye(3), torch.eye(3)[:2], torch.tensor([0, 1]), seed=1),
      sv.verify_greedy(torch.eye(3), torch.tensor([0, 2])), dp.filter_logits(rows, top_k=1).argmax(-1).tolist())
"""
WITHOUT_NUMPY = """
import sys, warnings
sys.modules["numpy"] = None
warnings.filterwarnings("ignore", "Failed to initialize NumPy")
import pathlib, torch, kernels
sdo, xpu, sv, dp = (kernels.get_local_kernel(pathlib.Path(sys.argv[1], name))
                    for name in ("spec-decode-ops", "spec-verify-xpu", "spec-verify", "draftproof"))
"""


def test_tensors_need_no_numpy(packages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"sdo": spec_decode_ops, "xpu": spec_verify_xpu, "sv": spec_verify, "dp": draftproof}
    exec(CALLED, {"torch": torch, **names})
    assert run(sys.executable, "-W", "error", "-c", WITHOUT_NUMPY + CALLED, packages) == capsys.readouterr().out


# --- spec-verify's C++ core -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """spec-verify as the loader takes it where its core was compiled."""
    out = tmp_path_factory.mktemp("core")
    said = run(sys.executable, ROOT / "hub" / "build.py", out)
    if said:
        pytest.skip(said)
    return kernels.get_local_kernel(out / "spec-verify")


@pytest.mark.slow
def test_the_core_is_loaded_and_says_so(core: ModuleType) -> None:
    assert "torch-stable-abi211-cpu-" in str(core.__file__)
    assert core.implementation.startswith("the C++ core, level ")


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS["spec-verify"])
def test_calls_of_the_core(core: ModuleType, call: str) -> None:
    assert plain(CALLS["spec-verify"][call](core)) == plain(CALLS["spec-verify"][call](spec_verify))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["token", "block", "match", "greedy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_the_core_equals_eager_bit_for_bit(core: ModuleType, rule: str, dtype: Any) -> None:
    """Every level, drawn and given uniforms, rows with zeros, ragged and padded drafts, ends, a dead row, strides."""
    native, chain = (importlib.import_module(name, core.__name__) for name in ("._native", ".verification.chain"))
    rng = np.random.default_rng(0)
    for level in native.levels():
        native.set_level(level)
        for vocab, batch, drafted in ((2, 3, 0), (7, 4, 1), (300, 5, 4), (3000, 2, 7)):
            rows = torch.tensor(rng.gamma(0.3, size=(batch, 2 * drafted + 2, vocab)), dtype=dtype)
            target, draft = rows[:, ::2], rows[:, 1 : 2 * drafted : 2]
            target[0, 0, 0] = -1
            tokens = torch.tensor(rng.integers(0, vocab, (batch, drafted)))
            tokens[batch - 1, drafted // 2 :] = -1
            given = {
                "num_draft_tokens": torch.tensor(rng.integers(0, drafted + 1, batch)),
                "eos": torch.tensor(rng.integers(0, vocab, (batch, 2))),
                "seed": torch.tensor(rng.integers(0, 2**62, batch)),
                "offset": torch.arange(batch),
                "check": False,
            }
            drawn = {"uniform_accept": torch.rand(batch, drafted), "uniform_sample": torch.rand(drafted + 1, batch).T}
            for case in (given, {**given, **drawn}):
                for q in (draft, None):
                    results = [
                        chain.verify_probs(target, q, tokens, rule=rule, **case, backend=name)
                        for name in ("cpu", "eager")
                    ]
                    assert plain(results[0]) == plain(results[1])
            greedy = {name: given[name] for name in ("num_draft_tokens", "eos", "check")}
            results = [chain.verify_greedy(target, tokens, **greedy, backend=name) for name in ("cpu", "eager")]
            assert plain(results[0]) == plain(results[1])


@pytest.mark.slow
def test_a_process_of_its_own(core: ModuleType, tmp_path: Path) -> None:
    """The environment sets the level; without what was compiled the rest is pure Python."""
    code = "import pathlib, sys, kernels; print(kernels.get_local_kernel(pathlib.Path(sys.argv[1])).implementation)"
    folder = Path(str(core.__file__)).parent
    lowest = importlib.import_module("._native", core.__name__).levels()[-1]
    assert run(sys.executable, "-c", code, folder, DRAFTPROOF_LEVEL=lowest) == f"the C++ core, level {lowest}\n"
    shutil.copytree(folder, tmp_path / folder.name, ignore=shutil.ignore_patterns("*.so"))
    said = run(sys.executable, "-c", code, tmp_path / folder.name)
    assert said.startswith("pure Python: the C++ core is not in this installation")
