"""Compile the Triton kernels for devices that are not here and look at the code: ``python triton_targets.py TARGET``.

The operations are called on CPU tensors with every launch replaced by the compilation that it would bring about, so
what is compiled is what the launchers ask for: argument types, constants, warps, options. Prints JSON: kernel ->
target -> what its code holds. Runs where triton compiles, hence not under TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

TARGETS = {
    **{f"sm_{n}": GPUTarget("cuda", n, 32) for n in (80, 86, 89, 90, 100)},
    **{name: GPUTarget("hip", name, 64) for name in ("gfx90a", "gfx942")},
}


class Sizes(NamedTuple):
    """The sizes of what the operations are called on."""

    vocab: int
    drafted: int
    batches: tuple[int, ...]


USUAL = Sizes(128256, 3, (64, 1))
# The compiler makes a constant of an integer that is 1, in tuples too.
SMALLEST = Sizes(1, 1, (1,))

# A division that is rounded to nearest is a routine of its own on AMD, six of these and a v_div_fixup.
AMD_FUSED = re.compile(r"\bv_(?:pk_|dual_|div_)?(?:fma|mad|mac)\w*f(?:16|32|64)")
NVIDIA_FUSED = re.compile(r"\b(?:fma|mad)\.\w+\.(?:ftz\.)?(?:sat\.)?f\d\d")


class Launch(NamedTuple):
    """What decides the code of a kernel."""

    kernel: Any
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]

    def key(self) -> str:
        return f"{self.kernel.module}.{self.kernel.__name__} {self.signature} {self.constants} {self.options}"


@contextlib.contextmanager
def recording(target: GPUTarget) -> Iterator[dict[str, Launch]]:
    """Record launches, of each kind one, and run none."""
    launches: dict[str, Launch] = {}
    backend = make_backend(target)

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: Any, **keywords: Any) -> None:  # noqa: ARG001
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, options = bind(*arguments, **keywords)
        _, signature, constants, attributes = kernel._pack_args(backend, keywords, bound, specialization, options)
        launch = Launch(kernel, signature, constants, attributes, options)
        launches.setdefault(launch.key(), launch)

    with mock.patch.object(JITFunction, "run", run):
        yield launches


def compiled(launch: Launch, target: GPUTarget) -> dict[str, Any]:
    """Compile a kernel for a target and return what its code holds."""
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    options = make_backend(target).parse_options(dict(launch.options)).__dict__
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        kernel = triton.compile(source, target=target, options=options)
    found = {"warps": kernel.metadata.num_warps, "shared memory": kernel.metadata.shared}
    if target.backend == "cuda":
        return found | of_nvidia(kernel.asm["ptx"], log.getvalue())
    return found | of_amd(kernel.asm["amdgcn"])


def of_nvidia(ptx: str, log: str) -> dict[str, Any]:
    """Return what a kernel's PTX and the assembler's log say."""

    def number(pattern: str) -> int:
        return sum(int(n) for n in re.findall(pattern, log))

    return {
        "fused": len(NVIDIA_FUSED.findall(ptx)),
        "flushing": len(re.findall(r"\.ftz\b", ptx)),
        "float64": len(re.findall(r"\.f64\b", ptx)),
        "registers": number(r"Used (\d+) registers"),
        "spilled bytes": number(r"(\d+) bytes spill stores"),
    }


def of_amd(code: str) -> dict[str, Any]:
    """Return what a kernel's machine code holds; what the divisions bring with them is not counted as fused."""

    def number(name: str) -> int:
        return sum(int(n) for n in re.findall(rf"^\s+\.{name}:\s+(\d+)", code, re.MULTILINE))

    divisions = len(re.findall(r"\bv_div_fixup_f32\b", code))
    return {
        "fused": len(AMD_FUSED.findall(code)) - 6 * divisions,
        "float64": len(re.findall(r"\bv_\w+_f64\b", code)),
        "divisions": divisions,
        "registers": number("vgpr_count"),
        "scalar registers": number("sgpr_count"),
        "spilled bytes": 4 * number("vgpr_spill_count"),
    }


