"""The plot of docs/performance.md: times the floor by operation and vocabulary, everybody in one picture."""

from __future__ import annotations

from pathlib import Path

from .cells import MASS, OWN, SAMPLING, VERIFICATION, VOCABULARIES
from .figures import Results, main
from .report import floor_of

COLOURS = {
    OWN: "#c1121f",
    "numpy": "#6c757d",
    "torch": "#f4a261",
    "transformers": "#2a9d8f",
    "vllm": "#264653",
    "llama.cpp": "#8338ec",
    "flashspec": "#3a86ff",
}


def plot(results: Results, file: Path) -> None:
    """Draw one panel an operation: geometric means over the main grid's cells of real rows."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "draftproof", "svg.fonttype": "none"})
    from matplotlib import pyplot

    operations = (*SAMPLING, *VERIFICATION)
    figure, panels = pyplot.subplots(2, 5, figsize=(15, 6.4), sharex=True, sharey="row", layout="constrained")
    for operation, panel in zip(operations, panels.flat, strict=True):
        below = floor_of(operation)
        for name, colour in COLOURS.items():
            heights = [results.ratio(main(operation, vocab=v, shape="real"), name, below) for v in VOCABULARIES]
            width = 2.5 if name == OWN else 1.2
            panel.plot(range(len(VOCABULARIES)), heights, "o-", color=colour, label=name, lw=width)
        panel.set_yscale("log")
        panel.axhline(1, color="black", lw=0.8, ls=":")
        panel.set_title(f"{operation} / {'mass pass' if below == MASS else 'read'}", fontsize=10)
        panel.set_xticks(range(len(VOCABULARIES)), [f"{vocab // 1000}k" for vocab in VOCABULARIES])
        panel.grid(axis="y", alpha=0.25)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.supylabel("times the floor (log)")
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
