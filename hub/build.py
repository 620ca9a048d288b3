"""Lay out packages for the `kernels` loader: ``python hub/build.py OUT`` writes ``OUT/<package>/build/<variant>/``.

Everything comes from src/ and, for the C++ variant of spec-verify, from csrc/. docs/hub.md says how the packages load.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "draftproof"
CORE = ROOT / "hub" / "spec_verify"

VERSION = 1  # of the packages' public functions
LICENSE = "Apache-2.0"
STABLE_ABI = "211"  # the torch whose stable ABI the C++ variant is written for, and every later one

# What knows models, terminals or other libraries; of compat a package has its own interface.
LEFT_OUT = ("cli", "compat", "integrations", "testing")

# What spec-verify says of itself.
IMPLEMENTATION = 'implementation = f"the C++ core, level {core.level()}" if core else f"pure Python: {missing}"'

Files = dict[str, str]


class Package(NamedTuple):
    """The module whose public names a package has, and the backends it has a variant for."""

    entry: str
    backends: tuple[str, ...]


PACKAGES = {
    "draftproof": Package("__init__.py", ("cpu", "cuda", "rocm", "xpu", "universal")),
    "spec-decode-ops": Package("compat/spec_decode_ops.py", ("cuda", "rocm", "universal")),
    "spec-verify": Package("compat/spec_verify.py", ("cpu",)),
    "spec-verify-xpu": Package("compat/spec_verify_xpu.py", ("xpu", "universal")),
}


def build(out: Path) -> None:
    """Write all packages, in place of earlier builds of theirs."""
    for name, package in PACKAGES.items():
        folder = out / name
        shutil.rmtree(folder / "build", ignore_errors=True)
        files = sources(package.entry)
        for backend in package.backends:
            write_variant(folder / "build" / f"torch-{backend}", name, backend, files)
        write_configuration(folder, name, package)
    write_core_variant(out / "spec-verify" / "build", sources(PACKAGES["spec-verify"].entry))


def sources(entry: str) -> Files:
    """Return the modules of a package, by path."""
    found = [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] not in LEFT_OUT]
    if entry != "__init__.py":
        found += [SOURCE / entry, SOURCE / Path(entry).parent / "__init__.py"]
    files = {path.relative_to(SOURCE).as_posix(): path.read_text() for path in found}
    return {**files, "__init__.py": package_text(entry)}


def package_text(entry: str) -> str:
    """Return the package's ``__init__``."""
    text = (SOURCE / entry).read_text()
    if entry == "__init__.py":
        return text
    tree = ast.parse(text)
    (public,) = (
        ast.literal_eval(n.value)
        for n in tree.body
        if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"
    )
    module = entry.removesuffix(".py").replace("/", ".")
    lines = [f"from .{module} import {', '.join(public)}"]
    if entry == PACKAGES["spec-verify"].entry:
        public = [*public, "implementation"]
        lines = ["from ._native import core, missing", *lines, "", IMPLEMENTATION]
    return "\n".join([f'"""{ast.get_docstring(tree)}"""', "", *lines, "", f"__all__ = {json.dumps(public)}", ""])


def write_variant(folder: Path, name: str, backend: str, files: Files, more: Files | None = None) -> str:
    """Write a variant; return its name, which is also its namespace in torch: a hash of the content is part of it."""
    content = json.dumps([backend, files, more], sort_keys=True)
    identity = f"_{name.replace('-', '_')}_{backend}_{hashlib.sha256(content.encode()).hexdigest()[:12]}"
    files = {**files, "_ops.py": files["_ops.py"].replace("draftproof", identity)}
    metadata = {
        "id": identity,
        "name": name,
        "version": VERSION,
        "license": LICENSE,
        "python-depends": [],
        "backend": {"type": "cpu" if backend == "universal" else backend},
    }
    for path, text in {**files, "metadata.json": json.dumps(metadata, indent=2) + "\n"}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return identity


def write_configuration(folder: Path, name: str, package: Package) -> None:
    """Write what the loader's own builder reads, and the licence."""
    backends = ["cpu" if backend == "universal" else backend for backend in package.backends]
    text = (
        f'[general]\nname = "{name}"\nversion = {VERSION}\nedition = 5\nlicense = "{LICENSE}"\n'
        f"backends = {json.dumps(list(dict.fromkeys(backends)))}\n\n[torch-noarch]\n"
    )
    (folder / "build.toml").write_text(text)
    shutil.copy(ROOT / "LICENSE", folder)


def write_core_variant(folder: Path, files: Files) -> None:
    """Write the variant of spec-verify that holds the C++ core, if it compiles here."""
    files = {**files, "_core.py": (CORE / "_core.py").read_text()}
    compiled = [path for place in (CORE, ROOT / "csrc") for path in sorted(place.iterdir())]
    more = {path.relative_to(ROOT).as_posix(): path.read_text() for path in compiled if path.is_file()}
    machine = platform.machine().lower().replace("amd64", "x86_64")
    if sys.platform == "darwin":
        machine = machine.replace("arm64", "aarch64")
    variant = folder / f"torch-stable-abi{STABLE_ABI}-cpu-{machine}-{platform.system().lower()}"
    identity = write_variant(variant, "spec-verify", "cpu", files, more)
    if reason := compile_core(variant, identity):
        shutil.rmtree(variant)
        print(f"spec-verify: without {variant.name}, which does not compile here ({reason}): it will run pure Python")


def compile_core(folder: Path, identity: str) -> str | None:
    """Compile the core into a variant; return why that failed, if it did."""
    torch = importlib.util.find_spec("torch")
    if torch is None:
        return "torch is not installed"
    with tempfile.TemporaryDirectory() as scratch:
        options = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_LIBRARY_OUTPUT_DIRECTORY": folder.resolve(),
            "Python_EXECUTABLE": sys.executable,
            "TORCH": torch.submodule_search_locations[0],
            "NAME": identity,
        }
        given = [f"-D{option}={value}" for option, value in options.items()]
        for command in (["cmake", "-S", CORE, "-B", scratch, *given], ["cmake", "--build", scratch]):
            try:
                subprocess.run(command, check=True, stdout=sys.stderr)
            except FileNotFoundError:
                return "CMake is not installed"
            except subprocess.CalledProcessError:
                return "the reason stands above"
    return None


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python hub/build.py OUT")
    build(Path(sys.argv[1]))
