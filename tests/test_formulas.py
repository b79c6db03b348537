"""The formulas of docs/bytes-and-memory.md, written down once more, against what was really moved."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, distribute_module

import dmuon
import layouts
from dmuon.runtime import find_runtime
from layouts import Model, is_proj, make_mesh
from test_tensor_parallel import DDP_MESHES, MESHES

EVEN, UNEVEN = (8, 16), (6, 13)  # width and hidden width: in pieces that divide, without padding, and not
GRAM = 8  # bytes of an element of a Gram matrix and of a factor
Moved = dict[str, tuple[int, int]]  # by phase: collectives and bytes of one rank


@dataclass(frozen=True)
class Matrix:
    """What the formulas need to know of a dedicated matrix."""

    group: str
    owner: tuple[int, int]  # shard and replicate coordinate
    pieces: tuple[int, ...]  # elements, by tensor-parallel rank; one if nothing cuts it
    tp_owner: int
    copies: int  # tensor-parallel ranks that hold the same DTensor; 1 for a plain or a cut one
    gram: int | None  # elements of a triangle of its Gram matrix, where that travels in its place

    def piece(self, tp: int) -> int:
        return self.pieces[tp % len(self.pieces)]


@dataclass(frozen=True)
class Setting:
    """A mesh, a rank's place on it, and the bytes of an element in each phase."""

    n: int  # ranks that share the model, or under DDP that have it
    r: int  # rows
    here: tuple[int, int, int]  # shard, replicate, tp
    ddp: bool
    gathers: int  # per step: 2 if resharded after forward, 1 if not
    compute: int = 4
    reduce: int = 4
    weight: int = 4


