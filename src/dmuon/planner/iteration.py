"""What an iteration takes on a machine: three ways, part by part, in seconds. About: see docs/planner.md.

A block's products take 6 operations for each weight and token. Its collectives are started when the block
before it begins, as the engine and FSDP2 do, and share the links one after the other. What computation then
waits for is exposed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ..optim.team import team_elements_of, team_operations
from ..ownership import assign
from . import traffic
from .cut import cut_dim
from .machine import Cost, Machine, together
from .memory import Rest
from .model import Parameter
from .plan import Plan, Planned
from .traffic import NOBODY, Group


@dataclass(frozen=True)
class Block:
    """Seconds of one block of the model.

    Attributes:
        forward: its computation; that of backward is twice as long.
        waits: of it, what travels in the midst of it, in forward: of tensor and expert parallelism.
        gather, reduce: its collectives, each time they run.
        publish: in front of the gather in forward.
    """

    forward: float
    waits: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0
    publish: float = 0.0


@dataclass(frozen=True)
class Iteration:
    """Seconds of one iteration.

    Attributes:
        compute: products of forward and backward.
        parallel: what tensor and expert parallelism send in the midst of them.
        exposed: collectives that no computation hides.
        orthogonalize: Newton-Schulz of the busiest rank, in the step.
        exchange: collectives in the step.
        update: reading and writing weights and states, in the step.
    """

    compute: float
    parallel: float
    exposed: float
    orthogonalize: float = 0.0
    exchange: float = 0.0
    update: float = 0.0

    @property
    def total(self) -> float:
        """Of all parts."""
        return sum(vars(self).values())


def exposed(blocks: Sequence[Block], *, reshard: bool) -> float:
    """Seconds that computation waits for collectives in a forward and a backward.

    The computation of a block waits for its gather, and in backward for the reduction before the last.
    """
    now = links = 0.0

    def put(seconds: float, at: float) -> float:
        nonlocal links
        links = max(links, at) + seconds if seconds else links
        return links if seconds else at

    def gathered(block: Block, *, forward: bool, at: float) -> float:
        return put(block.publish + block.gather if forward else block.gather * reshard, at)

    last = len(blocks) - 1
    ready = gathered(blocks[0], forward=True, at=now)
    for index, block in enumerate(blocks):
        now = max(now, ready)
        if index < last:
            ready = gathered(blocks[index + 1], forward=True, at=now)
        now += block.forward + block.waits
    ready = gathered(blocks[last], forward=False, at=now)
    before = reduced = 0.0
    for index in range(last, -1, -1):
        now = max(now, ready, before)
        if index:
            ready = gathered(blocks[index - 1], forward=False, at=now)
        before = reduced
        if index < last:
            reduced = put(blocks[index + 1].reduce, now)
        now += 2 * (blocks[index].forward + blocks[index].waits)
    end = max(now, put(blocks[0].reduce, now), reduced)
    return end - sum(3 * (block.forward + block.waits) for block in blocks)


class Times:
    """A plan on a machine.

    Attributes:
        tokens: of each rank; the ranks of a TP group share theirs.
    """

    def __init__(self, plan: Plan, machine: Machine, tokens: float) -> None:
        mesh = plan.mesh
        self.plan, self.machine, self.tokens = plan, machine, tokens * mesh.tp
        self.row = machine.line(mesh.shard, mesh.tp)
        self.column = machine.line(mesh.replicate, mesh.tp * mesh.shard)
        self.tp = machine.line(mesh.tp, 1)
        ep = mesh.ep or 1
        self.experts = machine.line(ep, mesh.tp)
        self.of_experts = machine.line(mesh.shard // ep, mesh.tp * ep)  # those that FSDP2 cuts experts over
        self._base: dict[str | None, list[Parameter]] = defaultdict(list)
        for param in plan.model.params:
            self._base[param.block].append(param)
        self._owned = {id(matrix.param) for matrix in plan.matrices}
        names = dict.fromkeys(matrix.param.block for matrix in plan.matrices)
        self._groups = dict(zip(names, zip(*plan.groups, strict=True), strict=True))  # of each, by TP rank
        # In the order of the model; what is in no block is one with the last.
        inside = [block for block in self._base if block is not None]
        self.names: list[list[str | None]] = [[block] for block in inside] or [[None]]
        if inside and None in self._base:
            self.names[-1].append(None)

    # Computation

    def block(self, names: Sequence[str | None], *, dmuon: bool) -> Block:
        """A block's seconds, with dmuon or with FSDP2 alone."""
        params = [param for name in names for param in self._base[name]]
        compute = self.plan.options.dtypes.compute
        weights = sum(
            self._piece(p) * (self.plan.model.active if p.is_expert else 1) for p in map_products(params)
        )
        base = [p for p in params if not (dmuon and id(p) in self._owned)]
        gathers, reduces = self._fsdp(base)
        publish: list[Cost] = []
        for name in names if dmuon else ():
            if name not in self._groups:
                continue
            more = self._costs(self._groups[name])
            gathers.append(more["gather"])
            reduces += [more["reduce"], more["reduce_replicas"], more["sum_copies"], more["exchange"]]
            publish += [more["publish"], more["publish_exchange"]]
        return Block(
            2 * weights * self.tokens / self.machine.rate(compute),
            self._waits(params),
            together(gathers),
            together(reduces),
            sum(map(sum, publish)),
        )

    def _piece(self, param: Parameter) -> int:
        """Elements of a parameter that one TP rank has."""
        mesh, options = self.plan.mesh, self.plan.options
        dim = cut_dim(param, options.tp_plan) if mesh.tp > 1 else None
        return -(-param.numel // mesh.tp) if dim is not None else param.numel

    def _waits(self, params: Sequence[Parameter]) -> float:
        """Two all-reduces of activations of each TP rank, and two all-to-alls of tokens to experts."""
        widths = [param.shape[-1] for param in params if len(param.shape) > 1 and param.dedicated]
        size = self.tokens * min(widths, default=0) * self.plan.options.dtypes.compute.itemsize
        costs = 2 * [self.machine.all_reduce(self.tp, size)] if self.tp.size > 1 else []
        stacks = [param for param in params if param.is_stack]
        if stacks:
            sent = (
                size
                * self.plan.model.active
                * stacks[0].shape[0]
                * (self.experts.size - 1)
                / self.experts.size
            )
            costs += 2 * [self.machine.all_to_all(self.experts, sent)]
        return sum(map(sum, costs))

    # Collectives

    def _fsdp(self, params: Sequence[Parameter]) -> tuple[list[Cost], list[Cost]]:
        """FSDP2's own for some parameters: all-gather; reduce-scatter and all-reduce of the rows."""
        gathers, reduces = [], []
        dtypes, mesh, machine = self.plan.options.dtypes, self.plan.mesh, self.machine
        experts = [p for p in params if p.is_stack and mesh.ep]
        for some, line, cut in (
            ([p for p in params if p not in experts], self.row, 1),
            (experts, self.of_experts, mesh.ep or 1),
        ):
            numel = sum(map(self._piece, some)) / cut
            others = (line.size - 1) / line.size
            gathers.append(machine.ring(line, others * numel * dtypes.compute.itemsize))
            reduces.append(machine.ring(line, others * numel * dtypes.reduce.itemsize))
            reduces.append(machine.all_reduce(self.column, numel / line.size * dtypes.reduce.itemsize))
        return gathers, reduces

    def _costs(self, groups: Sequence[Group]) -> dict[str, Cost]:
        """Of each phase of a group, for the rank that moves most in it; each time it runs.

        groups: as the TP ranks have it.
        """
        lines = dict.fromkeys(traffic.PHASES, self.tp)
        lines |= {
            "gather": self.row,
            "reduce": self.row,
            "reduce_replicas": self.column,
            "publish": self.column,
        }
        most = dict.fromkeys(traffic.PHASES, 0)
        for group in groups:
            for place in [(NOBODY, NOBODY), *((shard, NOBODY) for shard in group.kept), *group.owned]:
                for phase, (calls, nbytes) in group.of_a_step(*place).items():
                    most[phase] = max(most[phase], nbytes // calls)
        dtypes = groups[0].dtypes  # a TP owner receives what it sends back
        received = most["publish_exchange"] * dtypes.reduce.itemsize // dtypes.newton_schulz.itemsize
        most["exchange"] = max(most["exchange"], received)
        return {
            phase: (self.machine.all_to_all if "exchange" in phase else self.machine.ring)(
                lines[phase], nbytes
            )
            for phase, nbytes in most.items()
        }

    # The step

    def orthogonalize(self) -> float:
        """Seconds of Newton-Schulz on the busiest rank."""
        plan, rate = self.plan, self.ns_rate
        stacks = [operations / rate for operations in plan.stack_operations]
        busy: dict[tuple[int, int], float] = defaultdict(float)
        for matrix in plan.matrices:
            for tp, seconds in enumerate(seconds_of(matrix, self)):
                busy[matrix.slot, tp] += seconds
        return max(*stacks, *(seconds + stacks[slot] for (slot, _), seconds in busy.items()))

    @property
    def ns_rate(self) -> float:
        """Operations of Newton-Schulz in a second."""
        return self.machine.rate(self.plan.options.dtypes.newton_schulz)

    # Three iterations

    def dmuon(self) -> Iteration:
        """Newton-Schulz on the owners; updates travel with the next gathers."""
        blocks = [self.block(names, dmuon=True) for names in self.names]
        most = Rest(*self.plan.rest.flatten(0, 1).amax(0).tolist())
        moved = 2 * (most.weights + most.momentum + most.base_weights + most.base_moments)
        moved += most.gradients + most.base_gradients
        calls, nbytes = self.plan.shared(0, 0)
        shared = self.machine.ring(self.column, nbytes)
        return self._iteration(blocks, self.orthogonalize(), calls * shared.latency + shared.transfer, moved)

    def adamw(self) -> Iteration:
        """FSDP2 and AdamW for everything."""
        return self._iteration(self._fsdp_blocks, 0.0, 0.0, 7 * self._weight_bytes(self.plan.model.params))

    def two_exchanges(self) -> Iteration:
        """FSDP2, and Muon that brings matrices together in the step by one all-to-all, and back by another.

        Each takes as many matrices as the row, with its TP ranks, has ranks. (Under DDP the gradients are
        whole already, and one all-gather brings the updates.)
        """
        plan, mesh, machine = self.plan, self.plan.mesh, self.machine
        owned = [matrix.param for matrix in plan.matrices]
        size = sum(param.numel for param in owned) * plan.options.dtypes.newton_schulz.itemsize
        ranks = mesh.replicate if mesh.ddp else mesh.shard * mesh.tp
        if mesh.ddp:
            exchange = sum(machine.ring(self.column, size * (ranks - 1) / ranks))
        else:
            line = machine.line(ranks, 1)
            cost = machine.all_to_all(line, size / ranks * (ranks - 1) / ranks)
            exchange = 2 * (cost.latency * -(-len(owned) // ranks) + cost.transfer)
        loads = [0] * ranks
        for param, rank in zip(owned, assign(plan.weighed, ranks), strict=True):
            loads[rank] += plan.operations_of((param.structure, param.shape))
        busiest = (max(loads) + max(plan.stack_operations)) / self.ns_rate
        muons = [p for p in plan.model.params if p.dedicated]
        moved = 7 * self._weight_bytes(plan.model.params) - 2 * self._weight_bytes(muons)
        return self._iteration(self._fsdp_blocks, busiest, exchange, moved)

    @property
    def _fsdp_blocks(self) -> list[Block]:
        return [self.block(names, dmuon=False) for names in self.names]

    def _weight_bytes(self, params: Sequence[Parameter]) -> float:
        """That one rank keeps, of some parameters; FSDP2 has cut them."""
        return sum(map(self._piece, params)) * self.plan.options.dtypes.weight.itemsize / self.plan.mesh.shard

    def _iteration(
        self, blocks: Sequence[Block], orthogonalize: float, exchange: float, moved: float
    ) -> Iteration:
        reshard = self.plan.options.reshard and not self.plan.mesh.ddp
        return Iteration(
            compute=sum(3 * block.forward for block in blocks),
            parallel=sum(3 * block.waits for block in blocks),
            exposed=exposed(blocks, reshard=reshard),
            orthogonalize=orthogonalize,
            exchange=exchange,
            update=moved / (1e9 * self.machine.memory_rate),
        )


def map_products(params: Sequence[Parameter]) -> list[Parameter]:
    """Those that activations are multiplied with: matrices, but for tables that are looked up."""
    tables = ("embed", "wte", "wpe")
    return [p for p in params if len(p.shape) > 1 and not any(name in p.name for name in tables)]


def seconds_of(matrix: Planned, times: Times) -> list[float]:
    """What orthogonalizing one parameter takes each rank of its owner row, by tensor-parallel rank.

    The one place that says who does it: the TP owner, all where nothing cuts it, or the ranks of a team, each
    a part, with a reduce-scatter and two all-gathers in each step.
    """
    plan, machine, team = times.plan, times.machine, matrix.share.team
    if team is None:
        seconds = plan.operations_of((matrix.param.structure, matrix.param.shape)) / times.ns_rate
    else:
        steps, size = plan.options.ns_steps, plan.mesh.tp
        sent, received = team_elements_of(0, *team[0], size, steps)
        itemsize = plan.options.dtypes.newton_schulz.itemsize
        costs = [
            *[machine.all_to_all(times.tp, sent * itemsize / steps)] * steps,
            *[machine.ring(times.tp, received * itemsize / (2 * steps))] * 2 * steps,
        ]
        seconds = team_operations(*team[0], size, steps) / times.ns_rate + sum(map(sum, costs))
    return [seconds if matrix.share.state(tp) else 0.0 for tp in range(plan.mesh.tp)]
