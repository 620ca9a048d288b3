"""The Triton backend on a GPU: its bits first, then its times beside those of the peers that are installed.

``python benchmarks/gpu.py`` needs torch and triton and nothing else, runs from a checkout without an installation, and
ends within eight minutes: what finds no time is left out, and it says so. It prints a table, and writes a line per cell
and contestant to ``--csv``. Times are medians of 30 calls after 5, by events of the device; ``graph`` replays a
captured graph, without the cost of launching from Python, and ``calls`` does not. Kernels are compiled when they are
first called, which takes much of the run. Rows are used again and again, as a model's own logits are: they come from
the cache where they fit. ``--device cpu`` interprets the kernels, which tries the script and measures nothing.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
VOCABS, BATCHES = (50257, 128256, 151936), (1, 8, 64, 256)
CHAIN = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1}
SETTINGS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "unfiltered": {"temperature": 0.8},
    "top-k": {"temperature": 0.8, "top_k": 50},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
}
PUBLISHED = """Published by others, on other hardware:
  NVIDIA L4, V = 128256: full pipeline 0.94 ms (its eager chain 0.90 at B = 1, 1.19 at B = 8), unfiltered 0.14 ms
  Intel Iris Xe, verify_probs at B = 8, K = 5, V = 32000: 0.39 ms (residual and multinomial 0.90 ms)"""

# A failed capture would spoil the random draws of what comes after it, so of the others none is tried.
CAPTURED = ("draftproof", "torch eager", "transformers")

Call = Callable[[], Any]


class Cell(NamedTuple):
    """What is timed: our call, and the bytes of the rows that it cannot do without."""

    name: str
    batch: int
    vocab: int
    call: Call
    bytes: int
    peers: dict[str, Call]


class Clock:
    """Times calls on a device."""

    def __init__(self, device: Any, warm_up: int, iterations: int) -> None:
        import torch

        self.device, self.warm_up, self.iterations = device, warm_up, iterations
        self.torch = torch
        self.side = getattr(torch, device.type)

    def graph(self, call: Call) -> Call:
        """Return the replay of a captured call; RuntimeError where it cannot be captured."""
        torch = self.torch
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
            call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    def times(self, call: Call) -> list[float]:
        """Return the times of the calls in microseconds."""
        for _ in range(self.warm_up):
            call()
        if self.device.type == "cpu":
            return [self._wall(call) for _ in range(self.iterations)]
        self.side.synchronize()
        events = []
        for _ in range(self.iterations):
            start, end = (self.side.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            events.append((start, end))
        self.side.synchronize()
        return [1000 * start.elapsed_time(end) for start, end in events]

    @staticmethod
    def _wall(call: Call) -> float:
        start = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - start)


# --- inputs -----------------------------------------------------------------------------------------------------------


def logits(shape: tuple[int, ...], device: Any, dtype: Any, seed: int) -> Any:
    """Return rows that fall as -1.2 log(rank) with noise, each in an order of its own."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    vocab = shape[-1]
    ranked = -1.2 * torch.arange(1, vocab + 1).log()
    rows = [
        (ranked + 0.3 * torch.randn(vocab, generator=draw))[torch.randperm(vocab, generator=draw)] for _ in range(8)
    ]
    count = 1
    for n in shape[:-1]:
        count *= n
    return torch.stack([rows[i % 8].roll(i) for i in range(count)]).reshape(shape).to(dtype).to(device)


