"""The picture of README: the same loss on every layout as on one process, and the time beside AdamW.

    python benchmarks/evidence.py           # trains on every layout, then draws
    python benchmarks/evidence.py --draw    # draws only, from what was measured before

Left: `examples/train_gpt.py` on one process and on four, on every kind of mesh, with the same initial weights
and batches. Writes `results/layouts.json`. Right: the iteration times of `step.py` on its first mesh, from
`results/step.json`. The picture is `docs/images/evidence.svg`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.append(str(ROOT / "examples"))

from machine import describe  # noqa: E402
from metrics import curve, read_metrics  # noqa: E402
from report import Report  # noqa: E402
from spread import quartiles  # noqa: E402

LAYOUTS = {  # as the picture calls them, and as train_gpt.py does
    "FSDP2": "dp=4",
    "HSDP": "replicate=2,dp=2",
    "DDP": "ddp=4",
    "FSDP2 + TP": "dp=2,tp=2",
    "HSDP + TP": "replicate=2,dp=1,tp=2",
    "DDP + TP": "ddp=2,tp=2",
}
ONE = "one process"
MODEL = ["--width=64", "--layers=2", "--seq-len=64", "--batch-size=8"]  # of train_gpt.py; quick on a CPU

WIDTH, HEIGHT, TOP, BOTTOM = 940, 360, 62, 306
STYLE = """
  text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
  text { font-size: 13px; fill: #1f2933; }
  .title { font-weight: 600; font-size: 15px; }
  .small { font-size: 12px; fill: #52606d; }
  .strong { font-weight: 600; }
  .grid { stroke: #dfe4ea; } .axis { stroke: #9aa5b1; } .error { stroke: #1f2933; }
  .dmuon { fill: #1f5fa8; } .adamw { fill: #c2571a; } .other { fill: #8a949e; }
  .line { fill: none; stroke-width: 2; } .dmuonline { stroke: #1f5fa8; } .adamwline { stroke: #c2571a; }
  .mark { fill: #ffffff; stroke: #1f5fa8; stroke-width: 1.6; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4e7eb; } .small { fill: #a9b4c0; }
    .grid { stroke: #39424d; } .axis { stroke: #7b8794; } .error { stroke: #e4e7eb; }
    .dmuon { fill: #5b9fe8; } .adamw { fill: #e58a4e; } .other { fill: #77828d; }
    .dmuonline { stroke: #5b9fe8; } .adamwline { stroke: #e58a4e; }
    .mark { fill: #14181f; stroke: #5b9fe8; }
  }
"""


# Measuring


def losses(mesh: str | None, optimizer: str, steps: int, extra: list[str]) -> list[float]:
    """The loss of each step of a run of `train_gpt.py`; on one process, if there is no mesh."""
    with tempfile.TemporaryDirectory() as out:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"] if mesh else []
        command = [sys.executable, *launcher, str(ROOT / "examples" / "train_gpt.py"), "--device=cpu"]
        command += [
            f"--optimizer={optimizer}",
            f"--steps={steps}",
            f"--out={out}",
            "--overwrite",
            *MODEL,
            *extra,
        ]
        command += [f"--mesh={mesh}"] if mesh else []
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return curve(read_metrics(Path(out) / "metrics.jsonl"), "loss")[1]


def measure(steps: int, extra: list[str]) -> dict[str, Any]:
    """The losses of every layout, of one process, and of AdamW."""
    return {
        "command": " ".join(["python", "benchmarks/evidence.py", *sys.argv[1:]]),
        "machine": describe(),
        "adamw": losses(None, "adamw", steps, extra),
        "dmuon": {
            ONE: losses(None, "dmuon", steps, extra),
            **{name: losses(mesh, "dmuon", steps, extra) for name, mesh in LAYOUTS.items()},
        },
    }


# Drawing


def text(x: float, y: float, words: str, css: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{css}" text-anchor="{anchor}">{escape(words)}</text>'


def stroke(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def loss_panel(measured: dict[str, Any], left: float, right: float) -> list[str]:
    """One process as a line, and on it the layouts in turn, as circles; AdamW as a line."""
    one, adamw = measured["dmuon"][ONE], measured["adamw"]
    layouts = [measured["dmuon"][name] for name in LAYOUTS]
    apart = max(abs(a - b) for losses in layouts for a, b in zip(losses, one, strict=True))
    low, high = min(one) - 0.1, max(*one, *adamw) + 0.1
    end = right - 78  # room for the names

    def x(step: int) -> float:
        return left + (end - left) * (step - 1) / (len(one) - 1)

    def y(loss: float) -> float:
        return TOP + (BOTTOM - TOP) * (high - loss) / (high - low)

    parts = [text(left - 34, 24, "The same loss as one process, on every layout", "title")]
    parts += [
        text(left - 34, 43, "line: 1 process; circles: 4, with FSDP2, HSDP, DDP, and each with TP", "small")
    ]
    for loss in range(math.ceil(low), math.floor(high) + 1):
        parts += [
            stroke(left, y(loss), end, y(loss), "grid"),
            text(left - 10, y(loss) + 4, str(loss), "small", "end"),
        ]
    for step in range(0, len(one) + 1, len(one) // 4):
        parts.append(text(x(max(step, 1)), BOTTOM + 18, str(max(step, 1)), "small", "middle"))
    parts.append(text((left + end) / 2, BOTTOM + 36, "step", "small", "middle"))
    for losses, css in ((adamw, "adamwline"), (one, "dmuonline")):
        points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in enumerate(losses, 1))
        parts.append(f'<polyline points="{points}" class="line {css}"/>')
    for step in range(2, len(one) + 1, 3):
        losses = layouts[step // 3 % len(layouts)]
        parts.append(f'<circle cx="{x(step):.1f}" cy="{y(losses[step - 1]):.1f}" r="3.4" class="mark"/>')
    middle, side = (y(adamw[-1]) + y(one[-1])) / 2, math.copysign(1, adamw[-1] - one[-1])
    apart_y = max(8.0, abs(y(adamw[-1]) - y(one[-1])) / 2)  # the names do not cover each other
    parts.append(text(end + 8, middle + 4 - side * apart_y, "AdamW", "adamw strong"))
    parts.append(text(end + 8, middle + 4 + side * apart_y, "dmuon", "dmuon strong"))
    words = f"largest difference in {len(one)} steps: {apart:.0e}".replace("e-0", "e-")
    parts.append(text(end - 6, TOP + 16, words, "strong", "end"))
    return parts


def time_panel(result: dict[str, Any], left: float, right: float) -> list[str]:
    """A bar for each optimizer on the first mesh: its iteration over the baseline's."""
    report = Report(result)
    mesh = report.meshes[0]
    rows = [(row, quartiles(ratios)) for row in mesh["peers"] if (ratios := report.ratios(mesh, row))]
    rows.sort(key=lambda pair: (pair[0]["file"] != result["baseline"], pair[1][1]))
    start = left + 142
    scale = (right - 52 - start) / max(high for _, (_, _, high) in rows)
    parts = [text(left, 24, "Time of an iteration, FSDP2 + AdamW = 1", "title")]
    parts += [text(left, 43, f"{mesh['mesh']}, gloo on a CPU; medians and quartiles", "small")]
    height = (BOTTOM - TOP) / len(rows)
    for place, (row, (low, middle, high)) in enumerate(rows):
        y = TOP + height * (place + 0.5)
        css = {"fsdp2_adamw": "adamw", "dmuon_muon": "dmuon", "dmuon_bfloat16": "dmuon"}.get(
            row["file"], "other"
        )
        parts.append(text(start - 10, y + 4, row["name"], "strong" if css == "dmuon" else "", "end"))
        size = f'width="{scale * middle:.1f}" height="{0.56 * height:.1f}"'
        parts.append(f'<rect x="{start:.1f}" y="{y - 0.28 * height:.1f}" {size} rx="2" class="{css}"/>')
        if high > low:
            parts.append(stroke(start + scale * low, y, start + scale * high, y, "error"))
        parts.append(text(start + scale * high + 7, y + 4, f"{middle:.2f}".replace("1.00", "1"), "strong"))
    parts.append(stroke(start + scale, TOP, start + scale, BOTTOM, "axis"))
    return parts


def draw(measured: dict[str, Any], result: dict[str, Any]) -> str:
    """The picture as SVG; light or dark as the reader has it."""
    title = "The same loss on every layout as on one process, and the time of an iteration beside AdamW"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
            f'height="{HEIGHT}" role="img" aria-labelledby="title">',
            f'<title id="title">{title}</title>',
            f"<style>{STYLE}</style>",
            *loss_panel(measured, 44, 500),
            *time_panel(result, 540, WIDTH),
            "</svg>",
            "",
        ]
    )


def main() -> None:
    """Measure, unless told otherwise, and draw."""
    parser = argparse.ArgumentParser(description="Other options go to train_gpt.py.", allow_abbrev=False)
    parser.add_argument("--draw", action="store_true", help="draw only")
    parser.add_argument("--steps", type=int, default=100, help="of each run")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of the measured files")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "images" / "evidence.svg")
    args, extra = parser.parse_known_args()
    layouts = args.results / "layouts.json"
    if not args.draw:
        lines = json.dumps(measure(args.steps, extra)).replace("], ", "],\n")  # a line a run
        layouts.write_text(lines + "\n")
    result = json.loads((args.results / "step.json").read_text())
    args.picture.write_text(draw(json.loads(layouts.read_text()), result), encoding="utf-8")


if __name__ == "__main__":
    main()
