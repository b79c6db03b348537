"""A report for people: tables, with rich."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .advice import Layout

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def show(report: dict[str, Any], others: Sequence[dict[str, Any]], file: TextIO | None = None) -> None:
    """Print a report, and other meshes next to it."""
    console = Console(file=file, highlight=False)
    _head(console, report)
    if report["time"] is not None:
        _time(console, report["time"])
    _traffic(console, report)
    _memory(console, report)
    _limits(console, report)
    if others:
        _comparison(console, [report, *others])
    for note in report["notes"]:
        console.print(Text(f"note: {note}"))
    for sentence in (report["time"] or {"advice": []})["advice"]:
        console.print(Text(f"advice: {sentence}"))


_PARTS = {
    "compute": "products of forward and backward",
    "parallel": "sent in the midst of them (tp, ep)",
    "exposed": "collectives that nothing hides",
    "orthogonalize": "step: Newton-Schulz, busiest rank",
    "exchange": "step: collectives",
    "update": "step: weights and states",
    "total": "iteration",
}


def _time(console: Console, time: dict[str, Any]) -> None:
    machine = time["machine"]
    title = f"An iteration in ms, about: {machine['name']}, {time['tokens']:,.0f} tokens a rank"
    table = Table(title=title, title_justify="left")
    _columns(table, ("",), ("FSDP2, AdamW", "dmuon", "Muon, two all-to-alls"))
    for part, name in _PARTS.items():
        if part == "total":
            table.add_section()
        table.add_row(name, *(f"{1e3 * time[way][part]:,.2f}" for way in ("adamw", "dmuon", "two_exchanges")))
    console.print(table)
    console.print(Text(f"figures: {machine['source']}"))


def show_layouts(layouts: Sequence[Layout], name: str, file: TextIO | None = None) -> None:
    """Print the best layouts for a number of ranks."""
    console = Console(file=file, highlight=False)
    table = Table(title=f"{name}: the layouts that fit, the fastest first", title_justify="left")
    _columns(table, ("mesh",), ("iteration, ms", "of it step", "peak, about"))
    table.add_column("limited by", overflow="fold")
    for layout in layouts:
        i = layout.iteration
        step = f"{1e3 * (i.orthogonalize + i.update):,.1f}"
        row = (layout.plan.mesh.text, f"{1e3 * i.total:,.1f}", step, _bytes(layout.peak), layout.limit)
        table.add_row(*row)
    console.print(table)


def _head(console: Console, report: dict[str, Any]) -> None:
    model, mesh, balance = report["model"], report["mesh"], report["balance"]
    newton_schulz, options = report["newton_schulz"], report["options"]
    table = Table(show_header=False, title=f"{model['name']} on {mesh['text']}", title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column()
    share = model["dedicated_parameters"] / model["parameters"]
    rows = [
        (
            "model",
            f"{model['parameters']:,} parameters; {model['matrices']:,} matrices in {model['groups']} groups "
            f"for Muon ({share:.1%}), the rest for AdamW",
        ),
        ("mesh", f"{mesh['ranks']:,} ranks, {mesh['slots']:,} data-parallel ones"),
        (
            "balance",
            f"the busiest owner has {balance['over_bound']:.3f} of the lower bound, "
            f"{balance['over_mean']:.3f} of the mean; {balance['owners']:,} of {balance['slots']:,} own "
            f"something. Of all ranks, the busiest has {balance['rank_over_bound']:.3f} of the lower bound, "
            f"{balance['rank_over_mean']:.3f} of the mean",
        ),
        (
            "Newton-Schulz",
            f"{newton_schulz['busiest_rank_operations'] / 1e12:,.4g}e12 operations a step, busiest rank; "
            f"{newton_schulz['mean_rank_operations'] / 1e12:,.4g}e12 in the mean; "
            f"{newton_schulz['teams']:,} matrices by teams",
        ),
        (
            "bytes of an element",
            f"weights {options['weight_bytes']}, gathered {options['compute_bytes']}, "
            f"reduced {options['reduce_bytes']}, momentum {options['momentum_bytes']}, Newton-Schulz and "
            f"updates {options['ns_bytes']}",
        ),
    ]
    if options["tp_plan"]:
        plan = ", ".join(f"{layer}={kind}" for layer, kind in options["tp_plan"].items())
        rows.append(("tensor parallelism", plan))
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def _traffic(console: Console, report: dict[str, Any]) -> None:
    traffic = report["traffic"]
    table = Table(title="Per step and rank: what dmuon moves", title_justify="left")
    _columns(table, ("phase", "mesh dim"), ("collectives", "mean bytes", "most bytes"))
    for phase in traffic["phases"]:
        table.add_row(phase["phase"], phase["dim"], *_moved(phase["collectives"], phase["bytes"]))
    table.add_section()
    for dim, spread in traffic["by_dim"].items():
        table.add_row("all", dim, "", _bytes(spread["mean"]), _bytes(spread["max"]))
    table.add_row("all", "all", *_moved(traffic["collectives"], traffic["bytes"]))
    console.print(table)


def _moved(collectives: dict[str, Any], nbytes: dict[str, Any]) -> tuple[str, str, str]:
    return f"{collectives['max']:,}", _bytes(nbytes["mean"]), _bytes(nbytes["max"])


def _memory(console: Console, report: dict[str, Any]) -> None:
    memory = report["memory"]
    table = Table(title="Memory per rank, without activations", title_justify="left")
    _columns(table, ("",), ("mean", "most", "least"))
    for name, spread in memory["rest"].items():
        if name == "total":
            table.add_section()
        if spread["max"]:
            table.add_row(name.replace("_", " "), *(_bytes(spread[key]) for key in ("mean", "max", "min")))
    if memory["updates"]["max"]:
        table.add_row(
            "updates after step", *(_bytes(memory["updates"][key]) for key in ("mean", "max", "min"))
        )
    table.add_row("peak, about", *(_bytes(memory["peak"][key]) for key in ("mean", "max", "min")))
    console.print(table)


def _limits(console: Console, report: dict[str, Any]) -> None:
    table = Table(title="What limits scaling: the most expensive matrices", title_justify="left")
    _columns(table, ("layer", "shape"), ("count", "of the work", "useful owners"))
    for row in report["limits"][:5]:
        table.add_row(
            row["layer"],
            "x".join(map(str, row["shape"])),
            f"{row['count']:,}",
            f"{row['share_of_operations']:.1%}",
            f"{row['useful_owners']:,}",
        )
    console.print(table)


def _comparison(console: Console, reports: Sequence[dict[str, Any]]) -> None:
    """A column for each mesh."""
    table = Table(title="Other meshes; of the rank that has most", title_justify="left")
    _columns(table, ("",), [report["mesh"]["text"].replace(",", "\n") for report in reports])
    rows: dict[str, Callable[[dict[str, Any]], str]] = {
        "ranks": lambda r: f"{r['mesh']['ranks']:,}",
        "balance of owners": lambda r: f"{r['balance']['over_bound']:.3f}",
        "busiest rank over mean": lambda r: f"{r['balance']['rank_over_mean']:.3f}",
        "Newton-Schulz, 1e12 operations": (
            lambda r: f"{r['newton_schulz']['busiest_rank_operations'] / 1e12:,.4g}"
        ),
        "iteration": lambda r: _seconds(r["time"]["dmuon"]["total"]) if r["time"] else "",
        "collectives": lambda r: f"{r['traffic']['collectives']['max']:,}",
        "bytes moved": lambda r: _bytes(r["traffic"]["bytes"]["max"]),
        "memory at rest": lambda r: _bytes(r["memory"]["rest"]["total"]["max"]),
        "memory at the peak": lambda r: _bytes(r["memory"]["peak"]["max"]),
    }
    for name, cell in rows.items():
        table.add_row(name, *map(cell, reports))
    console.print(table)


def _columns(table: Table, left: Sequence[str], right: Sequence[str]) -> None:
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right")


def _bytes(number: float) -> str:
    unit = 0
    while abs(number) >= 1024 and unit < len(_UNITS) - 1:
        number /= 1024
        unit += 1
    return f"{number:.0f} {_UNITS[unit]}" if unit == 0 else f"{number:.2f} {_UNITS[unit]}"


def _seconds(number: float) -> str:
    for scale, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "us")):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number * 1e9:.3g} ns"
