"""Who owns each matrix: slots that all have about the same orthogonalization work.

A *slot* is one place that can own matrices: a coordinate of the data-parallel mesh, or one rank of an owner
row. A step is over when the busiest slot is done, so the first aim is its load, the sum of the costs of its
matrices. The second aim is cheap collectives: a group's matrices are broadcast together, so the large ones
should come from several owners at once, while small ones, whose collective is mostly start-up time, do better
in one packed buffer of one owner.

:func:`assign` is deterministic, computes with exact integers, and goes like this:

1. Longest processing time first (LPT: Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl.
   Math. 17, 1969): the most expensive matrix goes to the least loaded slot, and so on. The busiest slot gets
   at most 4/3 - 1/(3 slots) times the least possible load.
2. Refinement: the busiest slot gives up to two matrices to another slot and takes up to two back, for as long
   as that relieves it.
3. If that is not close enough to the lower bound, a second start: best fit decreasing under a cap that
   bisection lowers (after MULTIFIT: Coffman, Garey, Johnson, "An application of bin-packing to multiprocessor
   scheduling", SIAM J. Comput. 7, 1978), refined likewise. LPT gives every slot about the same mix of shapes,
   and exchanges between two slots do not turn this into "these slots take one shape, those another", which
   some models need.
4. Sharing: the small matrices of each group are tied into bundles, and the bundles go through steps 1 to 3.
   Slots that then have too much have a bundle untied, and again; the bundles are dropped if that fails.
5. Seating: which of several equal matrices a slot takes is still free. It is chosen so that a group's large
   matrices lie on different slots and its small ones together. No load depends on it.

Rejected:

* An integer linear program. It needs a solver, its time has no useful bound, and solvers may differ in which
  of several optima they return, where every rank has to find the same owners.
* Round robin. It counts matrices, not work: if the slots are a multiple of the matrices per layer, some slots
  get nothing but the largest shape. Dealing out whole layers instead has nothing to deal with when there are
  more slots than layers, and puts each group on one owner.
* Balancing elements. A square matrix takes more operations per element than a long one with the same short
  side.
* Names to break ties. They differ between a wrapped and an unwrapped model; cost, size and position do not.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from .balance import Kind, Packing, Unit, balance, pigeonhole_bound
from .seating import room_of_groups, seat

__all__ = ["SMALL_PARAM_THRESHOLD", "Matrix", "assign", "collectives", "imbalance", "loads", "lower_bound"]

SMALL_PARAM_THRESHOLD = 5_000_000
"""Elements: a matrix with fewer is small and may share an owner with other small ones of its group."""

_TOLERANCE = Fraction(1, 200)  # a busiest slot this close to the lower bound is not worth more work
_PACKINGS = 3  # attempts to pack bundles, with ever fewer of them
_OPEN_BUNDLES = 8  # the latest bundles of a group, into which a further small matrix may go


@dataclass(frozen=True)
class Matrix:
    """What the assignment needs to know of one matrix.

    Attributes:
        cost: operations of its orthogonalization, finite and not negative; only ratios matter.
        numel: its number of elements.
        group: index of the hook boundary whose collectives it shares.
    """

    cost: float
    numel: int
    group: int


def assign(
    matrices: Sequence[Matrix], slots: int, *, small_threshold: int = SMALL_PARAM_THRESHOLD
) -> list[int]:
    """Choose the owner slot of every matrix.

    The busiest load is at most LPT's or, where small matrices share, 1.005 times :func:`lower_bound` if that
    is more. Nothing but the arguments decides. Reordering the matrices reorders the result likewise, except
    that matrices equal in cost, numel and group may change places.

    Args:
        matrices: in the same order on every rank.
        slots: how many owners there can be, at least 1.
        small_threshold: in elements. A group's matrices with fewer are put together on one owner, up to this
            many elements or as many as the group's largest matrix has: a larger buffer would be the group's
            slowest broadcast. 0 turns sharing off.

    Returns:
        For each matrix the index of its owner, in ``range(slots)``.

    Raises:
        ValueError: ``slots`` is below 1, or a cost or numel is negative or not finite.
    """
    _check(matrices, slots)
    if not matrices:
        return []
    order = _canonical_order(matrices)
    units = _single_units([matrices[index] for index in order])
    bound = max(Fraction(sum(unit.kind.cost for unit in units), slots), Fraction(units[0].kind.cost))
    tolerated = math.floor(bound * (1 + _TOLERANCE))
    packing = balance(units, slots, bound, max(tolerated, pigeonhole_bound(units, slots)))
    limit = max(tolerated, packing.busiest_load)
    bundled = _share(units, slots, bound, limit, small_threshold)
    if bundled is not None:
        units, packing = bundled
    owners = [0] * len(matrices)
    for unit, slot in zip(units, seat(units, packing, small_threshold), strict=True):
        for member in unit.members:
            owners[order[member]] = slot
    return owners


def loads(matrices: Sequence[Matrix], owners: Sequence[int], slots: int) -> list[float]:
    """Sum of the costs of each slot's matrices, whatever their order. One number per slot."""
    costs: list[list[float]] = [[] for _ in range(slots)]
    for matrix, owner in zip(matrices, owners, strict=True):
        costs[owner].append(matrix.cost)
    return [math.fsum(of_slot) for of_slot in costs]


