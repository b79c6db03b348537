"""Who owns each matrix: shapes in, slots out.

A *slot* is one place that can own matrices: a coordinate of the data-parallel mesh, as a number. Its load is
the sum of its matrices' costs, in operations of Newton-Schulz. A step is over when the busiest slot is done.

The rule is longest processing time first (LPT: Graham, "Bounds on multiprocessing timing anomalies", SIAM J.
Appl. Math. 17, 1969). The most expensive matrix goes to the least loaded slot, then the next one, and so on.
Of equally loaded slots it is one that already owns a matrix of the same group, which saves the group a buffer
and a collective; else, or of several such, the lowest. Matrices of equal cost go in module order. If no slot
has anything to begin with, the busiest gets at most 4/3 - 1/(3 slots) times the least possible load.

Costs are exact integers, and nothing but the arguments decides: all ranks find the same owners without a word
to each other. The planner calls the same functions as `dedicate_params`: what is planned is what will run.

Under tensor parallelism the ranks that hold the pieces of a slot's matrices share its work: each matrix has a
TP owner among them or, where Muon is asked for it, all of them as a team (`choose_teams`).

Rejected:

* An integer linear program. It needs a solver, its time has no useful bound, and solvers may differ in which
  of several optima they return.
* Round robin. It counts matrices, not work: if the slots are a multiple of the matrices per layer, some slots
  get nothing but the largest shape.
* Balancing elements. A square matrix takes more operations per element than a long one of that short side.
* Names to break ties. A wrapper changes them; cost and position it does not.
* Refinements: exchanges between slots after LPT, a second start by bin packing, bundles of a group's small
  matrices. On the planner's fourteen models with fourteen numbers of slots each, from 2 to 1,024, they took
  more than 1 % off the busiest load in 11 of 196 cases, at most 6.5 % (gpt2 on 16), and added to it in 5. On
  gpt2 with 8 slots they reached 1.006 of the lower bound instead of 1.041. They took 640 lines, not 180.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from heapq import heappush, heapreplace
from itertools import accumulate
from typing import NamedTuple

import torch.nn as nn

from .optim.newton_schulz import operation_count
from .selection import Candidate, block_modules, enclosing

Kind = tuple[int, int, int]  # how many matrices, rows, columns


class Matrix(NamedTuple):
    """What the assignment needs to know of one parameter: of its matrix, or of all it holds."""

    cost: int  # operations of its orthogonalization, not negative
    group: int  # matrices with the same number are gathered together


def chunks(size: int, count: int) -> list[int]:
    """Sizes of `count` pieces as torch makes them: all of one size, but for the last ones."""
    step = -(-size // count)
    return [max(0, min(step, size - i * step)) for i in range(count)]


def cost_of(kinds: Sequence[Kind]) -> int:
    """Operations of Newton-Schulz for all matrices of one parameter."""
    return sum(count * operation_count(rows, cols) for count, rows, cols in kinds)


def blocks_of(model: nn.Module, chosen: Sequence[Candidate]) -> list[str | None]:
    """The name of the repeated block that each parameter is in; None outside of all."""
    blocks = block_modules(model)
    of_module: dict[str, str | None] = {}
    for candidate in chosen:
        module = candidate.path.rpartition(".")[0]
        if module not in of_module:
            of_module[module] = enclosing(module, blocks)
    return [of_module[candidate.path.rpartition(".")[0]] for candidate in chosen]


def matrices_of(kinds: Sequence[Sequence[Kind]], blocks: Sequence[Hashable]) -> list[Matrix]:
    """The parameters as the assignment sees them, which gives all matrices of one to one owner.

    Args:
        kinds: of each parameter, in module order, what it holds (`Structure.matrices` of the whole).
        blocks: for each parameter the repeated block of the model that it is in; those of one are a group.
            Where FSDP2 will put its boundaries is not known yet.
    """
    numbers: dict[Hashable, int] = {}
    return [
        Matrix(cost_of(held), numbers.setdefault(block, len(numbers)))
        for held, block in zip(kinds, blocks, strict=True)
    ]


def loads_of_stacks(stacks: Iterable[tuple[int, int, bool]], shard: int, replicate: int) -> list[int]:
    """Operations that each slot has to do for stacks of matrices, wherever its dense matrices go.

    As `fully_shard` cuts the first dim, and replicas share what they hold. Of one that expert parallelism has
    cut, all slots have a like part.

    Args:
        stacks: of each, how many matrices, the cost of one, and whether expert parallelism has cut it.
        shard, replicate: ranks of a row, and rows. Slots begin with those of the first row.
    """
    everywhere = 0
    costs: Counter[int] = Counter()  # of one matrix of each stack, by how many it has
    for count, cost, is_cut in stacks:
        if is_cut:
            everywhere += count * cost // shard
        else:
            costs[count] += cost
    loads = [everywhere] * (shard * replicate)
    for count, cost in costs.items():
        shares = [chunks(here, replicate) for here in chunks(count, shard)]
        for slot in range(len(loads)):
            loads[slot] += shares[slot % shard][slot // shard] * cost
    return loads


def choose_owners(
    matrices: Sequence[Matrix],
    slots: int,
    tp_groups: Sequence[tuple[int, ...]],
    *,
    loads: Sequence[int] | None = None,
) -> tuple[list[int], list[int]]:
    """The owner slot of each matrix, and the position of its TP owner in the group that holds its pieces.

    TP owners are balanced among the matrices of one slot and one TP group, by the same rule.

    Args:
        matrices, slots, loads: as for :func:`assign`.
        tp_groups: for each matrix the members of the TP group that holds its pieces; at most one if nothing
            cuts it, and its position is then 0.

    Raises:
        ValueError: as :func:`assign`.
    """
    owners = assign(matrices, slots, loads=loads)
    together: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
    for index, (slot, group) in enumerate(zip(owners, tp_groups, strict=True)):
        if len(group) > 1:
            together[slot, group].append(index)
    positions = [0] * len(matrices)
    for (_, group), indices in together.items():
        for index, position in zip(indices, assign([matrices[i] for i in indices], len(group)), strict=True):
            positions[index] = position
    return owners, positions


def assign(matrices: Sequence[Matrix], slots: int, *, loads: Sequence[int] | None = None) -> list[int]:
    """The slot of each matrix, in `range(slots)`, by LPT.

    Args:
        matrices: in module order, the same on every rank.
        slots: how many owners there can be, at least 1.
        loads: for each slot the operations that it has to do anyway; None is none.

    Raises:
        ValueError: `slots` is below 1, or `loads` has another length.
    """
    if slots < 1:
        raise ValueError(f"slots must be at least 1, got {slots}")
    now = [0] * slots if loads is None else list(loads)
    if len(now) != slots:
        raise ValueError(f"loads must have one number for each of {slots} slots, got {len(now)}")
    heap = sorted((load, slot) for slot, load in enumerate(now))
    heap_of: dict[int, list[tuple[int, int]]] = defaultdict(
        list
    )  # by group: of the slots that own some of it
    owners = [0] * len(matrices)
    for index in sorted(range(len(matrices)), key=lambda i: -matrices[i].cost):  # stable: module order
        cost, group = matrices[index]
        load, slot = _least(heap, now)
        mates = heap_of[group]
        if mates and _least(mates, now)[0] == load:
            slot = mates[0][1]
        else:  # no slot of the group has this load, so this one is not among them yet
            heappush(mates, (load, slot))
        now[slot] += cost
        owners[index] = slot
    return owners


def _least(heap: list[tuple[int, int]], now: Sequence[int]) -> tuple[int, int]:
    """The least load of the slots in a heap of (load, slot), and the lowest slot that has it.

    A slot is in several heaps, and only the heap that is looked at is brought up to date. Loads only grow, so
    an outdated entry comes up too early, never too late. It goes back with its load of now; the first entry
    that is right is therefore the least, exactly. A placement outdates one entry of a heap, at most.
    """
    while heap[0][0] != now[heap[0][1]]:
        slot = heap[0][1]
        heapreplace(heap, (now[slot], slot))
    return heap[0]


class Shareable(NamedTuple):
    """What the choice of teams needs to know of one parameter, whose owner has been chosen."""

    row: int  # the owner slot: its ranks hold the pieces
    size: int  # how many they are; 1 if nothing cuts the parameter, and each of them does all of it
    position: int  # of the TP owner among them
    alone: int  # what the TP owner has to do for it
    together: int | None  # what each of the ranks has to do if they are a team, travel included; None: cannot


def choose_teams(params: Sequence[Shareable]) -> set[int]:
    """Which parameters to give to teams, so that the busiest rank is done as soon as can be; by index.

    In each row, what the busiest rank waits for goes to the team: its most expensive matrix, then that of who
    is the busiest then, as long as there is any. No row goes further than it has to: only as far as the
    row that gains least this way, the one that all others wait for.
    """
    rows: dict[int, list[int]] = defaultdict(list)
    for index, param in enumerate(params):
        rows[param.row].append(index)
    shared = {row: _shared_one_by_one(params, indices) for row, indices in rows.items()}
    target = max((min(load for load, _ in steps) for steps in shared.values()), default=0)
    chosen: set[int] = set()
    for steps in shared.values():
        taken = [index for _, index in steps]
        enough = next(count for count, (load, _) in enumerate(steps) if load <= target)
        chosen.update(index for index in taken[1 : enough + 1] if index is not None)
    return chosen


def busiest_rank(params: Sequence[Shareable], shared: Collection[int]) -> int:
    """What the rank with most to do has to do, if the parameters `shared`, by index, have teams."""
    loads: dict[tuple[int, int], int] = defaultdict(int)
    everywhere: dict[int, int] = defaultdict(int)
    for index, param in enumerate(params):
        if index in shared:
            everywhere[param.row] += param.together or 0
        elif param.size == 1:
            everywhere[param.row] += param.alone
        else:
            loads[param.row, param.position] += param.alone
    of_rows = [load + everywhere[row] for (row, _), load in loads.items()]
    return max([*of_rows, *everywhere.values()], default=0)


def _shared_one_by_one(params: Sequence[Shareable], indices: Sequence[int]) -> list[tuple[int, int | None]]:
    """The busiest load of a row, at first and after each matrix that its ranks share, and which that was."""
    size = max(params[index].size for index in indices)
    loads = [0] * size
    able: list[list[int]] = [[] for _ in range(size)]  # of each position, the cheapest first
    for index in sorted(indices, key=lambda i: (params[i].alone, -i)):
        param = params[index]
        if param.size == 1:
            loads = [load + param.alone for load in loads]
            continue
        loads[param.position] += param.alone
        if param.together is not None and param.together < param.alone:
            able[param.position].append(index)
    steps: list[tuple[int, int | None]] = [(max(loads), None)]
    while able[busiest := loads.index(max(loads))]:
        index = able[busiest].pop()
        loads[busiest] -= params[index].alone
        loads = [load + (params[index].together or 0) for load in loads]
        steps.append((max(loads), index))
    return steps


def loads_of(matrices: Sequence[Matrix], owners: Sequence[int], slots: int) -> list[int]:
    """The operations of each slot's matrices."""
    loads = [0] * slots
    for matrix, owner in zip(matrices, owners, strict=True):
        loads[owner] += matrix.cost
    return loads


def lower_bound(matrices: Sequence[Matrix], slots: int) -> int:
    """Operations that the busiest slot has at least, whatever the assignment.

    It is the mean, rounded up, or a pigeonhole: of the k * slots + 1 most expensive matrices some slot takes
    k + 1, at best the cheapest of them. With k = 0 that is the most expensive one.
    """
    sums = [0, *accumulate(sorted((matrix.cost for matrix in matrices), reverse=True))]
    ks = range(-(-len(matrices) // slots))
    pigeonhole = max((sums[k * slots + 1] - sums[k * (slots - 1)] for k in ks), default=0)
    return max(-(-sums[-1] // slots), pigeonhole)


def imbalance(matrices: Sequence[Matrix], owners: Sequence[int], slots: int) -> float:
    """The busiest load over :func:`lower_bound`; 1.0 is perfect, and the answer where nothing has a cost."""
    bound = lower_bound(matrices, slots)
    return max(loads_of(matrices, owners, slots)) / bound if bound else 1.0
