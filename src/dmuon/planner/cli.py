"""`python -m dmuon plan`: the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .advice import layouts
from .cut import parse as parse_tp_plan
from .iteration import Times
from .machine import MACHINES, Machine, machine_of
from .mesh import Mesh
from .model import Model, PlanError, choose_by_pattern
from .plan import Options, Plan, plan
from .registry import CONFIGS
from .report import SCHEMA, report
from .source import load
from .traffic import Dtypes

_DTYPES = {
    str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
}
_BEST = 8  # layouts to show
_EXAMPLES = f"""examples:
  python -m dmuon plan --model llama-3-70b --mesh replicate=16,shard=8,tp=8 --machine h100-8
  python -m dmuon plan --model deepseek-v3 --ranks 2048 --machine h100-8       # which mesh?
  python -m dmuon plan --model my_project.models:build --mesh dp=64 --compare replicate=8,shard=8
  python -m dmuon plan --model path/to/model/ --mesh ddp=8 --json

models by name: {", ".join(CONFIGS)}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        return _plan(args)
    except PlanError as error:
        print(f"{parser.prog} plan: error: {error}", file=sys.stderr)
        return 2


def _plan(args: argparse.Namespace) -> int:
    machine = _machine(args)
    options = _options(args)
    model = choose_by_pattern(load(args.model), args.include, args.exclude)
    if args.mesh is None:
        return _search(args, model, machine, options)
    mesh = Mesh.parse(args.mesh)
    meshes = [mesh, *(Mesh.parse(text) for text in args.compare)]
    if args.ranks is not None and args.ranks != mesh.ranks:
        raise PlanError(f"mesh {mesh.text} has {mesh.ranks} ranks, not {args.ranks}")
    plans = [plan(model, each, options) for each in meshes]
    times = [Times(each, machine, args.tokens) if machine else None for each in plans]
    first, *others = [report(each, its) for each, its in zip(plans, times, strict=True)]
    if args.picture is not None:
        _import("matplotlib", "--picture")
        from .picture import draw

        draw(plans, [first, *others], args.picture)
    if args.json:
        content = {"schema": SCHEMA, **first, "compare": others}
        if args.matrices:
            content["matrices"] = _matrices(plans[0])
        json.dump(content, sys.stdout, indent=2)
        print()
    else:
        _import("rich", "python -m dmuon plan without --json")
        from .text import show

        show(first, others)
        if args.matrices:
            _print_matrices(plans[0])
    return 0


def _import(package: str, what: str) -> None:
    try:
        __import__(package)
    except ImportError as error:
        raise PlanError(f"{what} needs {package}: pip install 'dmuon[plan]'") from error


def _options(args: argparse.Namespace) -> Options:
    compute = args.compute_dtype
    return Options(
        dtypes=Dtypes(
            weight=_DTYPES[args.weight_dtype],
            compute=_DTYPES[compute],
            reduce=_DTYPES[args.reduce_dtype or compute],
            momentum=_DTYPES[args.momentum_dtype],
            newton_schulz=_DTYPES[args.ns_dtype],
        ),
        reshard=args.reshard,
        ns_steps=args.ns_steps,
        ns_algorithm=args.ns_algorithm,
        teams=args.teams,
        tp_plan=parse_tp_plan(args.tp_plan),
    )


def _machine(args: argparse.Namespace) -> Machine | None:
    settings = [*args.set, *([f"tflops={args.tflops}"] if args.tflops is not None else [])]
    if args.machine is None:
        if settings:
            raise PlanError(f"--set and --tflops change a --machine: one of {', '.join(MACHINES)}")
        return None
    return machine_of(args.machine, settings)


def _search(args: argparse.Namespace, model: Model, machine: Machine | None, options: Options) -> int:
    """The best layouts for a number of ranks."""
    if args.ranks is None or machine is None:
        raise PlanError("give a --mesh; or --ranks and --machine, and the best layouts are looked for")
    best = layouts(model, args.ranks, machine, options, args.tokens, args.activations)[:_BEST]
    if args.json:
        found = [
            {
                "mesh": layout.plan.mesh.text,
                "iteration": {**vars(layout.iteration), "total": layout.iteration.total},
                "peak": layout.peak,
                "limit": layout.limit,
            }
            for layout in best
        ]
        json.dump({"schema": SCHEMA, "layouts": found}, sys.stdout, indent=2)
        print()
        return 0
    _import("rich", "python -m dmuon plan without --json")
    from .text import show_layouts

    show_layouts(best, f"{model.name} on {args.ranks} ranks of {machine.name}")
    return 0


