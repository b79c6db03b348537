"""What to change: sentences about one layout, and the best layouts for a number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .iteration import Iteration, Times
from .machine import Line, Machine
from .mesh import Mesh
from .model import Model, PlanError
from .plan import Options, Plan, plan

_WAIT = 0.02  # of an iteration: less is not worth a sentence


@dataclass(frozen=True)
class Layout:
    """A layout that fits, and what an iteration takes on it."""

    plan: Plan
    iteration: Iteration
    limit: str

    @property
    def peak(self) -> int:
        """Bytes of the rank that has most, without activations."""
        return int(self.plan.peak.max())


def layouts(
    model: Model, ranks: int, machine: Machine, options: Options, tokens: float, activations: float = 0.0
) -> list[Layout]:
    """All layouts of powers of two (and what is left) that fit in memory, the fastest first.

    Each takes the same tokens. activations: GiB to leave free for them.

    Raises:
        PlanError: if none fits.
    """
    found = []
    least = float("inf")
    room = 2**30 * (machine.memory - activations)
    for mesh in _meshes(model, ranks, int(machine.gpus)):
        kept = model.numel * (2 * options.dtypes.weight.itemsize + options.dtypes.momentum.itemsize)
        if kept / (mesh.shard * mesh.tp) > 2 * room:  # not worth a closer look: momentum is spread further
            least = min(least, kept / (mesh.shard * mesh.tp))
            continue
        each = plan(model, mesh, options)
        peak = int(each.peak.max())
        least = min(least, peak)
        if peak <= room:
            iteration = Times(each, machine, tokens).dmuon()
            found.append(Layout(each, iteration, _limit(iteration)))
    if not found:
        raise PlanError(
            f"no layout of {model.name} on {ranks} ranks fits in {room / 2**30:.0f} GiB: the least is "
            f"{least / 2**30:.0f} GiB. Give more ranks, or another --machine"
        )
    return sorted(found, key=lambda layout: layout.iteration.total)


def _meshes(model: Model, ranks: int, gpus: int) -> Iterator[Mesh]:
    """Rows of 8 ranks and more; TP inside a node; experts over a power of two of a row."""
    experts = model.with_stacks()
    counts = [param.shape[0] for param in experts.dedicated if param.is_stack]
    for tp in _powers(min(gpus, ranks)):
        for shard in _powers(ranks // tp):
            if ranks % (tp * shard) or shard * tp < min(8, ranks):
                continue
            replicate = ranks // tp // shard
            for ep in _powers(min(shard, *counts)) if counts else [None]:
                if ep is not None and (shard % ep or (ep < min(8, shard) and ep > 1)):
                    continue
                text = {"replicate": replicate, "shard": shard, "ep": ep, "tp": tp}
                yield Mesh(
                    shard,
                    replicate,
                    tp,
                    ep=ep,
                    text=",".join(
                        f"{name}={size}"
                        for name, size in text.items()
                        if size and (size > 1 or name == "shard" or name == "ep")
                    ),
                )


def _powers(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length())]


def _limit(iteration: Iteration) -> str:
    """The largest part of an iteration beside its products."""
    names = {
        "parallel": "activations of tp, ep",
        "exposed": "exposed collectives",
        "orthogonalize": "Newton-Schulz",
        "update": "states",
    }
    largest = max(names, key=lambda name: getattr(iteration, name))
    return f"{names[largest]} ({getattr(iteration, largest) / iteration.total:.0%})"


def sentences(times: Times) -> list[str]:
    """What is wrong with a layout, and the way out."""
    said, mesh, iteration = [], times.plan.mesh, times.dmuon()
    chain = times.machine.ring(times.row, 1).latency
    blocks = [times.block(names, dmuon=True) for names in times.names]
    shown = max(blocks, key=lambda block: block.gather - block.forward)
    if iteration.exposed > _WAIT * iteration.total and shown.gather > shown.forward + shown.waits:
        shorter = mesh.shard
        while shorter > 8 and times.machine.ring(_row(times, shorter), 1).latency > shown.forward / 2:
            shorter //= 2
        why = f"{1e3 * chain:.2f} ms of them until the first byte has passed the {mesh.shard} ranks of a row"
        out = (
            f"Use rows of {shorter} (replicate={mesh.replicate * mesh.shard // shorter},shard={shorter})"
            if shorter < mesh.shard and chain > shown.forward / 2
            else "Give each rank more tokens, or use reshard_after_forward=False where memory allows"
        )
        said.append(
            f"gathers of {1e3 * shown.gather:.2f} ms ({why}) cannot hide behind forwards of "
            f"{1e3 * shown.forward:.2f} ms: {1e3 * iteration.exposed:.1f} ms an iteration are exposed. {out}"
        )
    idle = mesh.ranks - len(times.plan.loads)
    if idle and iteration.orthogonalize > _WAIT * iteration.total:
        way = (
            "More tensor parallelism with teams of its ranks would share matrices"
            if mesh.tp > 1
            else "Tensor parallelism with Muon(tp_distributed_gram=True) would share matrices"
        )
        said.append(
            f"{idle:,} of {mesh.ranks:,} ranks orthogonalize nothing and wait "
            f"{1e3 * iteration.orthogonalize:.1f} ms in step(), as long as the busiest takes. {way}"
        )
    with_teams = _with_teams(times)
    if (
        with_teams < iteration.orthogonalize - _WAIT * iteration.total
        or with_teams < iteration.orthogonalize / 2
    ):
        before, after = 1e3 * iteration.orthogonalize, 1e3 * with_teams
        said.append(
            f"teams of {mesh.tp} (--teams beneficial, Muon(tp_distributed_gram=True)) would take "
            f"Newton-Schulz of the busiest rank from {before:.1f} to {after:.1f} ms"
        )
    for count in sorted({param.shape[0] for param in times.plan.stacks}):
        without = sum(mesh.held(count, shard) == 0 for shard in range(mesh.shard))
        if without:
            said.append(
                f"stacks of {count} experts leave {without:,} of the {mesh.shard:,} ranks of a row without "
                f"any. Use rows of at most {count} ranks, and replicas (replicate=R,shard=N)"
            )
    return said


def _with_teams(times: Times) -> float:
    """Seconds of Newton-Schulz on the busiest rank with teams; those of now if nothing can change."""
    each = times.plan
    if each.options.teams != "never" or each.mesh.tp == 1:
        return times.orthogonalize()
    options = replace(each.options, teams="beneficial")
    tokens = times.tokens / each.mesh.tp
    return Times(plan(each.model, each.mesh, options), times.machine, tokens).orthogonalize()


def _row(times: Times, size: int) -> Line:
    return times.machine.line(size, times.plan.mesh.tp)
