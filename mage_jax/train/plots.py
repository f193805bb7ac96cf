"""Loss curves of a run as a picture."""

from __future__ import annotations

import os
import pathlib

from matplotlib.figure import Figure  # not pyplot: no display, no global state

from mage_jax.train.metrics import METRICS_FILE, MetricsError, read_lines


def plot_run(run: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> pathlib.Path:
    """Draws loss, accuracy and learning rate over steps; evaluation as dots.

    Args:
      run: run folder with ``metrics.jsonl``.
      out: PNG to write; ``RUN/loss.png`` if None.

    Returns:
      The PNG's path.

    Raises:
      MetricsError: the run has logged nothing yet.
    """
    run = pathlib.Path(run)
    lines = read_lines(run / METRICS_FILE)
    if not lines:
        raise MetricsError(f"{run / METRICS_FILE}: holds no metrics yet")
    out = pathlib.Path(out) if out is not None else run / "loss.png"
    figure = Figure(figsize=(8, 9), layout="tight")
    axes = figure.subplots(3, 1, sharex=True)
    panels = (("loss", "eval_loss", "loss (nats per token)"), ("accuracy", "eval_accuracy", "token accuracy"))
    for axis, (name, eval_name, label) in zip(axes, panels, strict=False):
        for field, style in ((name, "-"), (eval_name, "o")):
            points = [(line["step"], line[field]) for line in lines if field in line]
            if points:
                axis.plot(*zip(*points, strict=True), style, label=field.replace("_", " "), markersize=4, linewidth=1)
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        if axis.has_data():
            axis.legend()
    rates = [(line["step"], line["learning_rate"]) for line in lines if "learning_rate" in line]
    if rates:
        axes[2].plot(*zip(*rates, strict=True), linewidth=1)
    axes[2].set_ylabel("learning rate")
    axes[2].set_xlabel("step")
    axes[2].grid(alpha=0.3)
    figure.suptitle(run.name)
    figure.savefig(out, dpi=120)
    return out