def sampling_cells(arguments: argparse.Namespace, device: Any, dtype: Any) -> Iterator[Cell]:
    """Yield the cells of ``sample``, smallest first."""
    import torch

    import draftproof as dp

    for vocab in arguments.vocabs:
        for batch in arguments.batches:
            rows = logits((batch, vocab), device, dtype, vocab)
            stream = {"seed": torch.arange(batch, device=device), "offset": torch.arange(batch, device=device)}
            history = torch.arange(64, device=device).repeat(batch, 1) % vocab
            full = vocab == arguments.vocabs[len(arguments.vocabs) // 2] and batch <= 8
            for name, given in {**SETTINGS, **({"full chain": CHAIN} if full else {})}.items():
                past = {"prev_tokens": history} if "repetition_penalty" in given else {}
                yield Cell(
                    name,
                    batch,
                    vocab,
                    lambda r=rows, k={**given, **past, **stream}: dp.sample(r, **k, backend="triton"),
                    rows.numel() * rows.element_size(),
                    peers_of_sampling(rows, given, history),
                )


def verification_cells(arguments: argparse.Namespace, device: Any, dtype: Any) -> Iterator[Cell]:
    """Yield ``verify_probs`` in the published shape, then ``verify`` from logits."""
    import torch

    import draftproof as dp

    batch, drafted, vocab = arguments.probs
    target, draft = (logits((batch, drafted + more, vocab), device, torch.float32, more).softmax(-1) for more in (1, 0))
    tokens = torch.multinomial(draft.reshape(-1, vocab), 1).reshape(batch, drafted)
    uniforms = {name: torch.rand((batch, drafted + n), device=device) for name, n in (("accept", 0), ("sample", 1))}
    given = {f"uniform_{name}": u for name, u in uniforms.items()}
    yield Cell(
        "verify_probs",
        batch,
        vocab,
        lambda: dp.verify_probs(target, draft, tokens, **given, backend="triton"),
        4 * (target.numel() + draft.numel()),
        {"torch eager": lambda: eager_verification(target, draft, tokens, uniforms["accept"])},
    )
    vocab = arguments.vocabs[len(arguments.vocabs) // 2]
    for batch in (b for b in arguments.batches if b <= 64):
        rows, guessed = (logits((batch, drafted + more, vocab), device, dtype, 7 + more) for more in (1, 0))
        ids = guessed.argmax(-1)
        stream = {"seed": torch.arange(batch, device=device), "offset": torch.arange(batch, device=device)}
        for rule in ("token", "block", "match", "greedy"):
            q = guessed if rule in ("token", "block") else None
            size = rows.numel() + (q.numel() if q is not None else 0)
            yield Cell(
                f"verify {rule}",
                batch,
                vocab,
                lambda p=rows, q=q, i=ids, k={**stream, "rule": rule}: dp.verify(p, q, i, **k, backend="triton"),
                size * rows.element_size(),
                {},
            )


# --- peers ------------------------------------------------------------------------------------------------------------


def peers_of_sampling(rows: Any, given: dict[str, float], history: Any) -> dict[str, Call]:
    """Return what else draws from these rows here; a peer that is not installed is left out."""
    peers: dict[str, Call] = {"torch eager": lambda: eager_sampling(rows, given, history)}
    for name, make in (("transformers", of_transformers), ("vLLM", of_vllm), ("FlashInfer", of_flashinfer)):
        try:
            call = make(rows, given, history)
        except (ImportError, AttributeError, RuntimeError, TypeError):
            continue
        if call:
            peers[name] = call
    return peers


def eager_sampling(rows: Any, given: dict[str, float], history: Any) -> Any:
    """The usual chain of torch functions."""
    import torch

    x = rows.float()
    if given["temperature"] == 0.0:
        return x.argmax(-1)
    if "repetition_penalty" in given:
        seen = x.gather(-1, history)
        rate = given["repetition_penalty"]
        x = x.scatter(-1, history, torch.where(seen < 0, seen * rate, seen / rate))
    x = x / given["temperature"]
    if "top_k" in given:
        x = x.masked_fill(x < x.topk(int(given["top_k"]), -1).values[..., -1:], -float("inf"))
    if "top_p" in given:
        ordered, order = x.sort(-1)
        removed = ordered.softmax(-1).cumsum(-1) <= 1 - given["top_p"]
        removed[..., -1] = False
        x = x.masked_fill(removed.scatter(-1, order, removed), -float("inf"))
    p = x.softmax(-1)
    if "min_p" in given:
        p = p.masked_fill(p < given["min_p"] * p.amax(-1, keepdim=True), 0.0)
    return torch.multinomial(p, 1)


def eager_verification(target: Any, draft: Any, tokens: Any, accept: Any) -> Any:
    """Accept by ratios, then draw from the residual of the first row that is rejected, or from the last row."""
    import torch

    batch, drafted = tokens.shape
    p, q = (rows[:, :drafted].gather(-1, tokens[..., None])[..., 0] for rows in (target, draft))
    accepted = (accept * q < p).long().cumprod(-1).sum(-1)
    each = torch.arange(batch, device=target.device)
    residual = (target[each, accepted] - draft[each, accepted.clamp(max=drafted - 1)]).clamp(min=0)
    law = torch.where((accepted == drafted)[:, None], target[:, -1], residual)
    return accepted, torch.multinomial(law, 1)


def of_transformers(rows: Any, given: dict[str, float], history: Any) -> Call | None:
    """The processors that ``generate`` would build, softmax and multinomial."""
    import torch
    import transformers as t

    processors = {
        "repetition_penalty": t.RepetitionPenaltyLogitsProcessor,
        "temperature": t.TemperatureLogitsWarper,
        "top_k": t.TopKLogitsWarper,
        "top_p": t.TopPLogitsWarper,
        "min_p": t.MinPLogitsWarper,
    }
    if given["temperature"] == 0.0:
        return None
    chain = t.LogitsProcessorList([make(given[name]) for name, make in processors.items() if name in given])
    return lambda: torch.multinomial(chain(history, rows.to(torch.float32, copy=True)).softmax(-1), 1)


def of_vllm(rows: Any, given: dict[str, float], _history: Any) -> Call | None:
    """The kernels of its sampler for top-k and top-p, and its draw by exponentials."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p, random_sample

    if given["temperature"] == 0.0 or "min_p" in given:
        return None
    k, p = given.get("top_k"), given.get("top_p")
    top_k = None if k is None else rows.new_full((len(rows),), k).int()
    top_p = None if p is None else rows.new_full((len(rows),), p).float()
    heat = given["temperature"]
    return lambda: random_sample(apply_top_k_top_p(rows.float() / heat, top_k, top_p).softmax(-1), {})


def of_flashinfer(rows: Any, given: dict[str, float], _history: Any) -> Call | None:
    """Its sampling without sorting."""
    from flashinfer import sampling

    if given["temperature"] == 0.0 or "min_p" in given:
        return None
    k, p, heat = given.get("top_k"), given.get("top_p"), given["temperature"]
    if k is None and p is None:
        return lambda: sampling.sampling_from_logits(rows.float() / heat)
    k, p = int(k or rows.shape[-1]), p or 1.0
    return lambda: sampling.top_k_top_p_sampling_from_logits(rows.float() / heat, k, p)


# --- bits -------------------------------------------------------------------------------------------------------------


def check_bits(arguments: argparse.Namespace, device: Any, until: float) -> tuple[int, int]:
    """Compare operations with eager on the CPU, which has the bits of the definition, as long as there is time.

    Returns how many outputs were compared, and how many calls were left out.
    """
    import torch

    import draftproof as dp

    compared = left = 0

    def compare(function: str, rows: tuple[Any, ...], **keywords: Any) -> None:
        nonlocal compared, left
        if time.monotonic() > until:
            left += 1
            return
        results = []
        for where, backend in ((device, "triton"), (torch.device("cpu"), "eager")):
            put = [r.to(where) if r is not None else None for r in rows]
            named = {n: v.to(where) if isinstance(v, torch.Tensor) else v for n, v in keywords.items()}
            result = getattr(dp, function)(*put, **named, check=False, backend=backend)
            results.append(result if isinstance(result, tuple) else (result,))
        for found, expected in zip(*results, strict=True):
            bits = [a.cpu().contiguous().view(torch.uint8) for a in (found, expected)]
            if not torch.equal(*bits):
                raise SystemExit(f"{function} {tuple(rows[0].shape)} {sorted(keywords)}: other bits than eager's")
            compared += 1

    drafted = 3
    # The interpreter has no time for more.
    small = () if device.type == "cpu" else ((65, 5), (1, 5), (1000, 5))
    for vocab, batch in (*small, *((n, 2) for n in reversed(arguments.vocabs))):
        target = logits((batch, drafted + 1, vocab), "cpu", torch.bfloat16, vocab)
        draft = logits((batch, drafted, vocab), "cpu", torch.bfloat16, vocab + 1)
        rows, tokens = target[:, 0], draft.argmax(-1)
        stream = {"seed": torch.arange(batch) - 2, "offset": torch.arange(batch) * 7}
        for given in (*SETTINGS.values(), CHAIN):
            past = {"prev_tokens": tokens} if "repetition_penalty" in given else {}
            compare("sample_with_logprobs", (rows,), **given, **past, **stream)
            compare("filter_logits", (rows.float(),), **given, **past)
        compare("sample_probs", (rows.float().softmax(-1),), **stream)
        for rule in ("token", "block", "match", "greedy"):
            for given in ({}, {"top_k": 20, "top_p": 0.9}):
                compare("verify", (target, draft, tokens), rule=rule, **given, **stream)
            p, q = target.float().softmax(-1), draft.float().softmax(-1)
            compare("verify_probs", (p, q, tokens), rule=rule, **stream)
        compare("verify_greedy", (target, tokens), eos=3)
    return compared, left


# --- the run ----------------------------------------------------------------------------------------------------------


def copy_rate(clock: Clock) -> float:
    """Return the bytes a microsecond that a copy reads and writes."""
    import torch

    size = 1 << (22 if clock.device.type == "cpu" else 28)
    source = torch.ones(size, dtype=torch.uint8, device=clock.device)
    into = torch.empty_like(source)
    return 2 * size / statistics.median(clock.times(lambda: into.copy_(source)))


def measure(cell: Cell, clock: Clock, rate: float) -> Iterator[dict[str, Any]]:
    """Yield a line for us and for every peer."""
    for contestant, call in {"draftproof": cell.call, **cell.peers}.items():
        for by in ("calls", "graph") if clock.device.type == "cuda" and contestant in CAPTURED else ("calls",):
            try:
                times = sorted(clock.times(clock.graph(call) if by == "graph" else call))
            except Exception as error:  # a peer's own trouble
                if contestant == "draftproof":
                    raise
                print(f"    {contestant}, by {by}: {error!r:.100}")
                continue
            median = statistics.median(times)
            yield {
                "cell": cell.name,
                "batch": cell.batch,
                "vocab": cell.vocab,
                "contestant": contestant,
                "by": by,
                "median_us": round(median, 2),
                "fastest_us": round(times[0], 2),
                "slowest_us": round(times[-1], 2),
                "bytes": cell.bytes,
                "share_of_copy": round(cell.bytes / median / rate, 3),
            }


def run(arguments: argparse.Namespace) -> None:
    """Check, measure, print and write."""
    start = time.monotonic()
    import torch
    import triton

    device, dtype = torch.device(arguments.device or found_device(torch)), getattr(torch, arguments.dtype)
    clock = Clock(device, arguments.warm_up, arguments.iterations)
    name = "interpreter" if device.type == "cpu" else clock.side.get_device_name()
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}, rows in {arguments.dtype}")
    compared, left = check_bits(arguments, device, start + 60 * arguments.minutes / 3)
    print(f"{compared} outputs have the bits of eager on the CPU; {left} calls were left out for want of time")
    rate = copy_rate(clock)
    print(f"a copy moves {rate / 1000:.0f} GB/s\n{PUBLISHED}\n")
    print(f"{'cell':<14}{'B':>4}{'V':>8}  {'contestant':<13}{'us':>10}{'of copy':>9}  by")
    lines: list[dict[str, Any]] = []
    for cells in (verification_cells, sampling_cells):
        for cell in cells(arguments, device, dtype):
            if time.monotonic() - start > 60 * arguments.minutes:
                print("the time is up: the remaining cells are left out")
                break
            for line in measure(cell, clock, rate):
                lines.append({"device": name, "dtype": arguments.dtype, **line})
                print(
                    f"{cell.name:<14}{cell.batch:>4}{cell.vocab:>8}  {line['contestant']:<13}"
                    f"{line['median_us']:>10.1f}{line['share_of_copy']:>9.2f}  {line['by']}"
                )
    with Path(arguments.csv).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    print(f"written to {arguments.csv} after {time.monotonic() - start:.0f} s")


def found_device(torch: Any) -> str:
    """Return the kind of GPU that is here."""
    for kind in ("cuda", "xpu"):
        if getattr(torch, kind).is_available():
            return kind
    raise SystemExit("torch sees no GPU; --device cpu tries the script in triton's interpreter")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "xpu", "cpu"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--vocabs", type=int, nargs="+", default=VOCABS)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--probs", type=int, nargs=3, default=(8, 5, 32000), metavar=("B", "K", "V"))
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--minutes", type=float, default=7.0, help="no cell is begun after these")
    parser.add_argument("--csv", default="gpu.csv")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(ROOT / "src"))
    run(arguments)


if __name__ == "__main__":
    main()
