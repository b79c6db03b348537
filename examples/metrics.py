"""The record of a run: one JSON object per line, and the picture of its loss curve."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

Row = dict[str, Any]

# One fixed colour per optimizer, so that every picture of this folder reads alike.
COLOURS = {"adamw": "#c2571a", "dmuon": "#1f5fa8"}
LABELS = {"adamw": "AdamW", "dmuon": "dmuon"}
INK, FAINT = "#333333", "#dddddd"


class Metrics:
    """Appends rows to `path`, on the rank where `shown` is true; elsewhere it does nothing.

    Rows after `resumed_step`, which will be computed again, are dropped first.
    """

    def __init__(self, path: Path, resumed_step: int, shown: bool) -> None:
        self.file: TextIO | None = None
        if not shown:
            return
        kept = [row for row in read_metrics(path) if row["step"] <= resumed_step] if resumed_step else []
        self.file = path.open("w", encoding="utf-8")
        for row in kept:
            self.write(**row)

    def write(self, **row: float) -> None:
        if self.file is not None:
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.file is not None:
            self.file.close()


def read_metrics(path: Path) -> list[Row]:
    """All complete rows of a run; a last line cut short by a kill is left out."""
    rows: list[Row] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def curve(rows: list[Row], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of the rows that have `key`."""
    chosen = [row for row in rows if key in row]
    return [row["step"] for row in chosen], [row[key] for row in chosen]


def plot_losses(path: Path, runs: Mapping[str, list[Row]], title: str, baseline: float | None = None) -> None:
    """Write a PNG: each run's training loss, faint, and its validation loss, strong and named at its end.

    Args:
        path: where the PNG goes.
        runs: optimizer name ("adamw" or "dmuon") to the rows of its run.
        title: one line above the picture.
        baseline: the loss in nats per byte of a model without context, drawn as a dashed line.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.8), dpi=150, layout="constrained")
    ends: list[tuple[float, str]] = []
    last_step = 1
    for name, rows in runs.items():
        axes.plot(*curve(rows, "loss"), color=COLOURS[name], linewidth=0.8, alpha=0.3)
        # Without step 0: a straight line from there would hide how steep the first fall is.
        steps, losses = curve([row for row in rows if row["step"] > 0], "val_loss")
        axes.plot(steps, losses, color=COLOURS[name], linewidth=2, marker="o", markersize=4)
        if losses:
            ends.append((losses[-1], name))
            last_step = max(last_step, steps[-1])

    # The first steps' fall from log(256) would flatten everything after it: the picture starts lower.
    seen = [loss for rows in runs.values() for key in ("loss", "val_loss") for loss in curve(rows, key)[1]]
    highest = [loss for loss, _ in ends] + ([baseline] if baseline else [])
    top = 1.12 * max(highest, default=1.0)
    bottom = min(seen, default=0.0)
    margin = 0.04 * (top - bottom)
    axes.set_ylim(bottom - margin, top)
    axes.set_xlim(0, last_step * 1.21)  # room for the names at the right

    label_y = float("-inf")
    for loss, name in sorted(ends):  # from the lowest up, each at least one line of text above the last
        label_y = max(loss, label_y + 0.05 * (top - bottom))
        text = f"{LABELS[name]} {loss:.3f}"
        axes.text(last_step * 1.015, label_y, text, color=COLOURS[name], va="center", weight="bold")
    if baseline is not None:
        axes.axhline(baseline, color=INK, linewidth=0.8, linestyle=(0, (4, 4)))
        axes.text(
            last_step * 1.2, baseline, "byte frequencies only", color=INK, ha="right", va="bottom", size=9
        )

    axes.set_title(title, loc="left", color=INK, size=12, pad=22)
    note = "validation (strong) and training (faint)"
    axes.text(0, 1.02, note, transform=axes.transAxes, color=INK, size=9)
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel("loss (nats per byte)", color=INK)
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