def calls(sizes: Sizes) -> Iterator[Callable[[], Any]]:
    """Return calls of the public functions that between them launch every kernel in the forms that users need."""
    import draftproof as dp

    def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
        return torch.zeros(shape, dtype=dtype)

    vocab, drafted, batches = sizes
    for batch in batches:
        ids = torch.zeros((batch, drafted), dtype=torch.int64)
        mask = torch.ones((batch, -(-vocab // 32)), dtype=torch.int32)
        masks = torch.ones((batch, drafted + 1, -(-vocab // 32)), dtype=torch.int32)
        heat = torch.ones(batch)
        stream = {"seed": torch.arange(batch), "offset": torch.arange(batch)}
        given = {"temperature": heat, "top_k": 50 * heat, "top_p": 0.9 * heat, "min_p": 0.01 * heat}
        given |= {"repetition_penalty": 1.1, "prev_tokens": ids}
        settings = [
            {**given, "mask": mask},
            {},
            {"temperature": 0},
            {"top_k": 50},
            {"top_k": 2000, "top_p": 0.9},
            {"top_p": 0.9},
            {"min_p": 0.1},
            {"mask": mask.bool()[:, :1].expand(batch, vocab)},
        ]
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            logits = rows(batch, vocab, dtype=dtype)
            for chosen in settings:
                for function in (dp.sample, dp.sample_with_logprobs):
                    yield lambda f=function, a=logits, k={**chosen, **stream}: f(a, **k, backend="triton", check=False)
                yield lambda a=logits, k=chosen: dp.filter_logits(a, **k, backend="triton", check=False)
            yield lambda a=logits: dp.sample(a, seed=1, draft_index=2, backend="triton", check=False)
            yield lambda a=logits, k=stream: dp.sample_probs(a, **k, backend="triton", check=False)
            target, draft = (rows(batch, drafted + more, vocab, dtype=dtype) for more in (1, 0))
            for rule in ("token", "block", "match", "greedy"):
                for own in ({**given, "mask": masks, "eos": 2}, {}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.1}):
                    for q in (draft, None):
                        k = {**own, **stream, "rule": rule}
                        yield lambda p=target, q=q, k=k, i=ids: dp.verify(p, q, i, **k, backend="triton", check=False)
                uniforms = {"uniform_accept": rows(batch, drafted), "uniform_sample": rows(batch, drafted + 1)}
                for q in (draft, None):
                    for draws in (stream, uniforms):
                        k = {**draws, "rule": rule}
                        yield lambda p=target, q=q, k=k, i=ids: dp.verify_probs(
                            p, q, i, **k, backend="triton", check=False
                        )
            yield lambda p=target, i=ids: dp.verify_greedy(p, i, eos=2, backend="triton", check=False)


def launches(target: GPUTarget, sizes: Sizes) -> list[Launch]:
    """Return every launch that the calls make, of each kind one."""
    from draftproof import _dispatch
    from draftproof._torch_arrays import TorchArrays

    with (
        recording(target) as found,
        mock.patch.object(_dispatch, "interpreted", return_value=True),
        mock.patch.object(TorchArrays, "on_host", return_value=False),
    ):
        for call in calls(sizes):
            call()
    return list(found.values())


def by_kernel(made: list[Launch]) -> dict[str, list[Launch]]:
    """Return the launches of each kernel, by its name."""
    named: dict[str, list[Launch]] = {}
    for launch in made:
        name = f"{launch.kernel.module.removeprefix('draftproof.')}.{launch.kernel.__name__}"
        named.setdefault(name, []).append(launch)
    return named


def planted(target: GPUTarget) -> list[Launch]:
    """Return the launch of a kernel that a compiler may fuse, and on NVIDIA flush."""
    with recording(target) as found:
        fused[(1,)](torch.zeros(128), N=128, enable_fp_fusion=True)
    return list(found.values())


@triton.jit
def fused(x, N: tl.constexpr):
    """What the check has to find."""
    a = tl.load(x + tl.arange(0, N))
    tl.store(x + tl.arange(0, N), tl.floor(a * a + 1.0))


def main() -> None:
    """Compile and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("targets", nargs="+", choices=TARGETS)
    parser.add_argument("--forms", type=int, default=1, help="of each kernel at most; spread over those that occur")
    parser.add_argument("--smallest", action="store_true", help="one row of one token")
    parser.add_argument("--planted", action="store_true", help="a kernel that is compiled as none of ours may be")
    chosen = parser.parse_args()
    (vendor,) = {TARGETS[name].backend for name in chosen.targets}
    # The launchers look at this for what a compiler understands.
    torch.version.cuda = "13.0" if vendor == "cuda" else None
    triton.knobs.nvidia.dump_ptxas_log = True
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        triton.knobs.cache.dir = cache
        for name in chosen.targets:
            target, sizes = TARGETS[name], SMALLEST if chosen.smallest else USUAL
            made = planted(target) if chosen.planted else launches(target, sizes)
            for kernel, forms in by_kernel(made).items():
                some = forms[:: -(-len(forms) // chosen.forms)]
                found.setdefault(kernel, {})[name] = [compiled(launch, target) for launch in some]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
