"""A plan in numbers: the one dict from which text, JSON and pictures are made."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import Any

import torch

from .advice import sentences
from .cut import described
from .iteration import Times
from .memory import Rest
from .plan import Plan
from .traffic import PHASES

SCHEMA = 3


def report(plan: Plan, times: Times | None = None) -> dict[str, Any]:
    """Everything about a plan, by the schema of docs/planner.md. Bytes, seconds, and plain counts."""
    return {
        "mesh": _mesh(plan),
        "model": _model(plan),
        "options": _options(plan),
        "balance": _balance(plan),
        "newton_schulz": _newton_schulz(plan),
        "time": _time(times) if times is not None else None,
        "traffic": _traffic(plan),
        "memory": _memory(plan),
        "limits": _limits(plan),
        "notes": _notes(plan),
    }


def _mesh(plan: Plan) -> dict[str, Any]:
    mesh = plan.mesh
    return {
        "text": mesh.text,
        "ranks": mesh.ranks,
        "slots": mesh.slots,
        "shard": mesh.shard,
        "replicate": mesh.replicate,
        "tp": mesh.tp,
        "ep": mesh.ep,
        "ddp": mesh.ddp,
    }


def _model(plan: Plan) -> dict[str, Any]:
    model, size = plan.model, plan.options.dtypes.weight.itemsize
    elements = sum(param.numel for param in model.dedicated)
    stacked = sum(math.prod(param.shape[:-2]) for param in plan.stacks)
    return {
        "name": model.name,
        "parameters": model.numel,
        "matrices": len(plan.matrices) + stacked,
        "stacks": len(plan.stacks),
        "dedicated_parameters": elements,
        "base_parameters": model.numel - elements,
        "dedicated_bytes": size * elements,
        "groups": len(plan.groups[0]),
    }


def _options(plan: Plan) -> dict[str, Any]:
    options, dtypes = plan.options, plan.options.dtypes
    return {
        "weight_bytes": dtypes.weight.itemsize,
        "compute_bytes": dtypes.compute.itemsize,
        "reduce_bytes": dtypes.reduce.itemsize,
        "momentum_bytes": dtypes.momentum.itemsize,
        "ns_bytes": dtypes.newton_schulz.itemsize,
        "reshard_after_forward": options.reshard,
        "ns_steps": options.ns_steps,
        "ns_algorithm": options.ns_algorithm,
        "teams": options.teams,
        "tp_plan": described(plan.model, options.tp_plan) if plan.mesh.tp > 1 else {},
    }


def _balance(plan: Plan) -> dict[str, Any]:
    """`over_bound` of 1 is perfect: see `dmuon.ownership.lower_bound`. Of owners, that is of data-parallel
    ranks, as the assignment sees them; and of all ranks, with what they really compute."""
    busiest = max(load.operations for load in plan.loads.values())
    mean = sum(load.operations for load in plan.loads.values()) / plan.mesh.ranks
    held = {(m.param.structure, m.param.shape) for m in plan.matrices}
    largest = max(map(plan.operations_of, held), default=0)
    return {
        "over_bound": plan.balance,
        "over_mean": plan.over_mean,
        "owners": len({matrix.slot for matrix in plan.matrices}),
        "slots": plan.mesh.slots,
        "rank_over_bound": busiest / max(mean, largest),
        "rank_over_mean": busiest / mean,
        "busy_ranks": len(plan.loads),
        "ranks": plan.mesh.ranks,
    }


def _newton_schulz(plan: Plan) -> dict[str, Any]:
    loads = plan.loads.values()
    return {
        "busiest_rank_operations": max(load.operations for load in loads),
        "mean_rank_operations": sum(load.operations for load in loads) / plan.mesh.ranks,
        "teams": sum(matrix.share.team is not None for matrix in plan.matrices),
    }


def _time(times: Times) -> dict[str, Any]:
    """Of an iteration on a machine, by part; and what to change."""
    ways = {"adamw": times.adamw(), "dmuon": times.dmuon(), "two_exchanges": times.two_exchanges()}
    parts = {name: {**vars(way), "total": way.total} for name, way in ways.items()}
    tokens = times.tokens / times.plan.mesh.tp
    return {"machine": vars(times.machine), "tokens": tokens, **parts, "advice": sentences(times)}


def _dim(plan: Plan, phase: str) -> str:
    """The mesh dim over which a phase communicates."""
    if phase in ("exchange", "publish_exchange", "sum_copies", "team_reduce", "team_gather"):
        return "tp"
    if phase in ("reduce_replicas", "publish"):
        return plan.mesh.column_name
    return plan.mesh.row_name


def _spread(values: torch.Tensor) -> dict[str, Any]:
    """Over the ranks."""
    flat = values.flatten()
    return {"max": int(flat.max()), "mean": int(flat.sum()) / len(flat), "min": int(flat.min())}


def _traffic(plan: Plan) -> dict[str, Any]:
    moves = plan.moves  # [slots, tp, phases, 2]
    phases = [
        {
            "phase": phase,
            "dim": _dim(plan, phase),
            "collectives": _spread(moves[:, :, index, 0]),
            "bytes": _spread(moves[:, :, index, 1]),
        }
        for index, phase in enumerate(PHASES)
        if moves[:, :, index, 0].any()
    ]
    dims: dict[str, list[int]] = defaultdict(list)
    for index, phase in enumerate(PHASES):
        if moves[:, :, index, 0].any():
            dims[_dim(plan, phase)].append(index)
    return {
        "phases": phases,
        "by_dim": {dim: _spread(moves[:, :, chosen, 1].sum(2)) for dim, chosen in dims.items()},
        "collectives": _spread(moves[..., 0].sum(2)),
        "bytes": _spread(moves[..., 1].sum(2)),
    }


def _memory(plan: Plan) -> dict[str, Any]:
    rest, peak = plan.rest, plan.peak
    at = int(peak.flatten().argmax())
    kinds = {name: _spread(rest[..., index]) for index, name in enumerate(Rest._fields)}
    work = plan.work[at % plan.mesh.tp]
    step = plan.step_work.get((at // plan.mesh.tp, at % plan.mesh.tp), 0)
    return {
        "rest": {**kinds, "total": _spread(rest.sum(2))},
        "updates": _spread(plan.updates),
        "peak": _spread(peak),
        "peak_rank": at,
        "peak_rank_work": {**work._asdict(), "step": step},
    }


def _limits(plan: Plan) -> list[dict[str, Any]]:
    """The kinds of matrices, the most expensive first. More owners than `useful_owners` cannot make a step
    shorter: one owner's time for this matrix is then the step's."""
    costs = Counter((m.param.shape, _layer(m.param.name)) for m in plan.matrices)
    total, bound = sum(matrix.cost for matrix in plan.weighed), plan.bound
    by_shape = {m.param.shape: w.cost for m, w in zip(plan.matrices, plan.weighed, strict=True)}
    rows = [
        {
            "layer": layer,
            "shape": list(shape),
            "count": count,
            "share_of_operations": count * by_shape[shape] / total,
            "share_of_bound": by_shape[shape] / bound,
            "useful_owners": total // by_shape[shape],
        }
        for (shape, layer), count in costs.items()
    ]
    return sorted(rows, key=lambda row: (row["useful_owners"], -row["count"], row["layer"]))


def _layer(name: str) -> str:
    """The last names of the layer, without numbers: "layers.3.mlp.up_proj.weight" is an "mlp.up_proj"."""
    parts = [part for part in name.split(".")[:-1] if not part.isdigit()]
    return ".".join(parts[-2:])


def _notes(plan: Plan) -> list[str]:
    notes = list(plan.model.notes)
    mesh = plan.mesh
    idle = mesh.slots - len({matrix.slot for matrix in plan.matrices})
    if idle:
        notes.append(f"{idle} of {mesh.slots} data-parallel ranks own no matrix and wait in step()")
    empty = sum(0 in matrix.share.pieces for matrix in plan.matrices)
    if empty:
        notes.append(f"tp={mesh.tp} does not fit {empty} matrices: some ranks have an empty piece")
    if mesh.tp > 1:
        whole = [m.param for m in plan.matrices if not m.share.is_cut]
        if len(whole) == len(plan.matrices):
            notes.append("the tensor-parallel plan cuts no matrix; see --tp-plan")
        elif whole:
            kinds = ", ".join(sorted({_layer(param.name) for param in whole}))
            notes.append(f"{len(whole)} matrices are not cut, and each TP rank repeats their work: {kinds}")
    return notes
