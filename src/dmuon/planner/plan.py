"""The plan: who owns what on a mesh, and what follows for time, traffic and memory."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from ..optim.newton_schulz import Settings, operation_count, resolve_coefficients
from ..optim.products import matrices_at_once
from ..optim.team import TeamPolicy, nominal_rates, shareable, team_operations
from ..ownership import (
    Matrix,
    choose_owners,
    choose_teams,
    chunks,
    cost_of,
    imbalance,
    loads_of,
    loads_of_stacks,
    lower_bound,
    matrices_of,
)
from ..structure import PLAIN, Structure
from . import memory, traffic
from .cut import DEFAULT, Rule, cut_dim, is_replicated
from .mesh import Mesh
from .model import Model, Parameter, PlanError
from .traffic import NOBODY, Dtypes, Group, Moves, Share

_MIXED = Dtypes(compute=torch.bfloat16, reduce=torch.bfloat16, newton_schulz=torch.bfloat16)


@dataclass(frozen=True)
class Options:
    """What a training run chooses, as far as it matters here.

    Attributes:
        dtypes: of weights, gradients, momenta and updates.
        reshard: `reshard_after_forward`.
        ns_steps, ns_algorithm: of Newton-Schulz, for its operations; "direct" is what bfloat16 takes.
        teams: `tp_distributed_gram_policy`; "never" is `tp_distributed_gram=False`.
        tp_plan: how tensor parallelism cuts layers, by name.
    """

    dtypes: Dtypes = _MIXED
    reshard: bool = True
    ns_steps: int = 5
    ns_algorithm: str = "direct"
    teams: TeamPolicy = "never"
    tp_plan: Mapping[str, Rule] = field(default_factory=lambda: DEFAULT)


@dataclass(frozen=True)
class Planned:
    """A dedicated matrix and where it goes."""

    param: Parameter
    slot: int  # of the owner: replicate * shard_size + shard
    share: Share


@dataclass(frozen=True)
class Load:
    """What one rank computes in a step: operations of Newton-Schulz."""

    operations: int = 0


@dataclass(frozen=True)
class Plan:
    """A model on a mesh. Everything is derived from shapes; no two calls differ.

    Attributes:
        matrices: the dedicated ones, in module order.
    """

    model: Model
    mesh: Mesh
    options: Options
    matrices: tuple[Planned, ...]

    # Owners

    @cached_property
    def groups(self) -> list[list[Group]]:
        """By tensor-parallel rank: the matrices of each block, in module order."""
        blocks: dict[str | None, list[tuple[int, Share]]] = {}
        for matrix in self.matrices:
            blocks.setdefault(matrix.param.block, []).append((matrix.slot, matrix.share))
        options = self.options
        of_blocks = [
            [
                Group(matrices, self.mesh, tp, options.dtypes, options.reshard, options.ns_steps)
                for tp in self._tps
            ]
            for matrices in blocks.values()
        ]
        return [list(groups) for groups in zip(*of_blocks, strict=True)]

    @cached_property
    def stacks(self) -> list[Parameter]:
        """Of experts: no rank owns them, each orthogonalizes what it holds."""
        return [param for param in self.model.dedicated if param.is_stack and not self.mesh.ddp]

    @cached_property
    def stack_loads(self) -> list[int]:
        """Operations of each slot for stacks, as the assignment saw them."""
        return _stack_loads(
            self.model, self.mesh, lambda structure, shape: cost_of(structure.matrices(shape))
        )

    @cached_property
    def stack_operations(self) -> list[int]:
        """The same, with the chosen steps and algorithm."""
        return _stack_loads(self.model, self.mesh, lambda *held: self.operations_of(held))

    @cached_property
    def weighed(self) -> list[Matrix]:
        """As the assignment saw them."""
        kinds = [m.param.structure.matrices(m.param.shape) for m in self.matrices]
        return matrices_of(kinds, [m.param.block for m in self.matrices])

    @property
    def balance(self) -> float:
        """Of data-parallel ranks: the busiest owner's operations over the lower bound of any assignment."""
        if not self.stacks:
            return imbalance(self.weighed, [m.slot for m in self.matrices], self.mesh.slots)
        return max(self.busy) / self.bound

    @property
    def over_mean(self) -> float:
        """The busiest owner's operations over the mean of all data-parallel ranks."""
        return max(self.busy) * self.mesh.slots / sum(self.busy)

    @cached_property
    def busy(self) -> list[int]:
        """Operations of each slot, those for its part of stacks included."""
        owned = loads_of(self.weighed, [m.slot for m in self.matrices], self.mesh.slots)
        return [dense + stack for dense, stack in zip(owned, self.stack_loads, strict=True)]

    @property
    def bound(self) -> int:
        """Operations that the busiest owner has at least, whatever the assignment."""
        alone = lower_bound(self.weighed, self.mesh.slots)
        if not self.stacks:
            return alone
        largest = max(matrix.cost for matrix in self.weighed) + min(self.stack_loads)
        return max(alone, largest, *self.stack_loads, -(-sum(self.busy) // self.mesh.slots))

    # Computation

    @cached_property
    def loads(self) -> dict[tuple[int, int], Load]:
        """Operations of a step, by owner slot and tensor-parallel rank; those without any left out."""
        result: dict[tuple[int, int], int] = defaultdict(int)
        kinds = Counter((m.slot, (m.param.structure, m.param.shape), m.share) for m in self.matrices)
        for slot, load in enumerate(self.stack_operations):
            for tp in self._tps if load else ():
                result[slot, tp] += load
        for (slot, param, share), count in kinds.items():
            operations = self.operations_of(param)
            if share.team is not None:
                operations = team_operations(*share.team[0], self.mesh.tp, self.options.ns_steps)
            for tp in self._tps:
                if share.state(tp):
                    result[slot, tp] += count * operations
        return {place: Load(operations) for place, operations in result.items()}

    def operations_of(self, held: tuple[Structure, tuple[int, ...]]) -> int:
        """Of Newton-Schulz on all matrices of a parameter, by its structure and shape."""
        structure, shape = held
        return sum(count * self.operations(rows, cols) for count, rows, cols in structure.matrices(shape))

    def operations(self, rows: int, cols: int) -> int:
        """Of Newton-Schulz on one matrix, with the chosen steps and algorithm."""
        return operation_count(rows, cols, steps=self.options.ns_steps, algorithm=self.options.ns_algorithm)

    # Traffic

    def moves_of(self, rank: int) -> Moves:
        """Collectives and bytes of one training step of a rank, by phase."""
        place = self.mesh.place_of(rank)
        groups = self.groups[place.tp]
        moves = traffic.in_sum(*(group.of_a_step(place.shard, place.replicate) for group in groups))
        if any(shared := self.shared(place.shard, place.replicate)):
            traffic.add(moves, {"publish": shared})
        return moves

    def shared(self, shard: int, replicate: int) -> tuple[int, int]:
        """Collectives and bytes with which replicas, in the step, tell each other of parts of stacks."""
        mesh, calls, numel = self.mesh, 0, 0
        if mesh.replicate == 1 or mesh.ep is not None:
            return 0, 0
        for count, sizes in self._stack_sizes.items():
            held = mesh.held(count, shard)
            calls += len(sizes) if held else 0
            numel += (held - chunks(held, mesh.replicate)[replicate]) * sum(sizes)
        return calls, numel * self.options.dtypes.newton_schulz.itemsize

    def start_of(self, rank: int) -> Moves:
        """What a rank moves once, up to its first forward, on top of what every step moves."""
        place = self.mesh.place_of(rank)
        groups = self.groups[place.tp]
        return traffic.in_sum(*(group.of_the_start(place.shard, place.replicate) for group in groups))

    @cached_property
    def moves(self) -> torch.Tensor:
        """`moves_of` every rank: [owner slot, tensor-parallel rank, phase of `traffic.PHASES`, 2]; the last
        dim has collectives and bytes."""

        def row(group: Group, shard: int, replicate: int) -> list[int]:
            moves = group.of_a_step(shard, replicate)
            return [number for phase in traffic.PHASES for number in moves.get(phase, (0, 0))]

        table = self._of_all_ranks(row).unflatten(2, (-1, 2))
        mesh = self.mesh
        if self.stacks and mesh.replicate > 1:
            shared = [self.shared(shard, row) for row in range(mesh.replicate) for shard in range(mesh.shard)]
            table[:, :, traffic.PHASES.index("publish")] += torch.tensor(shared).unsqueeze(1)
        return table

    @property
    def _tps(self) -> range:
        return range(self.mesh.tp)

    def _of_all_ranks(self, row: Callable[[Group, int, int], Sequence[int]]) -> torch.Tensor:
        """A sum over groups for every rank: [owner slot, tensor-parallel rank, values].

        row: a group's values, by a rank's coordinates. All ranks have those of a rank that keeps nothing of
        the group, with corrections for the columns and the owners that do: so this takes no time proportional
        to ranks times groups.
        """
        mesh, by_tp = self.mesh, []
        for groups in self.groups:
            others = [row(group, NOBODY, NOBODY) for group in groups]
            columns = {(i, shard): row(g, shard, NOBODY) for i, g in enumerate(groups) for shard in g.kept}
            owners = {(i, *place): row(g, *place) for i, g in enumerate(groups) for place in g.owned}
            of_columns, of_owners = torch.tensor([*columns.values()]), torch.tensor([*owners.values()])
            more = of_columns - torch.tensor([others[i] for i, _ in columns])
            total = torch.tensor(others).sum(0).repeat(mesh.shard, 1)
            total.index_add_(0, torch.tensor([shard for _, shard in columns]), more)
            total = total.repeat(mesh.replicate, 1)  # [slots, values]
            more = of_owners - torch.tensor([columns[i, shard] for i, shard, _ in owners])
            slots = [replicate * mesh.shard + shard for _, shard, replicate in owners]
            by_tp.append(total.index_add_(0, torch.tensor(slots), more))
        return torch.stack(by_tp, 1)

    # Memory

    def rest_of(self, rank: int) -> memory.Rest:
        """What a rank keeps from one step to the next."""
        place = self.mesh.place_of(rank)
        kept = [memory.at_rest(group, place.shard, place.replicate) for group in self.groups[place.tp]]
        return memory.in_sum([*kept, self._base_rest(place.shard, place.tp)])

    @cached_property
    def rest(self) -> torch.Tensor:
        """`rest_of` every rank: [owner slot, tensor-parallel rank, field of `memory.Rest`]."""
        base = [[self._base_rest(shard, tp) for tp in self._tps] for shard in range(self.mesh.shard)]
        return self._of_all_ranks(memory.at_rest) + torch.tensor(base).repeat(self.mesh.replicate, 1, 1)

    @cached_property
    def updates(self) -> torch.Tensor:
        """Bytes that every rank keeps after a step until they are published: [owner slot, tp]."""
        return self._of_all_ranks(lambda *place: [memory.of_updates(*place)]).squeeze(2)

    @cached_property
    def work(self) -> list[memory.Work]:
        """By tensor-parallel rank: bytes while groups run."""
        return [memory.of_groups(groups) for groups in self.groups]

    @cached_property
    def step_work(self) -> dict[tuple[int, int], int]:
        """By owner slot and tensor-parallel rank: bytes of the largest Newton-Schulz; about."""
        largest: dict[tuple[int, int], int] = {}
        compute = self.options.dtypes.newton_schulz
        kinds = Counter((m.slot, m.param.structure, m.param.shape, m.share) for m in self.matrices)
        for (slot, structure, shape, share), count in kinds.items():
            held, rows, cols = max(structure.matrices(shape), key=lambda kind: kind[1] * kind[2])
            count *= held
            for tp in self._tps:
                if not share.state(tp):
                    continue
                at_once = min(count, matrices_at_once(rows, cols, compute, torch.device("cuda")))
                nbytes = at_once * memory.newton_schulz(rows, cols, compute)
                if share.team is not None:  # the long side is shared
                    nbytes = memory.newton_schulz(
                        min(rows, cols), chunks(max(rows, cols), self.mesh.tp)[0], compute
                    )
                largest[slot, tp] = max(largest.get((slot, tp), 0), nbytes)
        return largest

    @cached_property
    def peak(self) -> torch.Tensor:
        """Of every rank: bytes at the peak of a step, without activations; about: [owner slot, tp]."""
        total = self.rest.sum(2)
        gathered, gradients = torch.tensor(self.work).unbind(1)
        step = torch.zeros_like(total)
        for (slot, tp), nbytes in self.step_work.items():
            step[slot, tp] = nbytes
        kept = [memory.Rest._fields.index(name) for name in ("gradients", "base_gradients")]
        forward = total - self.rest[..., kept].sum(2) + gathered + self.updates
        return torch.stack([forward, total + gathered + gradients, total + self.updates + step]).amax(0)

    # Base parameters

    def _base_shape(self, param: Parameter, tp: int) -> tuple[int, ...]:
        dim = cut_dim(param, self.options.tp_plan) if self.mesh.tp > 1 else None
        if dim is None:
            return param.shape
        size = chunks(param.shape[dim], self.mesh.tp)[tp]
        return (*param.shape[:dim], size, *param.shape[dim + 1 :])

    @cached_property
    def _base_shapes(self) -> list[Counter[tuple[tuple[int, ...], bool]]]:
        """By tensor-parallel rank: how many base parameters of each shape are there, and trainable."""
        return [
            Counter((self._base_shape(param, tp), param.trainable) for param in self.model.base)
            for tp in range(self.mesh.tp)
        ]

    def _base_rest(self, shard: int, tp: int) -> memory.Rest:
        """Under FSDP2 a rank keeps a chunk of the rows."""
        numel = trainable = 0
        for (shape, wants_gradient), count in self._base_shapes[tp].items():
            size = math.prod(shape)
            if shape:
                step = -(-shape[0] // self.mesh.shard)
                size = max(0, min(step, shape[0] - shard * step)) * math.prod(shape[1:])
            numel += count * size
            trainable += count * size * wants_gradient
        held = sum(self.mesh.held(count, shard) * sum(sizes) for count, sizes in self._stack_sizes.items())
        return memory.of_base(numel, trainable, held, self.options.dtypes)

    @cached_property
    def _stack_sizes(self) -> dict[int, list[int]]:
        """Elements of one matrix of every stack, by how many it has."""
        sizes: dict[int, list[int]] = defaultdict(list)
        for param in self.stacks:
            sizes[param.shape[0]].append(math.prod(param.shape[1:]))
        return sizes


def plan(model: Model, mesh: Mesh, options: Options | None = None) -> Plan:
    """Choose the owners, as `dedicate_params` would on that mesh.

    Raises:
        PlanError: if the model has no dedicated matrix.
    """
    options = options or Options()
    if mesh.ep is not None:
        model = model.with_stacks()
    params = [param for param in model.dedicated if mesh.ddp or not param.is_stack]
    if not params:
        raise PlanError(f"{model.name} has no matrix in a repeated block; choose some with --include")
    kinds = [param.structure.matrices(param.shape) for param in params]
    dims = [cut_dim(param, options.tp_plan) if mesh.tp > 1 else None for param in params]
    tp_groups = [tuple(range(mesh.tp)) if dim is not None else () for dim in dims]
    slots, positions = choose_owners(
        matrices_of(kinds, [param.block for param in params]),
        mesh.slots,
        tp_groups,
        loads=_stack_loads(model, mesh, lambda structure, shape: cost_of(structure.matrices(shape))),
    )
    shares = [
        _share(param, dim, position, mesh, options)
        for param, dim, position in zip(params, dims, positions, strict=True)
    ]
    shares = _with_teams(params, dims, slots, shares, mesh, options)
    matrices = (Planned(*fields) for fields in zip(params, slots, shares, strict=True))
    return Plan(model, mesh, options, tuple(matrices))


def _with_teams(
    params: Sequence[Parameter],
    dims: Sequence[int | None],
    slots: Sequence[int],
    shares: Sequence[Share],
    mesh: Mesh,
    options: Options,
) -> list[Share]:
    """The shares, with teams where `Muon` on GPUs would form them."""
    if options.teams == "never" or mesh.tp == 1:
        return list(shares)
    rates, dtype = nominal_rates("cuda"), options.dtypes.newton_schulz
    able = {i for i, param in enumerate(params) if dims[i] is not None and param.structure == PLAIN}
    if options.teams == "beneficial":
        triples = resolve_coefficients("quintic", options.ns_steps)  # only their number counts
        settings = Settings(triples, dtype, options.ns_algorithm)
        works = [
            shareable(
                row=slots[i],
                size=len(shares[i].pieces),
                position=shares[i].tp_owner,
                kinds=param.structure.matrices(param.shape),
                able=i in able,
                settings=settings,
                dtype=dtype,
                rates=rates,
            )
            for i, param in enumerate(params)
        ]
        able = choose_teams(works)
    teams = {i: ((params[i].shape[0], params[i].shape[1]), dims[i] or 0) for i in able}
    return [replace(share, team=teams.get(i)) for i, share in enumerate(shares)]


def _stack_loads(model: Model, mesh: Mesh, cost: Callable[[Structure, tuple[int, ...]], int]) -> list[int]:
    stacks = [param for param in model.dedicated if param.is_stack and not mesh.ddp]
    seen = ((p.shape[0], cost(p.structure, (1, *p.shape[1:])), mesh.ep is not None) for p in stacks)
    return loads_of_stacks(seen, mesh.shard, mesh.replicate)


def _share(param: Parameter, dim: int | None, tp_owner: int, mesh: Mesh, options: Options) -> Share:
    if dim is None:
        replicated = mesh.tp > 1 and is_replicated(param, options.tp_plan)
        return Share((param.numel,), copies=mesh.tp if replicated else 1)
    other = param.shape[1 - dim]
    pieces = tuple(size * other for size in chunks(param.shape[dim], mesh.tp))
    return Share(pieces, tp_owner)
