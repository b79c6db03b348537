"""The results: tables for the terminal and in Markdown, and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from metrics import COLOURS, FAINT, INK
from spread import by_round, quartiles, spread

Row = dict[str, Any]
MEGA = 1e6
LOSS_TOLERANCE = 0.05  # relative difference of losses after the warm-up, which rounding alone does not make
TIMES = ("", "iteration, ms", "ratio", "step(), ms", "settled, ms")
COUNTS = ("", "collectives", "MB moved", "most", "MB at rest", "peak", "losses")
OTHER_COLOUR = "#8a8a8a"


def milliseconds(seconds: Sequence[float]) -> str:
    return spread([1e3 * value for value in seconds], 1)


class Report:
    """Everything there is to say about one run's results, as `step.json` has them."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.result = result
        self.meshes: list[dict[str, Any]] = result["meshes"]
        for mesh in self.meshes:  # the baseline first
            mesh["peers"].sort(key=lambda row: row["file"] != result["baseline"])

    def ratios(self, mesh: dict[str, Any], row: Row) -> list[float]:
        """Iteration time over the baseline's, a value a round; empty if either did not run."""
        base = next(other for other in mesh["peers"] if other["file"] == self.result["baseline"])
        return [] if row["error"] or base["error"] else by_round(row["iteration"], base["iteration"])

    def times(self, mesh: dict[str, Any]) -> list[list[str]]:
        """Rows for `TIMES`."""
        rows = []
        for row in mesh["peers"]:
            if row["error"]:
                rows.append([row["name"], f"not here: {row['error']}"])
                continue
            ratios = self.ratios(mesh, row)
            is_base = row["file"] == self.result["baseline"]
            ratio = "1" if is_base else spread(ratios, 3) if ratios else ""
            times = [milliseconds(row[key]) for key in ("iteration", "step", "settled")]
            rows.append([row["name"], times[0], ratio, *times[1:]])
            if "newton_schulz" in row:
                alone = milliseconds(row["newton_schulz"])
                rows.append([f"{row['name']}: Newton-Schulz", "", "", alone, ""])
        return rows

    def counts(self, mesh: dict[str, Any]) -> list[list[str]]:
        """Rows for `COUNTS`."""
        rows = []
        for row in mesh["peers"]:
            if row["error"]:
                continue
            calls, moved, more = row["collectives"], row["bytes"], "more than " if row["unknown"] else ""
            rows.append(
                [
                    row["name"],
                    f"{max(calls)}" if min(calls) == max(calls) else f"{min(calls)} to {max(calls)}",
                    f"{more}{statistics.fmean(moved) / MEGA:.2f}",
                    f"{more}{max(moved) / MEGA:.2f}",
                    f"{max(row['rest']) / MEGA:.2f}",
                    f"{max(row['peak']) / MEGA:.2f}",
                    " ".join(f"{row['loss'][key]:.3f}" for key in ("first", "warm", "last")),
                ]
            )
        return rows

    def remarks(self, mesh: dict[str, Any]) -> list[str]:
        """What the tables do not say by themselves: overhead of a step, losses that differ, unknown bytes."""
        remarks = []
        ran = [row for row in mesh["peers"] if not row["error"]]
        for row in ran:
            if "newton_schulz" in row:
                overhead = spread(by_round(row["step"], row["newton_schulz"]), 3)
                remarks.append(f"{row['name']}: step() takes {overhead} of its Newton-Schulz alone.")
            if row["unknown"]:
                names = ", ".join(row["unknown"])
                remarks.append(f"{row['name']}: the bytes of {names} are not counted.")
        for update in sorted({row["update"] for row in ran} - {""}):
            same = [row for row in ran if row["update"] == update]
            losses = [row["loss"]["warm"] for row in same]
            if max(losses) > (1 + LOSS_TOLERANCE) * min(losses):
                names = ", ".join(row["name"] for row in same)
                remarks.append(f"Attention: after the warm-up, the losses of {names} are not the same.")
        return remarks

    def notes(self) -> list[str]:
        """What each peer does."""
        notes = {row["name"]: row["note"] for mesh in self.meshes for row in mesh["peers"] if row["note"]}
        return [f"{name}: {note}" for name, note in notes.items()]

    def setting(self) -> list[str]:
        """What was run, where and how."""
        result = self.result
        return [
            *(f"{task}." for task in dict.fromkeys(mesh["task"] for mesh in self.meshes)),
            f"{result['ranks']} processes on one machine, gloo: {result['machine']}; load average "
            f"{result['load']:.1f} before the run.",
            f"{result['method']}; times are medians [quartiles] over rounds, of the slowest rank.",
        ]

    def print(self, console: Console) -> None:
        """Tables on a terminal."""
        for mesh in self.meshes:
            console.print()
            console.rule(f"[bold]{mesh['mesh']}", align="left")
            for header, rows in ((TIMES, self.times(mesh)), (COUNTS, self.counts(mesh))):
                table = Table(box=box.SIMPLE_HEAD)
                for number, name in enumerate(header):
                    table.add_column(name, justify="right" if number else "left")
                failed = [row for row in rows if len(row) != len(header)]
                for row in rows:
                    if row not in failed:
                        table.add_row(*(cell.replace(" [", "\n[") for cell in row))
                console.print(table)
                for row in failed:
                    console.print(": ".join(row), markup=False, highlight=False)
            for remark in self.remarks(mesh):
                console.print(remark, markup=False, highlight=False)
        for line in self.setting():
            console.print(line, markup=False, highlight=False)

    def markdown(self, readme: str) -> str:
        """The same as a page, with a link to the README of this folder."""
        lines = ["# Iterations and steps, side by side", "", "```sh", self.result["command"], "```", ""]
        lines += [*self.setting(), f"[How to read this]({readme}).", "", "![Ratios](step.png)", ""]
        for mesh in self.meshes:
            lines += [f"## {mesh['mesh']}", ""]
            lines += [*markdown_table(TIMES, self.times(mesh)), ""]
            lines += [*markdown_table(COUNTS, self.counts(mesh)), ""]
            for remark in self.remarks(mesh):
                lines += [remark, ""]
        lines += ["## The peers", "", *(f"- {note}" for note in self.notes())]
        return "\n".join(lines) + "\n"

    def draw(self, path: Path) -> None:
        """Write a PNG: for each mesh, a bar per peer with its ratio to the baseline, and the quartiles."""
        import matplotlib

        matplotlib.use("Agg")  # no display needed
        import matplotlib.pyplot as plt

        count = len(self.meshes)
        size = (2.2 + 3.2 * count, 1.4 + 0.6 * len(self.meshes[0]["peers"]))
        figure, all_axes = plt.subplots(
            1, count, figsize=size, dpi=150, layout="constrained", sharex=True, sharey=True, squeeze=False
        )
        longest = 1.0
        for axes, mesh in zip(all_axes[0], self.meshes, strict=True):
            longest = max(longest, self._draw_mesh(axes, mesh))
        all_axes[0][0].set_xlim(0, 1.25 * longest)  # room for the numbers
        figure.suptitle(
            f"Time of a training iteration, {self._base_name()} = 1", x=0.01, ha="left", color=INK
        )
        figure.savefig(path)
        plt.close(figure)

    def _base_name(self) -> str:
        return next(row["name"] for row in self.meshes[0]["peers"] if row["file"] == self.result["baseline"])

    def _draw_mesh(self, axes: Any, mesh: dict[str, Any]) -> float:
        """One panel; returns the end of its longest bar."""
        longest = 0.0
        rows = mesh["peers"][::-1]  # the first on top
        for place, row in enumerate(rows):
            ratios = self.ratios(mesh, row)
            if not ratios:
                axes.text(0, place, "  not here", va="center", color=INK, size=9)
                continue
            low, middle, high = quartiles(ratios)
            error = [[middle - low], [high - middle]]
            axes.barh(place, middle, height=0.62, color=colour(row), xerr=error, ecolor=INK, capsize=3)
            axes.text(high, place, f"  {middle:.2f}", va="center", color=INK, size=9)
            longest = max(longest, high)
        axes.axvline(1, color=INK, linewidth=0.8, linestyle=(0, (4, 4)))
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
        axes.set_title(mesh["mesh"], loc="left", color=INK, size=10)
        axes.grid(axis="x", color=FAINT, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(colors=INK, length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        return longest


def colour(row: Row) -> str:
    """AdamW's and dmuon's colours are those of the examples' pictures; all others are grey."""
    return {"fsdp2_adamw": COLOURS["adamw"], "dmuon_muon": COLOURS["dmuon"]}.get(row["file"], OTHER_COLOUR)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table whose columns after the first are right-aligned; a row may be shorter."""
    lines = [header, [":--", *("--:" for _ in header[1:])]]
    lines += [[*row, *[""] * (len(header) - len(row))] for row in rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
