"""The plan: who owns what on a mesh, and what follows for time, traffic and memory."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from ..optim.distributed_gram import moves_fewer_bytes
from ..optim.newton_schulz import operation_count
from ..optim.products import matrices_at_once
from ..ownership import Matrix, choose_owners, imbalance, loads_of, lower_bound, matrices_of
from . import memory, traffic
from .cut import DEFAULT, Rule, chunks, cut_dim, is_replicated
from .mesh import Mesh, Place
from .model import Model, Parameter, PlanError
from .traffic import Buffer, Dtypes, Moves, Role, Setting, Share

_MIXED = Dtypes(weight=4, compute=2, reduce=2)


@dataclass(frozen=True)
class Options:
    """What a training run chooses, as far as it matters here.

    Attributes:
        dtypes: bytes of an element.
        reshard: `reshard_after_forward`.
        ns_steps, ns_algorithm: of Newton-Schulz, for its operations; "direct" is what bfloat16 takes.
        ns_itemsize: bytes of an element in its products.
        gram_policy: `tp_distributed_gram_policy`; "never" is `tp_distributed_gram=False`.
        tp_plan: how tensor parallelism cuts layers, by name.
    """

    dtypes: Dtypes = _MIXED
    reshard: bool = True
    ns_steps: int = 5
    ns_algorithm: str = "direct"
    ns_itemsize: int = 2
    gram_policy: str = "never"
    tp_plan: Mapping[str, Rule] = field(default_factory=lambda: DEFAULT)


@dataclass(frozen=True)
class Planned:
    """A dedicated matrix and where it goes."""

    param: Parameter
    slot: int  # of the owner: replicate * shard_size + shard
    share: Share


@dataclass(frozen=True)
class Load:
    """What one rank computes in a step: operations in the dtype of Newton-Schulz, and in float64."""

    operations: int = 0
    float64: int = 0

    @property
    def total(self) -> int:
        """Of both."""
        return self.operations + self.float64


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
    def setting(self) -> Setting:
        """For the formulas."""
        mesh, options = self.mesh, self.options
        return Setting(mesh.shard, mesh.replicate, mesh.ddp, options.reshard, options.dtypes)

    @cached_property
    def groups(self) -> dict[str | None, list[tuple[int, Buffer]]]:
        """By block, in module order: its buffers, each with its owner's slot."""
        members: dict[str | None, dict[tuple, list[Share]]] = {}
        for matrix in self.matrices:
            key = (matrix.slot, matrix.share.kind)
            members.setdefault(matrix.param.block, {}).setdefault(key, []).append(matrix.share)
        return {
            block: [(key[0], tuple(shares)) for key, shares in of_block.items()]
            for block, of_block in members.items()
        }

    @cached_property
    def buffers(self) -> list[tuple[int, Buffer]]:
        """Of all groups."""
        return [entry for of_block in self.groups.values() for entry in of_block]

    @cached_property
    def weighed(self) -> list[Matrix]:
        """As the assignment saw them."""
        shapes = [(m.param.shape[0], m.param.shape[1]) for m in self.matrices]
        return matrices_of(shapes, [m.param.block for m in self.matrices])

    @property
    def balance(self) -> float:
        """Of data-parallel ranks: the busiest owner's operations over the lower bound of any assignment."""
        return imbalance(self.weighed, [m.slot for m in self.matrices], self.mesh.slots)

    @property
    def over_mean(self) -> float:
        """The busiest owner's operations over the mean of all data-parallel ranks."""
        owned = loads_of(self.weighed, [m.slot for m in self.matrices], self.mesh.slots)
        return max(owned) * self.mesh.slots / sum(owned)

    @property
    def bound(self) -> int:
        """Operations that the busiest owner has at least, whatever the assignment."""
        return lower_bound(self.weighed, self.mesh.slots)

    # Computation

    @cached_property
    def loads(self) -> dict[tuple[int, int], Load]:
        """Operations of a step, by owner slot and tensor-parallel rank; those without any left out."""
        result: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])
        kinds = Counter((m.slot, m.param.shape, m.share) for m in self.matrices)
        for (slot, (rows, cols), share), count in kinds.items():
            whole = self.operations(rows, cols)
            for tp in self._tps:
                if share.gram is not None:
                    result[slot, tp][1] += count * self._gram_operations(rows, cols, share, tp)
                elif len(share.pieces) == 1 or tp == share.tp_owner:
                    result[slot, tp][0] += count * whole
        return {place: Load(*operations) for place, operations in result.items()}

    def operations(self, rows: int, cols: int) -> int:
        """Of Newton-Schulz on one matrix, with the chosen steps and algorithm."""
        return operation_count(rows, cols, steps=self.options.ns_steps, algorithm=self.options.ns_algorithm)

    def _gram_operations(self, rows: int, cols: int, share: Share, tp: int) -> int:
        """In float64: the Gram matrix of the piece, the factor applied to it; on the TP owner the factor, of
        four products a step."""
        side = min(rows, cols)
        factor = 8 * side**3 * self.options.ns_steps if tp == share.tp_owner else 0
        return 4 * side * share.piece(tp) + factor

    # Traffic

    def moves_of(self, rank: int) -> Moves:
        """Collectives and bytes of one training step of a rank, by phase."""
        place = self.mesh.place_of(rank)
        total: Moves = {}
        for slot, buffer in self.buffers:
            traffic.add(total, traffic.of_a_step(buffer, self._role(slot, place), place.tp, self.setting))
        traffic.add(total, traffic.of_base(self._base_pieces(place.tp, trainable=True), self.setting))
        return total

    def start_of(self, rank: int) -> Moves:
        """What a rank moves once, up to its first forward, on top of what every step moves."""
        place = self.mesh.place_of(rank)
        total: Moves = {}
        for slot, buffer in self.buffers:
            traffic.add(total, traffic.of_the_start(buffer, self._role(slot, place), place.tp, self.setting))
        pieces = self._base_pieces(place.tp)
        traffic.add(total, traffic.of_base_at_the_start(pieces, place.shard == 0, self.setting))
        return total

    def _role(self, slot: int, place: Place) -> Role:
        if slot % self.mesh.shard != place.shard:
            return Role.OTHER
        return Role.OWNER if slot // self.mesh.shard == place.replicate else Role.KEEPER

    @cached_property
    def moves(self) -> torch.Tensor:
        """`moves_of` every rank: [owner slot, tensor-parallel rank, phase of `traffic.PHASES`, 2]; the last
        dim has collectives and bytes."""

        def row(buffer: Buffer, role: Role, tp: int) -> list[int]:
            return _flat(traffic.of_a_step(buffer, role, tp, self.setting))

        total = self._of_all_slots(row)  # [slots, tp, 2 * phases]
        base = [traffic.of_base(self._base_pieces(tp, trainable=True), self.setting) for tp in self._tps]
        total += torch.tensor([_flat(moves) for moves in base])
        return total.view(*total.shape[:2], len(traffic.PHASES), 2)

    @property
    def _tps(self) -> range:
        return range(self.mesh.tp)

    def _of_all_slots(self, row: Callable[[Buffer, Role, int], list[int]]) -> torch.Tensor:
        """A sum over buffers for every slot: [slots, tp, values]. row: a buffer's values, by role.

        Equal buffers have equal values, and a model has few that differ; so each is looked at once.
        """
        numbers: dict[Buffer, int] = {}
        pairs = Counter((slot, numbers.setdefault(buffer, len(numbers))) for slot, buffer in self.buffers)
        table = torch.tensor(
            [[[row(buffer, role, tp) for tp in self._tps] for role in Role] for buffer in numbers]
        )  # [buffers, roles, tp, values]
        slot, number = torch.tensor(list(pairs)).unbind(1)
        values = table[number] * torch.tensor(list(pairs.values())).view(-1, 1, 1, 1)
        other, keeper, owner = values.unbind(1)  # [pairs, tp, values] each
        columns = torch.zeros(self.mesh.shard, *other.shape[1:], dtype=torch.int64)
        columns.index_add_(0, slot % self.mesh.shard, keeper - other)
        total = (other.sum(0) + columns).repeat(self.mesh.replicate, 1, 1)
        return total.index_add_(0, slot, owner - keeper)

    # Memory

    def rest_of(self, rank: int) -> memory.Rest:
        """What a rank keeps from one step to the next."""
        place = self.mesh.place_of(rank)
        total = self._base_rest(place.shard, place.tp)
        for slot, buffer in self.buffers:
            mine = memory.at_rest(buffer, self._role(slot, place), place.tp, self.setting)
            total = memory.in_sum(total, mine)
        return total

    @cached_property
    def rest(self) -> torch.Tensor:
        """`rest_of` every rank: bytes [owner slot, tensor-parallel rank, field of `memory.Rest`]."""

        def row(buffer: Buffer, role: Role, tp: int) -> list[int]:
            return list(memory.at_rest(buffer, role, tp, self.setting))

        base = [[self._base_rest(shard, tp) for tp in self._tps] for shard in range(self.mesh.shard)]
        return self._of_all_slots(row) + torch.tensor(base).repeat(self.mesh.replicate, 1, 1)

    @cached_property
    def work(self) -> list[memory.Work]:
        """By tensor-parallel rank: bytes while groups run."""
        dtypes = self.setting.dtypes
        result = []
        for tp in self._tps:
            gathered, gradients = [], []
            for of_block in self.groups.values():
                numels = [[share.piece(tp) for share in buffer] for _, buffer in of_block]
                gathered.append(sum(traffic.padded(buffer, dtypes.compute) for buffer in numels))
                packed = sum(traffic.padded(b, dtypes.reduce) + dtypes.reduce * len(b) for b in numels)
                gradients.append(dtypes.compute * sum(map(sum, numels)) + packed)
            result.append(memory.of_groups(gathered, gradients, self.setting))
        return result

    @cached_property
    def step_work(self) -> dict[tuple[int, int], int]:
        """By owner slot and tensor-parallel rank: bytes of the largest Newton-Schulz; about."""
        largest: dict[tuple[int, int], int] = {}
        kinds = Counter((m.slot, m.param.shape, m.share) for m in self.matrices)
        for (slot, (rows, cols), share), count in kinds.items():
            for tp in self._tps:
                if share.gram is not None:  # the piece in float64, twice, and Gram matrices
                    nbytes = 8 * (2 * share.piece(tp) + 5 * min(rows, cols) ** 2)
                elif len(share.pieces) == 1 or share.tp_owner == tp:
                    at_once = min(count, matrices_at_once(rows, cols, torch.bfloat16, torch.device("cuda")))
                    nbytes = at_once * memory.newton_schulz(rows, cols, self.options.ns_itemsize)
                else:
                    continue
                largest[slot, tp] = max(largest.get((slot, tp), 0), nbytes)
        return largest

    @cached_property
    def peak(self) -> torch.Tensor:
        """Of every rank: bytes at the peak of a step, without activations; about: [owner slot, tp]."""
        total = self.rest.sum(2)
        forward = torch.tensor([work.forward for work in self.work])
        backward = torch.tensor([work.backward for work in self.work])
        step = torch.zeros_like(total)
        for (slot, tp), nbytes in self.step_work.items():
            step[slot, tp] = nbytes
        names = memory.Rest._fields
        gradients = self.rest[..., names.index("gradients")] + self.rest[..., names.index("base_gradients")]
        return torch.stack([total - gradients + forward, total + backward, total + step]).amax(0)

    # Base parameters

    def _base_pieces(self, tp: int, *, trainable: bool = False) -> list[int]:
        """Elements that tensor parallelism leaves a rank of each base parameter, in module order."""
        chosen = [p for p in self.model.base if p.trainable or not trainable]
        return [math.prod(self._base_shape(param, tp)) for param in chosen]

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
            if not self.mesh.ddp and shape:
                step = -(-shape[0] // self.mesh.shard)
                size = max(0, min(step, shape[0] - shard * step)) * math.prod(shape[1:])
            numel += count * size
            trainable += count * size * wants_gradient
        return memory.of_base(numel, trainable, self.setting)


def plan(model: Model, mesh: Mesh, options: Options | None = None) -> Plan:
    """Choose the owners, as `dedicate_params` would on that mesh.

    Raises:
        PlanError: if the model has no dedicated matrix.
    """
    options = options or Options()
    params = model.dedicated
    if not params:
        raise PlanError(f"{model.name} has no matrix in a repeated block; choose some with --include")
    shapes = [(param.shape[0], param.shape[1]) for param in params]
    dims = [cut_dim(param, options.tp_plan) if mesh.tp > 1 else None for param in params]
    tp_groups = [tuple(range(mesh.tp)) if dim is not None else () for dim in dims]
    slots, positions = choose_owners(
        matrices_of(shapes, [param.block for param in params]), mesh.slots, tp_groups
    )
    shares = [
        _share(param, dim, position, mesh, options)
        for param, dim, position in zip(params, dims, positions, strict=True)
    ]
    matrices = (Planned(*fields) for fields in zip(params, slots, shares, strict=True))
    return Plan(model, mesh, options, tuple(matrices))


def _share(param: Parameter, dim: int | None, tp_owner: int, mesh: Mesh, options: Options) -> Share:
    if dim is None:
        replicated = mesh.tp > 1 and is_replicated(param, options.tp_plan)
        return Share((param.numel,), copies=mesh.tp if replicated else 1)
    other = param.shape[1 - dim]
    pieces = tuple(size * other for size in chunks(param.shape[dim], mesh.tp))
    side = min(param.shape)
    gram: int | None = side * (side + 1) // 2
    if not _in_pieces(param, dim, pieces, tp_owner, gram or 0, options):
        gram = None
    return Share(pieces, tp_owner, gram=gram)


def _in_pieces(
    param: Parameter, dim: int, pieces: tuple[int, ...], tp_owner: int, gram: int, options: Options
) -> bool:
    """Whether the matrix stays in pieces, as `dmuon.optim.distributed_gram` decides."""
    if options.gram_policy == "never" or param.shape[dim] != max(param.shape):
        return False
    if options.gram_policy == "always":
        return True
    return moves_fewer_bytes(pieces, tp_owner, gram, options.dtypes.reduce + options.dtypes.weight)


def _flat(moves: Moves) -> list[int]:
    """Collectives and bytes of each of `traffic.PHASES` in turn."""
    return [value for phase in traffic.PHASES for value in moves.get(phase, (0, 0))]
