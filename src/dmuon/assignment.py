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
from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heapify, heappop, heappush, heapreplace
from itertools import accumulate, combinations
from typing import NamedTuple, TypeAlias

__all__ = ["SMALL_PARAM_THRESHOLD", "Matrix", "assign", "collectives", "imbalance", "loads", "lower_bound"]

SMALL_PARAM_THRESHOLD = 5_000_000
"""Elements: a matrix with fewer is small and may share an owner with other small ones of its group."""

_TOLERANCE = Fraction(1, 200)  # a busiest slot this close to the lower bound is not worth more work
_PACKINGS = 3  # attempts to pack bundles, with ever fewer of them
_OPEN_BUNDLES = 8  # the latest bundles of a group, into which a further small matrix may go
_PAIRED_KINDS = 32  # kinds of units in one slot that are also offered in pairs
_REFINING_WORK = 200_000  # offers looked at in one refinement. Counted, not timed: ranks must agree
_SEATING_WORK = 500_000  # swaps looked at in one pass over the seats


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
    packing = _balance(units, slots, bound, max(tolerated, _pigeonhole_bound(units, slots)))
    limit = max(tolerated, packing.busiest_load)
    bundled = _share(units, slots, bound, limit, small_threshold)
    if bundled is not None:
        units, packing = bundled
    owners = [0] * len(matrices)
    for unit, slot in zip(units, _seat(units, packing, small_threshold), strict=True):
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


# --- units: what goes to a slot as one ----------------------------------------------------------------------


class _Kind(NamedTuple):
    """Units of one kind can stand in for each other. Costs are integers, so their sums are exact."""

    cost: int
    numel: int


_Content: TypeAlias = dict[_Kind, int]  # how many units of each kind one slot takes


@dataclass(frozen=True)
class _Unit:
    """One matrix, or a bundle of small matrices of one group."""

    kind: _Kind
    group: int
    members: tuple[int, ...]  # positions of the matrices in canonical order


def _canonical_order(matrices: Sequence[Matrix]) -> list[int]:
    """Most expensive first. The caller's order decides only between equal matrices."""
    return sorted(
        range(len(matrices)), key=lambda i: (-matrices[i].cost, -matrices[i].numel, matrices[i].group, i)
    )


