"""Assignment of matrices to owners: balance, spreading, sharing, and what must not change the result."""

import heapq
import math
import random
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmuon.assignment import (
    SMALL_PARAM_THRESHOLD,
    Matrix,
    assign,
    collectives,
    imbalance,
    loads,
    lower_bound,
)

# Hidden-layer matrices of published models, as (rows, columns) of every layer, and the number of layers.
MODELS = {
    "gpt2-xl": (48, [(4800, 1600), (1600, 1600), (6400, 1600), (1600, 6400)]),
    "llama3-8b": (32, [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 2 + [(4096, 14336)]),
    "llama3-70b": (80, [(8192, 8192)] * 2 + [(1024, 8192)] * 2 + [(28672, 8192)] * 2 + [(8192, 28672)]),
    "qwen2.5-7b": (28, [(3584, 3584)] * 2 + [(512, 3584)] * 2 + [(18944, 3584)] * 2 + [(3584, 18944)]),
    "vit-h": (32, [(3840, 1280), (1280, 1280), (5120, 1280), (1280, 5120)]),
    "mixtral-8x7b": (
        32,
        [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 16 + [(4096, 14336)] * 8,
    ),
    # Not among the balance tests' models; for sharing and speed.
    "gpt2": (12, [(2304, 768), (768, 768), (3072, 768), (768, 3072)]),
    "llama3-405b": (126, [(16384, 16384)] * 2 + [(1024, 16384)] * 2 + [(53248, 16384)] * 3),
    "qwen3-30b-a3b": (48, [(4096, 2048), (2048, 4096)] + [(512, 2048)] * 2 + [(768, 2048)] * 384),
    "large-experts": (61, [(2048, 7168)] * 768),
}
BALANCED = ["gpt2-xl", "llama3-8b", "llama3-70b", "qwen2.5-7b", "vit-h", "mixtral-8x7b"]
SLOTS = [2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]


def newton_schulz_cost(rows: int, columns: int) -> int:
    """Operations of five steps: two products with the m x n matrix and one of m x m each, 2mnk apiece."""
    m, n = min(rows, columns), max(rows, columns)
    return 5 * (2 * m * m * n + 2 * m * m * m + 2 * m * m * n)


def model(name: str) -> list[Matrix]:
    layers, shapes = MODELS[name]
    return [Matrix(newton_schulz_cost(*s), s[0] * s[1], layer) for layer in range(layers) for s in shapes]


def large(costs, group=None) -> list[Matrix]:
    """Matrices too large to share an owner, each its own group unless told otherwise."""
    return [Matrix(c, SMALL_PARAM_THRESHOLD, i if group is None else group) for i, c in enumerate(costs)]


def busiest(matrices: list[Matrix], slots: int, **options) -> float:
    return max(loads(matrices, assign(matrices, slots, **options), slots))


def plain_lpt(costs, slots: int) -> float:
    heap = [0] * slots
    for cost in sorted(costs, reverse=True):
        heapq.heapreplace(heap, heap[0] + cost)
    return max(heap)


def optimum(costs, slots: int) -> float:
    """Least possible busiest load, by branch and bound; for few matrices."""
    costs = sorted(costs, reverse=True)
    best = sum(costs)

    def place(index, slot_loads):
        nonlocal best
        if max(slot_loads) >= best:
            return
        if index == len(costs):
            best = max(slot_loads)
            return
        for slot in {load: s for s, load in enumerate(slot_loads)}.values():  # equal slots: one is enough
            slot_loads[slot] += costs[index]
            place(index + 1, slot_loads)
            slot_loads[slot] -= costs[index]

    place(0, [0] * slots)
    return best


def cannot_fit(costs: list[int], slots: int, cap: int) -> bool:
    """Whether it is proven that no assignment keeps every slot within ``cap``.

    A proof is a weight per cost such that a slot within the cap has at most weight W, and all together have
    more than ``slots * W``. Tried are dual feasible functions (Fekete and Schepers, "New classes of fast
    lower bounds for bin packing problems", Math. Programming 91, 2001) and small weights on two of the costs.
    """
    counts = Counter(costs)

    def total(weight):
        return sum(weight(cost) * count for cost, count in counts.items())

    def staircase(cost, k):  # W is k * (k + 1)
        steps, rest = divmod((k + 1) * cost, cap)
        return steps * (k + 1) if rest else steps * k

    if max(counts) > cap:
        return True
    for small in (e for e in counts if 2 * e <= cap):  # what leaves less room than `small` fills its slot
        if total(lambda c, e=small: cap if c > cap - e else 0 if c < e else c) > slots * cap:
            return True
    if any(total(lambda c, k=k: staircase(c, k)) > slots * k * (k + 1) for k in range(1, 21)):
        return True
    first, second = sorted(counts, reverse=True)[:2]
    fillings = [(i, (cap - i * first) // second) for i in range(cap // first + 1)]
    return any(
        a * counts[first] + b * counts[second] > slots * max(a * i + b * j for i, j in fillings)
        for a in range(8)
        for b in range(8)
    )


def crowded_pairs(matrices: list[Matrix], owners: list[int]) -> int:
    """Pairs of large matrices of one group that have the same owner."""
    seats = Counter(
        (m.group, o) for m, o in zip(matrices, owners, strict=True) if m.numel >= SMALL_PARAM_THRESHOLD
    )
    return sum(count * (count - 1) // 2 for count in seats.values())


# --- balance ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BALANCED)
def test_published_models_are_within_two_percent_of_what_is_possible(name):
    matrices = model(name)
    costs = [matrix.cost for matrix in matrices]
    for slots in SLOTS:
        load = busiest(matrices, slots)
        assert load <= 1.02 * lower_bound(matrices, slots) or cannot_fit(costs, slots, int(load / 1.02)), (
            slots
        )


@pytest.mark.parametrize("name", BALANCED)
@pytest.mark.parametrize("slots", [2, 4, 8])
def test_one_machine_is_balanced_to_half_a_percent(name, slots):
    matrices = model(name)
    assert imbalance(matrices, assign(matrices, slots), slots) <= 1.005


def test_gpt2_xl_on_eight_slots_is_perfect():
    matrices = model("gpt2-xl")
    owners = assign(matrices, 8)
    assert len(set(loads(matrices, owners, 8))) == 1
    assert imbalance(matrices, owners, 8) == 1.0
    assert crowded_pairs(matrices, owners) == 0


def test_the_proof_helper_does_not_prove_what_is_false():
    rng = random.Random(5)
    proven = 0
    for _ in range(300):
        slots = rng.randint(2, 4)
        costs = [rng.choice([3, 5, 7, 8, 11]) for _ in range(rng.randint(slots + 1, 9))] + [2, 13]
        best = optimum(costs, slots)
        assert not cannot_fit(costs, slots, best)
        proven += cannot_fit(costs, slots, best - 1)
    assert proven > 200


@pytest.mark.parametrize("slots", range(2, 9))
def test_graham_worst_case_for_lpt_is_solved(slots):
    costs = [c for c in range(slots + 1, 2 * slots) for _ in range(2)] + [slots] * 3
    assert plain_lpt(costs, slots) == 4 * slots - 1
    assert busiest(large(costs), slots) == 3 * slots


def test_lpt_alone_is_not_enough_for_real_models():
    # LPT is 3.8 % above the lower bound in the first case and 1.6 % in the second.
    for name, slots, most in (("llama3-70b", 48, 1.018), ("llama3-8b", 12, 1.005)):
        matrices = model(name)
        bound = most * lower_bound(matrices, slots)
        assert plain_lpt([m.cost for m in matrices], slots) > bound
        assert busiest(matrices, slots) <= bound


def test_different_costs_are_balanced_to_half_a_percent_on_average():
    rng = random.Random(0)
    values = []
    for _ in range(30):
        matrices = large(rng.randint(100, 1000) for _ in range(60))
        values.append(imbalance(matrices, assign(matrices, 16), 16))
    assert sum(values) / len(values) <= 1.0055  # exchanges of single matrices alone leave 1.0067
    assert max(values) <= 1.02


def test_small_cases_are_nearly_always_optimal():
    rng = random.Random(0)
    ratios = []
    for _ in range(400):
        slots = rng.randint(2, 4)
        top = rng.choice([10, 30, 1000])
        costs = [rng.randint(1, top) for _ in range(rng.randint(slots + 1, 9))]
        ratios.append(busiest(large(costs), slots) / optimum(costs, slots))
    assert sum(ratio == 1 for ratio in ratios) > 0.97 * len(ratios)
    assert max(ratios) <= 1.1


costs_and_slots = st.tuples(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.integers(1, 4))
matrix_lists = st.lists(
    st.builds(
        Matrix,
        cost=st.one_of(st.integers(0, 20), st.floats(0, 100), st.sampled_from([1.5, 7.0, 30.25])),
        numel=st.sampled_from([0, 1000, 2_000_000, 4_999_999, 5_000_000, 80_000_000]),
        group=st.integers(-1, 4),
    ),
    max_size=60,
)
slot_counts = st.one_of(st.integers(1, 9), st.integers(1, 100))
checked = settings(deadline=None, max_examples=150)  # a busy machine is no failure


@checked
@given(costs_and_slots)
def test_never_beyond_the_guarantee_of_lpt(case):
    costs, slots = case
    assert busiest(large(costs), slots) <= (4 / 3 - 1 / (3 * slots)) * optimum(costs, slots) + 1e-9


@checked
@given(st.lists(st.integers(0, 10**15), min_size=1, max_size=80), slot_counts)
def test_never_worse_than_plain_lpt(costs, slots):
    assert busiest(large(costs), slots) <= plain_lpt(costs, slots)
    assert busiest(large(costs, group=0), slots) <= plain_lpt(costs, slots)


@checked
@given(matrix_lists, slot_counts)
def test_every_matrix_has_an_owner_and_the_busiest_is_bounded(matrices, slots):
    owners = assign(matrices, slots)
    assert len(owners) == len(matrices)
    assert all(type(owner) is int and 0 <= owner < slots for owner in owners)
    most = max(loads(matrices, owners, slots))
    bound = lower_bound(matrices, slots)
    assert most >= bound * (1 - 1e-12)
    lpt = plain_lpt([m.cost for m in matrices], slots)
    assert most <= max(lpt, 1.005 * bound) * (1 + 1e-12)


# --- what must not matter -----------------------------------------------------------------------------------


@checked
@given(matrix_lists, slot_counts, st.randoms(use_true_random=False))
def test_order_only_matters_between_equal_matrices(matrices, slots, rng):
    order = list(range(len(matrices)))
    rng.shuffle(order)
    shuffled = [matrices[i] for i in order]
    before, after = assign(matrices, slots), assign(shuffled, slots)
    assert Counter(zip(matrices, before, strict=True)) == Counter(zip(shuffled, after, strict=True))
    assert loads(matrices, before, slots) == loads(shuffled, after, slots)


def test_order_does_not_matter_between_bundles_that_look_alike():
    # Of the two matrices 7 and 12 a bundle can be made that is just like the matrix 19.
    matrices = [Matrix(c, 0, 0) for c in (7, 12, 19, 0, 0, 0, 0)] + [Matrix(c, 0, 1) for c in (3, 4, 7, 2)]
    rng = random.Random(0)
    for slots in (2, 3, 4):
        expected = Counter(zip(matrices, assign(matrices, slots), strict=True))
        for _ in range(100):
            shuffled = rng.sample(matrices, len(matrices))
            assert Counter(zip(shuffled, assign(shuffled, slots), strict=True)) == expected


@checked
@given(matrix_lists, slot_counts)
def test_the_unit_of_cost_does_not_matter(matrices, slots):
    scaled = [Matrix(m.cost * 1024, m.numel, m.group) for m in matrices]
    assert assign(matrices, slots) == assign(scaled, slots) == assign(list(matrices), slots)


def test_integer_and_float_costs_agree():
    matrices = model("gpt2-xl")
    floats = [Matrix(float(m.cost), m.numel, m.group) for m in matrices]
    assert assign(matrices, 6) == assign(floats, 6)


# --- edges --------------------------------------------------------------------------------------------------


def test_empty():
    assert assign([], 3) == []
    assert loads([], [], 3) == [0.0, 0.0, 0.0]
    assert lower_bound([], 3) == 0.0
    assert imbalance([], [], 3) == 1.0
    assert collectives([], []) == 0


def test_one_slot_owns_all():
    assert assign(model("gpt2"), 1) == [0] * 48


def test_fewer_matrices_than_slots_have_an_owner_each():
    matrices = large([5, 1, 3, 3, 2])
    assert len(set(assign(matrices, 9))) == 5
    assert len(set(assign(matrices, 5))) == 5


@pytest.mark.parametrize("numel", [10, SMALL_PARAM_THRESHOLD])
def test_without_cost_nothing_breaks(numel):
    matrices = [Matrix(0, numel, i // 4) for i in range(12)]
    owners = assign(matrices, 4)
    assert imbalance(matrices, owners, 4) == 1.0
    assert set(Counter(owners).values()) == ({3} if numel >= SMALL_PARAM_THRESHOLD else {4})


@pytest.mark.parametrize("cost", [-1, -0.5, math.nan, math.inf])
def test_bad_costs_are_refused(cost):
    matrices = [Matrix(1.0, 1, 0), Matrix(cost, 1, 0)]
    with pytest.raises(ValueError, match="matrix 1: cost"):
        assign(matrices, 2)
    with pytest.raises(ValueError, match="matrix 1: cost"):
        lower_bound(matrices, 2)


def test_other_bad_arguments_are_refused():
    for slots in (0, -1):
        with pytest.raises(ValueError, match="slots"):
            assign([], slots)
        with pytest.raises(ValueError, match="slots"):
            lower_bound([], slots)
    with pytest.raises(ValueError, match="matrix 0: numel"):
        assign([Matrix(1, -1, 0)], 2)


def test_measures_by_hand():
    matrices = [Matrix(4, 1, 0), Matrix(1, 1, 0), Matrix(2.5, 1, 1), Matrix(0.5, 1, 1)]
    owners = [0, 1, 1, 1]
    assert loads(matrices, owners, 3) == [4.0, 4.0, 0.0]
    assert lower_bound(matrices, 3) == 4.0  # the largest matrix
    assert lower_bound(matrices, 1) == 8.0  # the mean
    assert imbalance(matrices, [0, 0, 0, 1], 2) == 7.5 / 4
    assert collectives(matrices, owners) == 3


# --- large matrices of a group apart ------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [1000, SMALL_PARAM_THRESHOLD])
def test_one_group_of_four_equal_matrices_has_four_owners(numel):
    assert sorted(assign([Matrix(3, numel, 0)] * 4, 4)) == [0, 1, 2, 3]


@pytest.mark.parametrize(("groups", "per_group", "slots"), [(10, 4, 4), (7, 3, 5), (30, 8, 16), (5, 8, 8)])
def test_equal_large_matrices_of_a_group_have_different_owners(groups, per_group, slots):
    matrices = [Matrix(7, SMALL_PARAM_THRESHOLD, i // per_group) for i in range(groups * per_group)]
    owners = assign(matrices, slots)
    assert crowded_pairs(matrices, owners) == 0
    assert max(loads(matrices, owners, slots)) == 7 * math.ceil(len(matrices) / slots)


@pytest.mark.parametrize("name", ["gpt2-xl", "llama3-8b", "llama3-70b", "qwen2.5-7b", "vit-h"])
@pytest.mark.parametrize("slots", [8, 24, 32, 64, 128])
def test_large_matrices_of_a_layer_have_different_owners(name, slots):
    matrices = model(name)
    assert crowded_pairs(matrices, assign(matrices, slots)) == 0


def test_a_group_larger_than_the_slots_is_spread_evenly():
    matrices = [m for m in model("mixtral-8x7b") if m.numel >= 5e7]  # 24 equal experts per layer
    owners = assign(matrices, 16)
    per_slot = Counter((m.group, owner) for m, owner in zip(matrices, owners, strict=True))
    assert set(per_slot.values()) == {1, 2}
    assert imbalance(matrices, owners, 16) == 1.0


@pytest.mark.parametrize("name", BALANCED)
def test_spreading_costs_no_balance(name):
    matrices = model(name)
    alone = [Matrix(m.cost, m.numel, i) for i, m in enumerate(matrices)]  # nothing to spread or to share
    for slots in (3, 8, 48):
        spread = loads(matrices, assign(matrices, slots, small_threshold=0), slots)
        assert spread == loads(alone, assign(alone, slots), slots)


@checked
@given(matrix_lists, slot_counts)
def test_groups_change_no_load_without_sharing(matrices, slots):
    alone = [Matrix(m.cost, m.numel, i) for i, m in enumerate(matrices)]
    spread = loads(matrices, assign(matrices, slots, small_threshold=0), slots)
    assert spread == loads(alone, assign(alone, slots), slots)


# --- small matrices of a group together ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "slots", "most"),
    [
        ("gpt2", 4, 0.5),
        ("gpt2", 8, 0.75),  # bundles do not level out here; equal matrices change places
        ("gpt2", 12, 0.5),
        ("vit-h", 8, 0.75),
        ("llama3-8b", 8, 6 / 7),
        ("llama3-8b", 64, 6 / 7),
        ("qwen2.5-7b", 256, 6 / 7),  # more slots than matrices
        ("qwen3-30b-a3b", 512, 0.3),  # some bundles have to be untied
    ],
)
def test_sharing_saves_collectives_and_no_balance(name, slots, most):
    matrices = model(name)
    shared, single = assign(matrices, slots), assign(matrices, slots, small_threshold=0)
    assert collectives(matrices, shared) <= most * len(matrices)
    assert collectives(matrices, shared) < collectives(matrices, single)
    limit = max(imbalance(matrices, single, slots), 1.005)
    assert imbalance(matrices, shared, slots) <= limit


def test_key_and_value_projections_share_an_owner():
    matrices = model("llama3-8b")
    owners = assign(matrices, 16)
    for layer in range(32):
        keys, values = owners[7 * layer + 2], owners[7 * layer + 3]
        assert keys == values
    assert imbalance(matrices, owners, 16) <= 1.005


def test_sharing_stops_at_the_threshold_and_at_the_largest_matrix():
    small = [Matrix(1, 2_000_000, group) for group in range(8) for _ in range(4)]
    together = Counter(zip((m.group for m in small), assign(small, 4), strict=True))
    assert set(together.values()) == {2}  # 4 million elements each, and not 6
    mixed = small + [Matrix(4, 6_500_000, group) for group in range(8)]
    owners = assign(mixed, 4)
    together = Counter((m.group, owner) for m, owner in zip(small, owners, strict=False))
    assert max(together.values()) == 3
    assert imbalance(mixed, owners, 4) <= 1.005


def test_a_matrix_of_the_threshold_is_not_small():
    for numel, owners_per_group in ((SMALL_PARAM_THRESHOLD - 1, 1), (SMALL_PARAM_THRESHOLD, 2)):
        companion = [Matrix(9, 3 * SMALL_PARAM_THRESHOLD, group) for group in range(8)]  # makes room
        matrices = [Matrix(3, numel, group) for group in range(8) for _ in range(2)]
        owners = assign(matrices + companion, 4)[: len(matrices)]
        assert collectives(matrices, owners) == 8 * owners_per_group


def test_bundles_are_no_larger_than_a_slot_can_take():
    matrices = [Matrix(cost, 1000, group) for group in range(2) for cost in [10] * 8]
    owners = assign(matrices, 4)  # 80 of cost per group, 40 per slot
    assert imbalance(matrices, owners, 4) == 1.0
    assert collectives(matrices, owners) == 4


def test_sharing_gives_way_to_balance():
    matrices = [Matrix(1, 1000, 0)] * 2 + [Matrix(1, 1000, 1)] * 2
    assert sorted(assign(matrices, 4)) == [0, 1, 2, 3]
    owners = assign(matrices, 2)
    assert owners[0] == owners[1] != owners[2] == owners[3]


def test_matrices_of_different_groups_are_not_tied():
    matrices = [Matrix(1, 1000, group) for group in range(16)]
    assert set(Counter(assign(matrices, 4)).values()) == {4}
    assert collectives(matrices, assign(matrices, 4)) == 16


# --- speed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "slots", "most"),
    [
        ("llama3-405b", 16_384, 1.0),
        ("large-experts", 2_048, 1.006),  # 46,848 equal matrices: 23 where the mean is 22.9
    ],
)
def test_large_models_take_seconds(name, slots, most):
    matrices = model(name)
    start = time.process_time()
    owners = assign(matrices, slots)
    assert time.process_time() - start < 3.0
    assert imbalance(matrices, owners, slots) <= most


@settings(max_examples=3, deadline=None)
@given(st.integers(0, 2**32))
def test_thousands_of_different_costs_take_seconds(seed):
    rng = random.Random(seed)
    matrices = [Matrix(rng.lognormvariate(0, 1), rng.randrange(10**7), i // 7) for i in range(10_000)]
    start = time.process_time()
    owners = assign(matrices, 512)
    assert time.process_time() - start < 3.0
    assert imbalance(matrices, owners, 512) <= 1.005
