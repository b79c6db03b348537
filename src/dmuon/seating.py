"""Which unit of a kind goes to which slot: step 5 of `assignment.py`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush

from .balance import Kind, Packing, Unit

_SEATING_WORK = 500_000  # swaps looked at in one pass over the seats


def room_of_groups(units: Sequence[Unit], small_threshold: int) -> dict[int, int]:
    """By group: how many elements of small matrices one owner may hold."""
    room: dict[int, int] = {}
    for unit in units:
        room[unit.group] = max(room.get(unit.group, small_threshold), unit.kind.numel)
    return room


def seat(units: Sequence[Unit], packing: Packing, small_threshold: int) -> list[int]:
    """The slot of every unit; each slot takes as many of each kind as the packing says."""
    free: dict[Kind, list[tuple[int, int]]] = defaultdict(list)  # heaps of (-units still to take, slot)
    for slot, content in enumerate(packing.contents):
        for kind, count in content.items():
            free[kind].append((-count, slot))
    for heap in free.values():
        heapify(heap)
    waiting: dict[int, dict[Kind, list[int]]] = {}  # by group and kind
    for place, unit in enumerate(units):
        waiting.setdefault(unit.group, {}).setdefault(unit.kind, []).append(place)
    owners = [0] * len(units)
    for _, of_group in sorted(waiting.items()):
        crowd: Counter[int] = Counter()  # the group's units per slot
        for kind in sorted(of_group, key=lambda kind: (len(free[kind]), kind)):  # the least choice first
            _seat_kind(of_group[kind], free[kind], crowd, owners)
    large = [place for place, unit in enumerate(units) if unit.kind.numel >= small_threshold]
    small = [place for place, unit in enumerate(units) if unit.kind.numel < small_threshold]
    room = room_of_groups(units, small_threshold)
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
        self, units: Sequence[Unit], owners: list[int], places: Sequence[int], room: dict[int, int]
    ) -> None:
        self.units = units
        self.owners = owners
        self.places = places
        self.room = room
        self.work = _SEATING_WORK
        self.count: Counter[tuple[int, int]] = Counter()  # by group and slot: units
        self.elements: Counter[tuple[int, int]] = Counter()  # by group and slot
        self.sitting: dict[tuple[Kind, int], dict[int, None]] = {}  # by kind and slot: ordered set of units
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