def _matrices(each: Plan) -> list[dict[str, Any]]:
    """Where every matrix goes."""
    return [
        {
            "name": matrix.param.name,
            "shape": list(matrix.param.shape),
            "owner": {
                "shard": matrix.slot % each.mesh.shard,
                "replicate": matrix.slot // each.mesh.shard,
                "tp": matrix.share.tp_owner if matrix.share.is_cut else None,
            },
        }
        for matrix in each.matrices
    ]


def _print_matrices(each: Plan) -> None:
    for matrix in _matrices(each):
        owner = ", ".join(f"{dim} {place}" for dim, place in matrix["owner"].items() if place is not None)
        print(f"{matrix['name']}  {'x'.join(map(str, matrix['shape']))}  {owner}")


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


_positive.__name__, _count.__name__ = "positive number", "count"  # as argparse calls them in errors


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dmuon", description="dmuon's tools.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "plan",
        help="what a model costs on a mesh",
        description=(
            "Who owns which matrix on a mesh, and what follows: balance, time of Newton-Schulz, bytes moved "
            "and memory. Uses the code that assigns owners at run time; needs no GPU and starts no process "
            "group."
        ),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_what(command)
    _add_settings(command)
    _add_output(command)
    return parser


def _add_what(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "--model",
        required=True,
        help="a name (see below); module:function that returns a model; or a config.json, a .safetensors "
        "file or index, or a directory with them",
    )
    add("--mesh", help="dp=N, replicate=R,shard=N or ddp=N; with ,tp=T or without; the first two with ,ep=E")
    add("--compare", metavar="MESH", action="append", default=[], help="another mesh; may be repeated")
    add(
        "--ranks",
        type=_count,
        help="without --mesh, look for the best of so many ranks",
    )
    _add_pattern(command, "--include", "dedicate matrices with such a name too; may be repeated")
    _add_pattern(command, "--exclude", "do not dedicate parameters with such a name; may be repeated")


def _add_pattern(command: argparse.ArgumentParser, name: str, text: str) -> None:
    command.add_argument(name, metavar="REGEX", action="append", default=[], help=text)


def _add_settings(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    dtypes = tuple(_DTYPES)
    add("--weight-dtype", choices=dtypes, default="float32", help="of weights at rest (default: float32)")
    add("--compute-dtype", choices=dtypes, default="bfloat16", help="of gathered weights (default: bfloat16)")
    add("--reduce-dtype", choices=dtypes, help="of gradients on their way (default: the compute dtype)")
    add("--momentum-dtype", choices=dtypes, default="float32", help="of momenta (default: float32)")
    add(
        "--ns-dtype",
        choices=dtypes,
        default="bfloat16",
        help="of Newton-Schulz and updates (default: bfloat16)",
    )
    add(
        "--reshard",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reshard_after_forward (default: yes)",
    )
    add("--ns-steps", type=_count, default=5, help="Newton-Schulz iterations (default: 5)")
    add(
        "--ns-algorithm",
        choices=("direct", "gram", "auto"),
        default="direct",
        help='for the time estimate (default: "direct", which bfloat16 takes)',
    )
    add(
        "--teams",
        choices=("never", "beneficial", "always"),
        default="never",
        help="whose Newton-Schulz TP ranks share: tp_distributed_gram_policy (default: never)",
    )
    add("--machine", metavar="NAME", help=f"for times: {', '.join(MACHINES)}")
    add(
        "--set",
        metavar="VALUE=NUMBER",
        action="append",
        default=[],
        help="a figure of the machine: gpus (in a node), tflops, tflops32, memory (GiB), memory_rate, "
        "inside, between (1e9 bytes a second), hop_inside, hop_between, launch (microseconds)",
    )
    add("--tflops", type=_positive, help="the same as --set tflops=: what your GPUs reach")
    add("--tokens", type=_count, default=8192, help="in an iteration, for each rank (default: 8192)")
    add("--activations", type=float, default=0.0, metavar="GIB", help="to leave free, without --mesh")
    add(
        "--tp-plan",
        default="",
        metavar="PLAN",
        help="how tensor parallelism cuts layers, where it differs from the usual: LAYER=KIND,..., KIND of "
        "rows, columns, replicate, none",
    )


def _add_output(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--json", action="store_true", help="print JSON")
    add("--matrices", action="store_true", help="also print the owner of every matrix")
    add("--picture", metavar="FILE", type=Path, help="draw loads, traffic and memory (.png, .svg, .pdf)")