def lower_bound(matrices: Sequence[Matrix], slots: int) -> float:
    """The larger of the mean load and the largest cost: no assignment has a busiest slot below it.

    Raises:
        ValueError: as :func:`assign`.
    """
    _check(matrices, slots)
    costs = [matrix.cost for matrix in matrices]
    return max(math.fsum(costs) / slots, float(max(costs, default=0.0)))


def imbalance(matrices: Sequence[Matrix], owners: Sequence[int], slots: int) -> float:
    """Busiest load over :func:`lower_bound`; 1.0 is perfect, and the answer where there is no cost at all."""
    bound = lower_bound(matrices, slots)
    return max(loads(matrices, owners, slots)) / bound if bound else 1.0


def collectives(matrices: Sequence[Matrix], owners: Sequence[int]) -> int:
    """Distinct pairs of group and owner: the packed buffers in one gather of every group."""
    return len({(matrix.group, owner) for matrix, owner in zip(matrices, owners, strict=True)})


def _check(matrices: Sequence[Matrix], slots: int) -> None:
    if slots < 1:
        raise ValueError(f"slots must be at least 1, got {slots}")
    for index, matrix in enumerate(matrices):
        if not (math.isfinite(matrix.cost) and matrix.cost >= 0):
            raise ValueError(f"matrix {index}: cost must be finite and not negative, got {matrix.cost}")
        if matrix.numel < 0:
            raise ValueError(f"matrix {index}: numel must not be negative, got {matrix.numel}")


def _canonical_order(matrices: Sequence[Matrix]) -> list[int]:
    """Most expensive first. The caller's order decides only between equal matrices."""
    return sorted(
        range(len(matrices)), key=lambda i: (-matrices[i].cost, -matrices[i].numel, matrices[i].group, i)
    )


def _single_units(matrices: Sequence[Matrix]) -> list[Unit]:
    costs = [Fraction(matrix.cost) for matrix in matrices]
    scale = math.lcm(*{cost.denominator for cost in costs})
    units = []
    for position, (cost, matrix) in enumerate(zip(costs, matrices, strict=True)):
        kind = Kind(cost.numerator * (scale // cost.denominator), matrix.numel)
        units.append(Unit(kind, matrix.group, (position,)))
    return units


def _sorted(units: Iterable[Unit]) -> list[Unit]:
    """In the order of the matrices: most expensive first."""
    return sorted(units, key=lambda unit: (-unit.kind.cost, -unit.kind.numel, unit.group, unit.members))


def _share(
    units: Sequence[Unit], slots: int, bound: Fraction, limit: int, small_threshold: int
) -> tuple[list[Unit], Packing] | None:
    """The units in bundles, packed with a busiest load within ``limit``; None if no such packing is found."""
    bundles = _bundle(units, small_threshold, bound)
    for _ in range(_PACKINGS):
        if len(bundles) == len(units):
            return None
        packing = balance(bundles, slots, bound, limit)
        if packing.busiest_load <= limit:
            return bundles, packing
        bundles = _untie(bundles, packing, limit, units)
    return None


def _bundle(units: Sequence[Unit], small_threshold: int, cost_limit: Fraction) -> list[Unit]:
    """Tie the small units of each group together, first fit, within the group's room and the cost limit."""
    room = room_of_groups(units, small_threshold)
    bundles: dict[int, list[Unit]] = defaultdict(list)  # by group
    large = []
    for unit in units:
        if unit.kind.numel >= small_threshold:
            large.append(unit)
            continue
        of_group = bundles[unit.group]
        for place in range(max(len(of_group) - _OPEN_BUNDLES, 0), len(of_group)):
            old = of_group[place]
            kind = Kind(old.kind.cost + unit.kind.cost, old.kind.numel + unit.kind.numel)
            if kind.cost <= cost_limit and kind.numel <= room[unit.group]:
                of_group[place] = Unit(kind, unit.group, old.members + unit.members)
                break
        else:
            of_group.append(unit)
    return _sorted([*large, *(bundle for of_group in bundles.values() for bundle in of_group)])


def _untie(bundles: Sequence[Unit], packing: Packing, limit: int, units: Sequence[Unit]) -> list[Unit]:
    """Untie the most expensive bundle of each slot above the limit: a few loose units can level the rest."""
    tied = {bundle.kind for bundle in bundles if len(bundle.members) > 1}
    excess: Counter[Kind] = Counter()
    for content, load in zip(packing.contents, packing.loads, strict=True):
        if load > limit:
            excess.update(sorted(tied & content.keys())[-1:])
    result = []
    for bundle in bundles:
        if excess[bundle.kind] and len(bundle.members) > 1:
            excess[bundle.kind] -= 1
            result += [units[member] for member in bundle.members]
        else:
            result.append(bundle)
    return _sorted(result)
