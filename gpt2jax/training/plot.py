"""`gpt2jax plot RUN...`: the curves of one or more runs as a PNG (extra `plot`)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from gpt2jax.errors import InputError
from gpt2jax.training.metrics import read_metrics

#: (key in metrics.jsonl, label of the axis, logarithmic)
_PANELS = [("loss", "loss (nats a token)", False), ("lr", "learning rate", False), ("grad_norm", "gradient norm", True), ("tokens_per_s", "tokens/s", False)]
#: Drawn where a run has them.
_MORE = [
    ("mfu", "MFU", False),
    ("hellaswag_acc_norm", "HellaSwag acc_norm", False),
    ("lambada_acc", "LAMBADA acc", False),
    ("lambada_ppl", "LAMBADA ppl", True),
]


def plot_runs(run_dirs: list[Path], out: Path) -> None:
    """Draw loss (training and validation), learning rate, gradient norm, throughput, and what else the runs measured, against steps.

    InputError for a folder without metrics.
    """
    runs = {}
    for run_dir in run_dirs:
        lines = read_metrics(run_dir / "metrics.jsonl")
        if not lines:
            raise InputError(f"{run_dir} holds no metrics.jsonl with a line in it; give the folder of a run")
        runs[str(run_dir)] = lines
    try:
        import matplotlib
    except ImportError:
        raise InputError("plots need matplotlib: pip install 'gpt2jax[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = _PANELS + [panel for panel in _MORE if any(_curve(lines, panel[0])[0] for lines in runs.values())]
    rows = math.ceil(len(panels) / 2)
    figure, axes = pyplot.subplots(rows, 2, figsize=(11, 3.5 * rows), layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (key, label, logarithmic) in zip(axes.flat, panels, strict=False):
        for number, (name, lines) in enumerate(runs.items()):
            axis.plot(*_curve(lines, key), color=f"C{number}", linewidth=1, alpha=0.6 if key == "loss" else 1.0, label=name)
            if key == "loss":
                axis.plot(*_curve(lines, "val_loss"), color=f"C{number}", marker="o", markersize=4, label=f"{name}, validation")
        axis.set(xlabel="step", ylabel=label, yscale="log" if logarithmic else "linear")
        axis.grid(alpha=0.3)
    axes.flat[0].legend(fontsize="small")
    if out.parent != Path():
        out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


def _curve(lines: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    points = [(line["step"], line[key]) for line in lines if line.get(key) is not None and math.isfinite(line[key])]
    return [step for step, _ in points], [value for _, value in points]