def padded(numels: list[int], itemsize: int) -> int:
    """Bytes of a buffer in which each matrix starts at a multiple of 16 bytes."""
    return sum(-(-numel * itemsize // 16) * 16 for numel in numels)


def buffers(matrices: list[Matrix]) -> Iterator[list[Matrix]]:
    """Matrices of one group, owner and kind of cut travel together."""
    kinds: dict[tuple, list[Matrix]] = {}
    for matrix in matrices:
        kind = (matrix.group, matrix.owner, len(matrix.pieces), matrix.copies, matrix.gram is None)
        kinds.setdefault(kind, []).append(matrix)
    yield from kinds.values()


class Moves:
    """A sum of collectives."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def add(self, phase: str, nbytes: int, times: int = 1) -> None:
        self.calls[phase] += times
        self.bytes[phase] += times * nbytes

    @property
    def by_phase(self) -> Moved:
        return {phase: (self.calls[phase], self.bytes[phase]) for phase in self.calls}


def of_a_step(s: Setting, matrices: list[Matrix], base: list[int]) -> Moves:
    """One training step of one rank: a forward, a backward, `step()`. base: elements of base parameters
    that are replicated; none where FSDP2 or torch's DDP care for them."""
    moves = Moves()
    shard, replicate, tp = s.here
    for buffer in buffers(matrices):
        owner, first = buffer[0].owner, buffer[0]
        keeps = owner[0] == shard
        owns = owner == (shard, replicate)
        numels = [matrix.piece(tp) for matrix in buffer]
        gradients = padded(numels, s.reduce) + len(buffer) * s.reduce  # an element for each matrix: a count
        if s.n > 1:
            if not s.ddp:
                moves.add("gather", 0 if keeps else padded(numels, s.compute), s.gathers)
            moves.add("reduce", 0 if keeps else gradients)
            if s.ddp:
                moves.add("publish", 0 if keeps else padded(numels, s.compute))
        if s.r > 1 and keeps:
            moves.add("reduce_replicas", 0 if owns else gradients)
        if owns and first.copies > 1:
            moves.add("sum_copies", 2 * (first.copies - 1) * gradients // first.copies)
        if owns and len(first.pieces) > 1 and first.gram is None:
            others = [matrix for matrix in buffer if matrix.tp_owner != tp]
            moves.add("exchange", s.reduce * sum(matrix.piece(tp) for matrix in others))
        if owns:
            exchange_back(s, buffer, moves)
        to_the_column(s, buffer, moves)
    if base and s.n > 1:  # all of it fits in one bucket here, in float32
        moves.add("base", 2 * (s.n - 1) * (padded(base, 4) + 4 * len(base)) // s.n)
    return moves


def to_the_column(s: Setting, buffer: list[Matrix], moves: Moves) -> None:
    """HSDP: weights from the owner to its column."""
    shard, replicate, tp = s.here
    owner = buffer[0].owner
    if s.r > 1 and owner[0] == shard:
        numels = [matrix.piece(tp) for matrix in buffer]
        moves.add("publish", 0 if owner[1] == replicate else padded(numels, s.weight))


def exchange_back(s: Setting, buffer: list[Matrix], moves: Moves) -> None:
    """Updates from the TP owners to the pieces; or Gram matrices to the TP owners, and factors back."""
    tp, size = s.here[2], len(buffer[0].pieces)
    if size == 1:
        return
    mine = [matrix for matrix in buffer if matrix.tp_owner == tp]
    others = [matrix for matrix in buffer if matrix.tp_owner != tp]
    if buffer[0].gram is None:
        moves.add("publish_exchange", s.weight * sum(sum(m.pieces) - m.piece(tp) for m in mine))
    else:
        moves.add("exchange", GRAM * sum(matrix.gram for matrix in others))
        moves.add("publish_exchange", GRAM * (size - 1) * sum(matrix.gram for matrix in mine))


def of_the_start(s: Setting, matrices: list[Matrix], base: list[int]) -> Moves:
    """What is moved once, on top: the owners' initial weights, and the first rank's base parameters."""
    moves = Moves()
    shard, _, tp = s.here
    for buffer in buffers(matrices):
        if s.ddp and s.n > 1:
            numels = [matrix.piece(tp) for matrix in buffer]
            moves.add("gather", 0 if buffer[0].owner[0] == shard else padded(numels, s.compute))
        if s.r > 1:
            to_the_column(s, buffer, moves)
    if base and s.n > 1:
        moves.add("base", 0 if shard == 0 else 4 * sum(base))
    return moves


def in_sum(one: Moves, other: Moves) -> Moves:
    total = Moves()
    for moves in (one, other):
        total.calls.update(moves.calls)
        total.bytes.update(moves.bytes)
    return total


# What was really moved


def replicate_mix(model: Model, mesh: DeviceMesh) -> None:
    """A matrix that tensor parallelism replicates, as a DTensor."""

    def enter(module: Any, inputs: Any, mesh: DeviceMesh) -> DTensor:
        return DTensor.from_local(inputs[0], mesh, [Replicate()])

    def leave(module: Any, output: DTensor, mesh: DeviceMesh) -> torch.Tensor:
        return output.to_local()

    for layer in model.layers:
        distribute_module(layer.mix_proj, mesh, input_fn=enter, output_fn=leave)


def run(
    sizes: dict[str, int], shape: tuple[int, int], variant: dict[str, Any]
) -> tuple[Moved, Moved, dict[str, tuple], list[int]]:
    """What a rank moved up to its first step, and in its second; owners by name; base parameters."""
    width, hidden = shape
    model = Model(width=width, hidden=hidden)
    policy = None
    if variant.get("mixed"):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float64)
    if variant.get("copies"):
        replicate_mix(model, make_mesh(sizes)["tp"])
    layouts.distribute(model, sizes, mp_policy=policy, reshard=variant.get("reshard", True))
    gram = {"tp_distributed_gram": True, "tp_distributed_gram_policy": "always"} if "gram" in variant else {}
    optimizer = dmuon.Muon(model, ns_dtype=torch.float32, **gram)
    traffic = find_runtime(model).traffic
    moved = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=policy is not None):
            model(torch.randn(4, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
        moved.append({phase: (n, traffic.bytes[phase]) for phase, n in traffic.collectives.items()})
        traffic.reset()
    owners = {
        record.param_name: ((record.coordinate.shard, record.coordinate.replicate), record.tp_owner)
        for record in dmuon.get_dedicated_params(model)
    }
    base = [
        (param.to_local() if isinstance(param, DTensor) else param).numel()
        for name, param in model.named_parameters()
        if name not in owners
    ]
    return *moved, owners, base


def chunks(size: int, count: int) -> list[int]:
    step = -(-size // count)
    return [max(0, min(step, size - i * step)) for i in range(count)]


def matrices_of(
    shape: tuple[int, int], tp: int, variant: dict[str, Any], owners: dict[str, tuple]
) -> list[Matrix]:
    """The matrices of the model, from shapes alone, but for their owners."""
    matrices = []
    for name, param in Model(*shape).named_parameters():
        if not is_proj(name, param):
            continue
        cut = tp > 1 and "mix_proj" not in name
        hidden, other = max(param.shape), min(param.shape)  # cut by its long side, however it is turned
        pieces = tuple(size * other for size in chunks(hidden, tp)) if cut else (param.numel(),)
        gram = other * (other + 1) // 2 if cut and "gram" in variant else None
        copies = tp if "copies" in variant and "mix_proj" in name else 1
        matrices.append(
            Matrix(name[: name.index(".", 7)], owners[name][0], pieces, owners[name][1], copies, gram)
        )
    return matrices


def place_of(rank: int, sizes: dict[str, int]) -> tuple[int, int, int]:
    tp, n = sizes.get("tp", 1), sizes.get("dp", sizes.get("shard", sizes.get("ddp")))
    return rank // tp % n, rank // tp // n, rank % tp


def variants_of(sizes: dict[str, int], shape: tuple[int, int]) -> list[dict[str, Any]]:
    if shape == EVEN:
        return [{}]
    return [
        {},
        {"mixed": True},
        *([{"reshard": False}] if "ddp" not in sizes else []),
        *([{"gram": True}, {"copies": True}] if sizes.get("tp", 1) > 1 else []),
    ]


def run_all(sizes: dict[str, int], shape: tuple[int, int]) -> list[tuple]:
    return [run(sizes, shape, variant) for variant in variants_of(sizes, shape)]


@pytest.mark.parametrize("shape", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("sizes", MESHES + DDP_MESHES)
def test_collectives_and_bytes_are_those_of_the_formulas(ranks, sizes, shape):
    tp, rows = sizes.get("tp", 1), sizes.get("replicate", 1)
    answers = ranks(math.prod(sizes.values()), run_all, sizes, shape)
    for index, variant in enumerate(variants_of(sizes, shape)):
        for rank, by_variant in enumerate(answers):
            first, second, owners, base = by_variant[index]
            setting = Setting(
                n=len(answers) // tp // rows,
                r=rows,
                here=place_of(rank, sizes),
                ddp="ddp" in sizes,
                gathers=2 if variant.get("reshard", True) else 1,
                **({"compute": 2, "reduce": 8} if "mixed" in variant else {}),
            )
            matrices = matrices_of(shape, tp, variant, owners)
            replicated = base if setting.ddp else []
            expected = of_a_step(setting, matrices, replicated)
            assert second == expected.by_phase, (variant, rank)
            start = of_the_start(setting, matrices, replicated)
            assert first == in_sum(expected, start).by_phase, (variant, rank)