def _single_units(matrices: Sequence[Matrix]) -> list[_Unit]:
    costs = [Fraction(matrix.cost) for matrix in matrices]
    scale = math.lcm(*{cost.denominator for cost in costs})
    units = []
    for position, (cost, matrix) in enumerate(zip(costs, matrices, strict=True)):
        kind = _Kind(cost.numerator * (scale // cost.denominator), matrix.numel)
        units.append(_Unit(kind, matrix.group, (position,)))
    return units


def _sorted(units: Iterable[_Unit]) -> list[_Unit]:
    """In the order of the matrices: most expensive first."""
    return sorted(units, key=lambda unit: (-unit.kind.cost, -unit.kind.numel, unit.group, unit.members))


def _room(units: Sequence[_Unit], small_threshold: int) -> dict[int, int]:
    """By group: how many elements of small matrices one owner may hold."""
    room: dict[int, int] = {}
    for unit in units:
        room[unit.group] = max(room.get(unit.group, small_threshold), unit.kind.numel)
    return room


# --- balance: how many units of each kind a slot takes ------------------------------------------------------


class _Packing:
    """How many units of each kind every slot takes, and the slots in order of their loads."""

    def __init__(self, contents: list[_Content]) -> None:
        self.contents = contents
        self.loads = [sum(kind.cost * count for kind, count in content.items()) for content in contents]
        self.by_load = sorted((load, slot) for slot, load in enumerate(self.loads))

    @property
    def busiest_load(self) -> int:
        return self.by_load[-1][0]

    def lighter_slots(self) -> Iterator[int]:
        """Slots below the busiest load, lightest first; of equal ones, which mostly hold equal units, one."""
        place = 0
        while self.by_load[place][0] < self.busiest_load:
            load, slot = self.by_load[place]
            yield slot
            place = bisect_right(self.by_load, (load, len(self.by_load)))

    def move(self, kinds: Sequence[_Kind], source: int, target: int) -> None:
        """Take one unit of each of ``kinds`` from one slot to another."""
        for slot in (source, target):
            self.by_load.pop(bisect_left(self.by_load, (self.loads[slot], slot)))
        for kind in kinds:
            self.contents[source][kind] -= 1
            if not self.contents[source][kind]:
                del self.contents[source][kind]
            self.contents[target][kind] = self.contents[target].get(kind, 0) + 1
            self.loads[source] -= kind.cost
            self.loads[target] += kind.cost
        for slot in (source, target):
            insort(self.by_load, (self.loads[slot], slot))


def _pigeonhole_bound(units: Sequence[_Unit], slots: int) -> int:
    """Of the ``k * slots + 1`` most expensive units some slot takes ``k + 1``, at best the cheapest ones."""
    sums = [0, *accumulate(unit.kind.cost for unit in units)]
    most = (len(units) - 1) // slots
    return max((sums[k * slots + 1] - sums[k * (slots - 1)] for k in range(1, most + 1)), default=0)


def _balance(units: Sequence[_Unit], slots: int, bound: Fraction, goal: int) -> _Packing:
    """Pack until the busiest load is within the goal or nothing helps. It is never below ``bound``."""
    supply = sorted(Counter(unit.kind for unit in units).items(), reverse=True)
    packing = _longest_first(supply, slots)
    _refine(packing, goal)
    if packing.busiest_load > goal:
        other = _multifit(supply, slots, math.ceil(bound), packing.busiest_load)
        if other is not None:
            _refine(other, goal)
            return other
    return packing


def _longest_first(supply: Sequence[tuple[_Kind, int]], slots: int) -> _Packing:
    """LPT; of equally loaded slots the one with the fewest units is next."""
    contents: list[_Content] = [{} for _ in range(slots)]
    heap = [(0, 0, slot) for slot in range(slots)]  # load, units, slot
    for kind, count in supply:
        for _ in range(count):
            load, units, slot = heap[0]
            heapreplace(heap, (load + kind.cost, units + 1, slot))
            contents[slot][kind] = contents[slot].get(kind, 0) + 1
    return _Packing(contents)


def _multifit(supply: Sequence[tuple[_Kind, int]], slots: int, low: int, high: int) -> _Packing | None:
    """The best-fit packing under the lowest cap that bisection finds in ``low <= cap < high``, if any."""
    best = None
    precision = low // 1000
    while high - low > precision:
        cap = (low + high) // 2
        packing = _best_fit(supply, slots, cap)
        if packing is None:
            low = cap + 1
        else:
            best, high = packing, packing.busiest_load
    return best


def _best_fit(supply: Sequence[tuple[_Kind, int]], slots: int, cap: int) -> _Packing | None:
    """The most expensive first, each into the fullest slot that stays within ``cap``; None if one cannot."""
    contents: list[_Content] = [{} for _ in range(slots)]
    by_load = [(0, slot) for slot in range(slots)]
    for kind, count in supply:
        left = count
        while left:
            place = bisect_right(by_load, (cap - kind.cost, slots)) - 1
            if place < 0:
                return None
            load, slot = by_load.pop(place)
            taken = min(left, (cap - load) // kind.cost) if kind.cost else left
            contents[slot][kind] = taken  # a slot that is left has no room for another of this kind
            insort(by_load, (load + taken * kind.cost, slot))
            left -= taken
    return _Packing(contents)


def _refine(packing: _Packing, goal: int) -> None:
    """Relieve the busiest slot, one exchange after the other, down to the goal or until nothing helps."""
    work = _REFINING_WORK
    while packing.busiest_load > goal and work > 0:
        busiest = packing.by_load[-1][1]
        offers = _handfuls(packing.contents[busiest])
        for slot in packing.lighter_slots():
            returns = _handfuls(packing.contents[slot])
            work -= len(offers) + len(returns)
            exchange = _best_exchange(offers, returns, packing.busiest_load - packing.loads[slot])
            if exchange is not None:
                packing.move(exchange[0], busiest, slot)
                packing.move(exchange[1], slot, busiest)
                break
            if work <= 0:
                return
        else:
            return


def _handfuls(content: _Content) -> dict[int, tuple[_Kind, ...]]:
    """None, one or two of a slot's units, by their total cost."""
    kinds = sorted(content)
    result: dict[int, tuple[_Kind, ...]] = {0: ()}
    for kind in kinds:
        result.setdefault(kind.cost, (kind,))
    paired = kinds[:: len(kinds) // _PAIRED_KINDS + 1]
    for kind in paired:
        if content[kind] > 1:
            result.setdefault(2 * kind.cost, (kind, kind))
    for pair in combinations(paired, 2):
        result.setdefault(pair[0].cost + pair[1].cost, pair)
    return result


def _best_exchange(
    offers: dict[int, tuple[_Kind, ...]], returns: dict[int, tuple[_Kind, ...]], gap: int
) -> tuple[tuple[_Kind, ...], tuple[_Kind, ...]] | None:
    """What to give and take so that about half the gap moves, and more than none and less than all of it."""
    best = None
    nearest = gap
    prices = sorted(returns)
    for offer, given in offers.items():
        place = bisect_left(prices, offer - gap // 2)
        for price in prices[max(place - 1, 0) : place + 1]:
            distance = abs(2 * (offer - price) - gap)
            if distance < nearest:
                nearest, best = distance, (given, returns[price])
    return best


# --- sharing: small matrices that go to a slot as one -------------------------------------------------------


def _share(
    units: Sequence[_Unit], slots: int, bound: Fraction, limit: int, small_threshold: int
) -> tuple[list[_Unit], _Packing] | None:
    """The units in bundles, packed with a busiest load within ``limit``; None if no such packing is found."""
    bundles = _bundle(units, small_threshold, bound)
    for _ in range(_PACKINGS):
        if len(bundles) == len(units):
            return None
        packing = _balance(bundles, slots, bound, limit)
        if packing.busiest_load <= limit:
            return bundles, packing
        bundles = _untie(bundles, packing, limit, units)
    return None


def _bundle(units: Sequence[_Unit], small_threshold: int, cost_limit: Fraction) -> list[_Unit]:
    """Tie the small units of each group together, first fit, within the group's room and the cost limit."""
    room = _room(units, small_threshold)
    bundles: dict[int, list[_Unit]] = defaultdict(list)  # by group
    large = []
    for unit in units:
        if unit.kind.numel >= small_threshold:
            large.append(unit)
            continue
        of_group = bundles[unit.group]
        for place in range(max(len(of_group) - _OPEN_BUNDLES, 0), len(of_group)):
            old = of_group[place]
            kind = _Kind(old.kind.cost + unit.kind.cost, old.kind.numel + unit.kind.numel)
            if kind.cost <= cost_limit and kind.numel <= room[unit.group]:
                of_group[place] = _Unit(kind, unit.group, old.members + unit.members)
                break
        else:
            of_group.append(unit)
    return _sorted([*large, *(bundle for of_group in bundles.values() for bundle in of_group)])


def _untie(bundles: Sequence[_Unit], packing: _Packing, limit: int, units: Sequence[_Unit]) -> list[_Unit]:
    """Untie the most expensive bundle of each slot above the limit: a few loose units can level the rest."""
    tied = {bundle.kind for bundle in bundles if len(bundle.members) > 1}
    excess: Counter[_Kind] = Counter()
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


# --- seating: which unit of a kind goes to which slot -------------------------------------------------------


def _seat(units: Sequence[_Unit], packing: _Packing, small_threshold: int) -> list[int]:
    """The slot of every unit; each slot takes as many of each kind as the packing says."""
    free: dict[_Kind, list[tuple[int, int]]] = defaultdict(list)  # heaps of (-units still to take, slot)
    for slot, content in enumerate(packing.contents):
        for kind, count in content.items():
            free[kind].append((-count, slot))
    for heap in free.values():
        heapify(heap)
    waiting: dict[int, dict[_Kind, list[int]]] = {}  # by group and kind
    for place, unit in enumerate(units):
        waiting.setdefault(unit.group, {}).setdefault(unit.kind, []).append(place)
    owners = [0] * len(units)
    for _, of_group in sorted(waiting.items()):
        crowd: Counter[int] = Counter()  # the group's units per slot
        for kind in sorted(of_group, key=lambda kind: (len(free[kind]), kind)):  # the least choice first
            _seat_kind(of_group[kind], free[kind], crowd, owners)
    large = [place for place, unit in enumerate(units) if unit.kind.numel >= small_threshold]
    small = [place for place, unit in enumerate(units) if unit.kind.numel < small_threshold]
    room = _room(units, small_threshold)
    _Seats(units, owners, large, room).spread(len(packing.contents))
    _Seats(units, owners, small, room).gather()
    return owners


def _seat_kind(
    places: Sequence[int], free: list[tuple[int, int]], crowd: Counter[int], owners: list[int]
) -> None:
    """One group's units of one kind: to the slots least crowded by the group, the freest of these first."""
    waiting = list(reversed(places))
    allowed = 0
    while waiting:
        passed = []
        while waiting and free:
            count, slot = heappop(free)
            if crowd[slot] <= allowed:
                owners[waiting.pop()] = slot
                crowd[slot] += 1
                count += 1
            if count:
                passed.append((count, slot))
        for entry in passed:
            heappush(free, entry)
        allowed = min((crowd[slot] for _, slot in passed), default=0)


class _Seats:
    """Where the units at ``places`` sit. It swaps units of one kind, which changes no load."""

    def __init__(
        self, units: Sequence[_Unit], owners: list[int], places: Sequence[int], room: dict[int, int]
    ) -> None:
        self.units = units
        self.owners = owners
        self.places = places
        self.room = room
        self.work = _SEATING_WORK
        self.count: Counter[tuple[int, int]] = Counter()  # by group and slot: units
        self.elements: Counter[tuple[int, int]] = Counter()  # by group and slot
        self.sitting: dict[tuple[_Kind, int], dict[int, None]] = {}  # by kind and slot: ordered set of units
        for place in places:
            self._sit(place, owners[place])

    def spread(self, slots: int) -> None:
        """Leave fewer pairs of units of one group on one slot."""
        sizes = Counter(self.units[place].group for place in self.places)
        for place in self.places:
            if self.work < 0:
                return
            group = self.units[place].group
            if self.count[group, self.owners[place]] > -(-sizes[group] // slots):
                self._swap_first(place, range(slots), self._fewer_pairs)

    def gather(self) -> None:
        """Leave fewer slots per group, with no more of its elements on any than the group has room."""
        mates: dict[int, list[int]] = defaultdict(list)
        for place in self.places:
            mates[self.units[place].group].append(place)
        for place in self.places:
            if self.work < 0:
                return
            targets = {self.owners[mate] for mate in mates[self.units[place].group]}
            self._swap_first(place, sorted(targets), self._fewer_seats)

    def _swap_first(self, place: int, targets: Iterable[int], gain: Callable[[int, int], int]) -> None:
        """Swap with the first unit on a target slot for which that is a gain."""
        kind = self.units[place].kind
        for target in targets:
            self.work -= 1
            for other in self.sitting.get((kind, target), ()):
                self.work -= 1
                if gain(place, other) > 0:
                    self._swap(place, other)
                    return

    def _fewer_pairs(self, place: int, other: int) -> int:
        group, guest = self.units[place].group, self.units[other].group
        slot, target = self.owners[place], self.owners[other]
        if group == guest or slot == target:
            return 0
        before = self.count[group, slot] - 1 + self.count[guest, target] - 1
        return before - self.count[group, target] - self.count[guest, slot]

    def _fewer_seats(self, place: int, other: int) -> int:
        group, guest = self.units[place].group, self.units[other].group
        slot, target = self.owners[place], self.owners[other]
        if group == guest or slot == target or not (self._fits(place, target) and self._fits(other, slot)):
            return 0
        before = (self.count[group, slot] == 1) + (self.count[guest, target] == 1)
        return before - (not self.count[group, target]) - (not self.count[guest, slot])

    def _fits(self, place: int, slot: int) -> bool:
        unit = self.units[place]
        return self.elements[unit.group, slot] + unit.kind.numel <= self.room[unit.group]

    def _swap(self, place: int, other: int) -> None:
        slot, target = self._leave(place), self._leave(other)
        self._sit(place, target)
        self._sit(other, slot)

    def _sit(self, place: int, slot: int) -> None:
        unit = self.units[place]
        self.owners[place] = slot
        self.count[unit.group, slot] += 1
        self.elements[unit.group, slot] += unit.kind.numel
        self.sitting.setdefault((unit.kind, slot), {})[place] = None

    def _leave(self, place: int) -> int:
        unit, slot = self.units[place], self.owners[place]
        self.count[unit.group, slot] -= 1
        self.elements[unit.group, slot] -= unit.kind.numel
        del self.sitting[unit.kind, slot][place]
        return slot
