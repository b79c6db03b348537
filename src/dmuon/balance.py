"""How many units of each kind every slot takes, so that the busiest one has as little as possible.

Steps 1 to 3 of `assignment.py`, which says why these.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heapreplace
from itertools import accumulate, combinations
from typing import NamedTuple, TypeAlias

_PAIRED_KINDS = 32  # kinds of units in one slot that are also offered in pairs
_REFINING_WORK = 200_000  # offers looked at in one refinement. Counted, not timed: ranks must agree


class Kind(NamedTuple):
    """Units of one kind can stand in for each other. Costs are integers, so their sums are exact."""

    cost: int
    numel: int


Content: TypeAlias = dict[Kind, int]  # how many units of each kind one slot takes


@dataclass(frozen=True)
class Unit:
    """One matrix, or a bundle of small matrices of one group."""

    kind: Kind
    group: int
    members: tuple[int, ...]  # positions of the matrices in canonical order


class Packing:
    """How many units of each kind every slot takes, and the slots in order of their loads."""

    def __init__(self, contents: list[Content]) -> None:
        self.contents = contents
        self.loads = [sum(kind.cost * count for kind, count in content.items()) for content in contents]
        self.by_load = sorted((load, slot) for slot, load in enumerate(self.loads))

    @property
    def busiest_load(self) -> int:
        """What a step takes."""
        return self.by_load[-1][0]

    def lighter_slots(self) -> Iterator[int]:
        """Slots below the busiest load, lightest first; of equal ones, which mostly hold equal units, one."""
        place = 0
        while self.by_load[place][0] < self.busiest_load:
            load, slot = self.by_load[place]
            yield slot
            place = bisect_right(self.by_load, (load, len(self.by_load)))

    def move(self, kinds: Sequence[Kind], source: int, target: int) -> None:
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


def pigeonhole_bound(units: Sequence[Unit], slots: int) -> int:
    """Of the ``k * slots + 1`` most expensive units some slot takes ``k + 1``, at best the cheapest ones."""
    sums = [0, *accumulate(unit.kind.cost for unit in units)]
    most = (len(units) - 1) // slots
    return max((sums[k * slots + 1] - sums[k * (slots - 1)] for k in range(1, most + 1)), default=0)


def balance(units: Sequence[Unit], slots: int, bound: Fraction, goal: int) -> Packing:
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


def _longest_first(supply: Sequence[tuple[Kind, int]], slots: int) -> Packing:
    """LPT; of equally loaded slots the one with the fewest units is next."""
    contents: list[Content] = [{} for _ in range(slots)]
    heap = [(0, 0, slot) for slot in range(slots)]  # load, units, slot
    for kind, count in supply:
        for _ in range(count):
            load, units, slot = heap[0]
            heapreplace(heap, (load + kind.cost, units + 1, slot))
            contents[slot][kind] = contents[slot].get(kind, 0) + 1
    return Packing(contents)


def _multifit(supply: Sequence[tuple[Kind, int]], slots: int, low: int, high: int) -> Packing | None:
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


def _best_fit(supply: Sequence[tuple[Kind, int]], slots: int, cap: int) -> Packing | None:
    """The most expensive first, each into the fullest slot that stays within ``cap``; None if one cannot."""
    contents: list[Content] = [{} for _ in range(slots)]
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
    return Packing(contents)


def _refine(packing: Packing, goal: int) -> None:
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


def _handfuls(content: Content) -> dict[int, tuple[Kind, ...]]:
    """None, one or two of a slot's units, by their total cost."""
    kinds = sorted(content)
    result: dict[int, tuple[Kind, ...]] = {0: ()}
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
    offers: dict[int, tuple[Kind, ...]], returns: dict[int, tuple[Kind, ...]], gap: int
) -> tuple[tuple[Kind, ...], tuple[Kind, ...]] | None:
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
