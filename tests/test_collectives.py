"""Collectives on parts of buffers, and the process groups they run on."""

import os
import random
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dmuon
from dmuon.engine.collectives import Peers, Traffic
from dmuon.engine.layout import per_world
from dmuon.engine.runtime import find_runtime
from layouts import Model, Sizes, build, dedicate_on, distribute, loss_of, make_mesh
from models import assert_weights_close, backward_both, step_both, with_oracle

CPU = torch.device("cpu")
LAYOUTS: list[Sizes] = [
    {"dp": 4},
    {"replicate": 2, "shard": 2},
    {"dp": 2, "tp": 2},
    {"ddp": 4},
    {"ddp": 2, "tp": 2},
]


# What travels


def move_uneven_parts() -> None:
    """Integers, whose sums are exact; over all ranks, and over some, whose places are not their ranks."""
    draw = random.Random(1)  # the same on all ranks
    some = dist.new_group([1, 3])
    for dtype in (torch.int64, torch.float32, torch.uint8):
        for ranks, group in (((0, 1, 2, 3), dist.group.WORLD), ((1, 3), some)):
            if dist.get_rank() in ranks:
                for _ in range(3):
                    move(Peers(ranks, group, CPU), draw, dtype)
            else:
                for _ in range(3):
                    draw_of(draw, len(ranks))  # to draw the same afterwards


def draw_of(draw: random.Random, size: int) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """Parts, as root and length, several from one root, some empty; who sends whom how many elements."""
    parts = [(draw.randrange(size), draw.choice((0, 1, 5, 33))) for _ in range(draw.randint(1, 6))]
    return parts, [[draw.randint(0, 4) for _ in range(size)] for _ in range(size)]


def values(rank: int, part: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(length) % 7 + 10 * rank + part).to(dtype)


def move(peers: Peers, draw: random.Random, dtype: torch.dtype) -> None:
    plan, counts = draw_of(draw, peers.size)
    here, positions = peers.position, range(peers.size)
    assert peers.ranks[here] == dist.get_rank()
    foreign = sum(length for root, length in plan if root != here) * dtype.itemsize

    buffer = torch.cat([values(here, number, length, dtype) for number, (_, length) in enumerate(plan)])
    parts = list(zip([root for root, _ in plan], buffer.split([n for _, n in plan]), strict=True))
    assert peers.broadcast(parts) == foreign
    for number, (root, part) in enumerate(parts):
        assert torch.equal(part, values(root, number, len(part), dtype))

    buffer = torch.cat([values(here, number, length, dtype) for number, (_, length) in enumerate(plan)])
    parts = list(zip([root for root, _ in plan], buffer.split([n for _, n in plan]), strict=True))
    assert peers.reduce(parts) == foreign
    for number, (root, part) in enumerate(parts):
        if root == here:
            assert torch.equal(part, sum(values(p, number, len(part), dtype) for p in positions))

    whole = values(here, 0, 9, dtype)
    assert peers.all_reduce(whole) == 2 * (peers.size - 1) * whole.nbytes // peers.size
    assert torch.equal(whole, sum(values(p, 0, 9, dtype) for p in positions))

    sends, receives = counts[here], [row[here] for row in counts]
    send = torch.cat([values(here, to, n, dtype) for to, n in enumerate(sends)])
    receive = torch.zeros(sum(receives), dtype=dtype)
    assert peers.all_to_all(receive, send, receives, sends) == (sum(sends) - sends[here]) * dtype.itemsize
    assert torch.equal(receive, torch.cat([values(p, here, n, dtype) for p, n in enumerate(receives)]))


def test_uneven_parts_of_several_owners_in_one_call(ranks):
    ranks(4, move_uneven_parts)


def test_traffic_counts_from_zero_again():
    traffic = Traffic()
    traffic.add("gather", 5)
    traffic.add("gather", 7)
    assert (traffic.collectives, traffic.bytes) == ({"gather": 2}, {"gather": 12})
    traffic.reset()
    assert (traffic.collectives, traffic.bytes) == ({}, {})


# Grouped launches, on a stand-in for a process group of NCCL


class Grouping:
    """Writes down what is asked of it."""

    supports_coalescing = True

    def __init__(self, *, fails: bool = False) -> None:
        self.log: list[Any] = []
        self._fails = fails

    def _get_backend(self, device: torch.device) -> "Grouping":
        return self

    def _start_coalescing(self, device: torch.device) -> None:
        self.log.append(("start", device.type))

    def _end_coalescing(self, device: torch.device) -> "Grouping":
        self.log.append(("end", device.type))
        return self

    def wait(self) -> None:
        self.log.append("wait")

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> None:
        self._rooted("broadcast", tensors, options)

    def reduce(self, tensors: list[torch.Tensor], options: Any) -> None:
        self._rooted("reduce", tensors, options)

    def _rooted(self, name: str, tensors: list[torch.Tensor], options: Any) -> None:
        (tensor,) = tensors
        assert not options.asyncOp
        self.log.append((name, options.rootRank, tensor.tolist()))
        if self._fails:
            raise RuntimeError("boom")


