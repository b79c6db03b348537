"""A plan as a picture: work, traffic and memory of the ranks, for one mesh or several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .model import PlanError
from .plan import Plan
from .traffic import PHASES

_MOST_BARS = 512  # a bar is narrower than a pixel beyond that


def draw(plans: Sequence[Plan], reports: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a picture: a row of three plots for each mesh.

    Raises:
        PlanError: if the file cannot be written, or its kind is not known.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4 * len(plans)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(plans), 3, squeeze=False)
    for row, plan, report in zip(axes, plans, reports, strict=True):
        _work(row[0], plan, report)
        _traffic(row[1], plan)
        _memory(row[2], report)
    figure.suptitle(reports[0]["model"]["name"])
    try:
        figure.savefig(path, metadata={"Software": None} if path.suffix == ".png" else None)
    except (OSError, ValueError) as error:
        raise PlanError(f"--picture {path}: {error}") from error


def _work(axis: Any, plan: Plan, report: dict[str, Any]) -> None:
    """Operations of every rank, the busiest first."""
    values = sorted((load.operations / 1e12 for load in plan.loads.values()), reverse=True)
    values += [0.0] * (plan.mesh.ranks - len(values))
    step = -(-len(values) // _MOST_BARS)
    axis.fill_between(range(0, len(values), step), values[::step], step="post", alpha=0.7)
    axis.axhline(sum(values) / len(values), color="black", linestyle="--", label="mean")
    axis.set_title(f"{report['mesh']['text']}: Newton-Schulz per step")
    axis.set_xlabel("ranks, the busiest first")
    axis.set_ylabel("operations / 1e12")
    axis.set_ylim(bottom=0)
    axis.legend()


def _traffic(axis: Any, plan: Plan) -> None:
    nbytes = plan.moves[..., 1].flatten(0, 1) / 2**20  # [ranks, phases]
    rows = [(phase, nbytes[:, i]) for i, phase in enumerate(PHASES) if nbytes[:, i].any()]
    names = [name for name, _ in rows]
    axis.barh(names, [float(values.max()) for _, values in rows], alpha=0.4, label="most")
    axis.barh(names, [float(values.mean()) for _, values in rows], height=0.4, label="mean")
    axis.invert_yaxis()
    axis.set_title("bytes moved per step and rank")
    axis.set_xlabel("MiB")
    axis.legend()


def _memory(axis: Any, report: dict[str, Any]) -> None:
    memory = report["memory"]
    rows = {name: spread for name, spread in memory["rest"].items() if spread["max"]}
    rows["peak, about"] = memory["peak"]
    names = [name.replace("_", " ") for name in rows]
    axis.barh(names, [spread["max"] / 2**30 for spread in rows.values()], alpha=0.4, label="most")
    axis.barh(names, [spread["mean"] / 2**30 for spread in rows.values()], height=0.4, label="mean")
    axis.invert_yaxis()
    axis.set_title("memory per rank, without activations")
    axis.set_xlabel("GiB")
    axis.legend()