PARTS = [(0, torch.tensor([1.0, 2.0])), (2, torch.tensor([3.0])), (0, torch.tensor([4.0]))]


@pytest.mark.parametrize("name", ["broadcast", "reduce"])
def test_the_parts_of_one_call_are_one_launch(monkeypatch, name):
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    group = Grouping()
    peers = Peers((3, 5, 6), group, CPU)
    assert getattr(peers, name)(PARTS) == 16  # from or to the others, at position 1
    inside = [(name, root, part.tolist()) for root, part in PARTS]
    assert group.log == [("start", "cpu"), *inside, ("end", "cpu"), "wait"]
    group.log.clear()
    getattr(peers, name)(PARTS[:1])
    assert group.log == inside[:1]  # nothing to group
    group.log.clear()
    getattr(peers, name)([])
    assert group.log == []


def test_a_backend_that_cannot_group_gets_one_after_the_other(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    group = Grouping()
    group.supports_coalescing = False
    Peers((0, 1, 2), group, CPU).reduce(PARTS)
    assert [entry[0] for entry in group.log] == ["reduce"] * 3


def test_a_launch_that_fails_is_ended(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    group = Grouping(fails=True)
    with pytest.raises(RuntimeError, match="boom"):
        Peers((0, 1, 2), group, CPU).broadcast(PARTS)
    assert [entry[0] for entry in group.log] == ["start", "broadcast", "end", "w"]


# Process groups


def open_things() -> tuple[int, int]:
    """Process groups, and files, connections among them."""
    return len(dist.distributed_c10d._world.pg_map), len(os.listdir("/proc/self/fd"))


def train_a_model(sizes: Sizes, mesh: Any) -> Any:
    model = Model(hidden=12)
    optimizer = build(model, sizes, mesh=mesh)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.synchronize()
    return model


def several_models() -> None:
    for sizes in LAYOUTS:
        mesh = make_mesh(sizes)
        first = train_a_model(sizes, mesh)
        before = open_things()
        second = train_a_model(sizes, mesh)
        assert open_things() == before, sizes
        assert set(find_runtime(first).communication._peers) == set(find_runtime(second).communication._peers)


def test_another_model_on_the_same_mesh_makes_no_process_groups(ranks):
    ranks(4, several_models, fresh=True)


def as_few_as_possible() -> list[int]:
    answers = []
    for sizes in LAYOUTS:
        per_world().clear()
        model = Model(hidden=12)
        distribute(model, sizes)
        before, _ = open_things()
        dmuon.Muon(model)
        answers.append(open_things()[0] - before)
    return answers


def test_each_queue_has_one_for_the_row_one_for_the_column_and_one_for_the_pieces(ranks):
    assert ranks(4, as_few_as_possible, fresh=True) == [[2, 4, 4, 2, 4]] * 4


def connect_all() -> None:
    for sizes in LAYOUTS:
        model = Model(hidden=12)
        build(model, sizes)
        runtime = find_runtime(model)
        for peers in runtime.communication._peers.values():
            peers.connect()
        assert runtime.traffic.collectives == {}  # no part of the training


def test_all_process_groups_can_be_connected_in_one_order(ranks):
    ranks(4, connect_all, fresh=True)


def one_wants_another_number(sizes: Sizes) -> None:
    mesh = make_mesh(sizes)
    train_a_model(sizes, mesh)
    if dist.get_rank() == 2:
        made = per_world()
        del made[next(key for key in made if key[0] == "gradients")]
    with pytest.raises(RuntimeError, match="do not agree on the process groups to make: between 0 and 1"):
        train_a_model(sizes, mesh)


@pytest.mark.parametrize("sizes", [{"dp": 4}, {"replicate": 2, "shard": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_ranks_that_do_not_agree_on_process_groups_find_out(ranks, sizes):
    ranks(4, one_wants_another_number, sizes, timeout=20, fresh=True)


def one_chooses_otherwise(sizes: Sizes) -> None:
    """Rank 1 leaves a matrix out, which on a tensor-parallel mesh is of another cut than any other."""
    odd = dist.get_rank() == 1

    def choose(name: str, param: torch.nn.Parameter) -> bool:
        return "proj.weight" in name and not (odd and "layers.1.down_proj" in name)

    def first_uses(model: Model) -> None:
        dedicate_on(model, sizes, predicate=choose)
        model.state_dict()

    def whole(model: Model) -> None:
        distribute(model, sizes, predicate=choose)
        dmuon.full_tensor(model.layers[0].up_proj.weight)

    for act in (partial(build, sizes=sizes, predicate=choose), first_uses, whole):
        with pytest.raises(
            RuntimeError, match=r"not chosen the same parameters: layers\.1\.down_proj\.weight is ded"
        ):
            act(Model())


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 2, "tp": 2}, {"ddp": 2}], ids=str)
def test_ranks_that_choose_other_parameters_find_out(ranks, sizes):
    ranks(torch.Size(sizes.values()).numel(), one_chooses_otherwise, sizes, timeout=20)


def some_have_more() -> None:
    """torch names a process group by how many there are already on a rank."""
    dist.new_group([0, 1])
    dist.new_group([1, 2])
    for sizes in ({"dp": 4}, {"replicate": 2, "shard": 2}, {"dp": 2, "tp": 2}):
        model = train_a_model(sizes, make_mesh(sizes))
        assert find_runtime(model).traffic.collectives


def test_some_ranks_may_have_process_groups_of_their_own(ranks):
    ranks(4, some_have_more, timeout=20, fresh=True)


# Meshes whose ranks do not ascend


def train_on(sizes: Sizes, *orders: Any) -> None:
    for order in orders:
        torch.manual_seed(1)
        model = Model(hidden=12 if "tp" in sizes else 13)  # torch confuses uneven pieces of TP
        oracle, reference = with_oracle(model)
        optimizer = build(model, sizes, mesh=make_mesh(sizes, order))
        for step in range(3):
            backward_both(model, oracle, step, loss_of)
            step_both(optimizer, reference)
        assert_weights_close(model, oracle)


@pytest.mark.parametrize(
    ("sizes", "orders"),
    [
        ({"dp": 4}, [[3, 1, 0, 2]]),
        ({"replicate": 2, "shard": 2}, [[[2, 3], [0, 1]], [[3, 1], [2, 0]]]),
        ({"dp": 2, "tp": 2}, [[[1, 0], [3, 2]], [[3, 1], [2, 0]]]),
        ({"ddp": 4}, [[3, 1, 0, 2]]),
        ({"ddp": 2, "tp": 2}, [[[3, 2], [1, 0]]]),
    ],
    ids=str,
)
def test_ranks_need_not_ascend(ranks, sizes, orders):
    ranks(4, train_on, sizes, *orders)


def test_two_ranks_the_other_way_round(ranks):
    ranks(2, train_on, {"dp": 2}, [1, 0])


def refuse_orders() -> None:
    for sizes in ({"replicate": 2, "shard": 2}, {"dp": 2, "tp": 2}, {"ddp": 2, "tp": 2}):
        for order in ([[0, 3], [2, 1]], [[0, 1], [3, 2]]):
            with pytest.raises(ValueError, match="not one of whole rows and columns"):
                build(Model(hidden=12), sizes, mesh=make_mesh(sizes, order))
    mesh = make_mesh({"dp": 2, "tp": 2}, [[1, 0], [3, 2]])
    with pytest.raises(ValueError, match=r"layers\.0\.up_proj\.weight is cut into pieces of different sizes"):
        build(Model(hidden=13), {"dp": 2, "tp": 2}, mesh=mesh)


def test_orders_in_which_nothing_fits_are_refused_on_all_ranks(ranks):
    ranks(4, refuse_orders)


# The mesh's own process groups


def share_them() -> list[int]:
    """How many process groups a model makes that is to use those of the mesh."""
    answers = []
    for sizes in LAYOUTS:
        torch.manual_seed(1)
        model = Model()
        oracle, reference = with_oracle(model)
        distribute(model, sizes, process_groups="shared")
        before, _ = open_things()
        optimizer = dmuon.Muon(model)
        for step in range(2):
            backward_both(model, oracle, step, loss_of)
            step_both(optimizer, reference)
        assert_weights_close(model, oracle)
        answers.append(open_things()[0] - before)
    return answers


def test_shared_process_groups_make_no_new_ones(ranks):
    assert ranks(4, share_them, fresh=True) == [[0] * 5] * 4


def timeouts() -> list[float]:
    build(Model(), {"replicate": 2, "shard": 2})
    groups = [peers._group for peers in per_world().values() if isinstance(peers, Peers)]
    return [group._get_backend(CPU).options._timeout.total_seconds() for group in groups]


def test_our_process_groups_take_over_the_users_timeout(ranks):
    assert ranks(4, timeouts, group_timeout=17.0) == [[17.0] * 4] * 4
