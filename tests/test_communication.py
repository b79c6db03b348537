"""What travels: exactly the right elements, in as many collectives and bytes as the documentation says."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.debug import CommDebugMode

import dmuon
from dmuon.bucket import Update
from dmuon.comm import Traffic, packed_offsets
from dmuon.group import DedicatedGroup
from dmuon.engine.layout import Owner
from dmuon.engine.parameter import with_gradients
from dmuon.engine.runtime import find_runtime
from models import (
    Transformer,
    assert_weights_close,
    backward_both,
    build,
    dedicate,
    is_proj,
    loss_of,
    make_mesh,
    shard,
    step_both,
)
from reference import ReferenceMuon

# Counts

WIDTH = 8  # a multiple of the alignment, so that buffers carry nothing but their matrices


class Even(nn.Module):
    """Blocks of four matrices, whose sizes need no padding."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EvenLayer() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class EvenLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.b_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up_proj = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down_proj = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.b_proj(torch.tanh(self.a_proj(self.norm(x))))
        return x + self.down_proj(torch.relu(self.up_proj(x)))


class Spy:
    """Counts every broadcast and reduction that the process issues, and what this rank moves in them."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._real = {"broadcast": dist.broadcast, "reduce": dist.reduce}

    def __enter__(self) -> "Spy":
        for name, real in self._real.items():

            def spy(
                tensor: torch.Tensor, root: int, *args: Any, name: str = name, real: Any = real, **kw: Any
            ) -> Any:
                self.calls[name] += 1
                self.bytes[name] += 0 if root == dist.get_rank() else tensor.numel() * tensor.element_size()
                return real(tensor, root, *args, **kw)

            setattr(dist, name, spy)
        return self

    def __exit__(self, *exc: object) -> None:
        for name, real in self._real.items():
            setattr(dist, name, real)


def count_one_step(shape: tuple[int, ...], reshard: bool) -> dict[str, Any]:
    model = Even()
    mesh = make_mesh(shape)
    optimizer = build(model, mesh, reshard_after_forward=reshard)
    runtime = find_runtime(model)

    def loss() -> torch.Tensor:
        return model(torch.randn(4, WIDTH)).square().mean()

    for _ in range(2):  # the first iterations publish once under HSDP
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    runtime.wait_published()
    runtime.traffic.reset()
    with Spy() as spy:
        loss().backward()
        before_step = dict(runtime.traffic.collectives)
        with CommDebugMode() as in_step:
            optimizer.step()
        runtime.wait_published()
    layout = runtime.layout
    records = runtime.params
    return {
        "collectives": runtime.traffic.collectives,
        "bytes": runtime.traffic.bytes,
        "before step": before_step,
        "in step": in_step.get_total_counts(),
        "spied calls": spy.calls,
        "spied bytes": spy.bytes,
        "P": 4 * sum(r.full_shape.numel() for r in records),
        "kept": 4 * sum(r.full_shape.numel() for r in records if r.keeps_weight),
        "owned": 4 * sum(r.full_shape.numel() for r in records if r.is_owner),
        "buckets": sum(len(g.buckets) for g in runtime.groups),
        "my buckets": sum(b.layout.keeps_weight(b.owner) for g in runtime.groups for b in g.buckets),
        "counts": 4 * len(records),
        "kept counts": 4 * sum(r.keeps_weight for r in records),
        "owned counts": 4 * sum(r.is_owner for r in records),
        "sizes": (layout.shard_size, layout.replicate_size),
    }


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("shape", [(4,), (2, 2), (2,), (4, 1), (1, 4)], ids=str)
def test_collectives_and_bytes_of_a_step(ranks, shape, reshard):
    world = shape[0] * (shape[1] if len(shape) == 2 else 1)
    results = ranks(world, count_one_step, shape, reshard)
    gathers = 2 if reshard else 1
    n, r = results[0]["sizes"]
    for seen in results:
        p, kept, owned = seen["P"], seen["kept"], seen["owned"]
        expected_calls, expected_bytes = {}, {}
        if n > 1:
            expected_calls |= {"gather": gathers * seen["buckets"], "reduce": seen["buckets"]}
            expected_bytes |= {"gather": gathers * (p - kept)}
            expected_bytes |= {"reduce": p - kept + seen["counts"] - seen["kept counts"]}
        if r > 1:
            expected_calls |= {"reduce_replicas": seen["my buckets"], "publish": seen["my buckets"]}
            expected_bytes |= {"reduce_replicas": kept - owned + seen["kept counts"] - seen["owned counts"]}
            expected_bytes |= {"publish": kept - owned}
        assert seen["collectives"] == expected_calls
        assert seen["bytes"] == expected_bytes
        # The step itself: nothing on FSDP2, the publish on HSDP.
        assert seen["in step"] == expected_calls.get("publish", 0)
        assert "publish" not in seen["before step"]
        # What we count is what the process really issued.
        for spied, phases in {
            "broadcast": ("gather", "publish"),
            "reduce": ("reduce", "reduce_replicas"),
        }.items():
            assert seen["spied calls"][spied] == sum(expected_calls.get(phase, 0) for phase in phases)
            assert seen["spied bytes"][spied] == sum(expected_bytes.get(phase, 0) for phase in phases)
    if r == 1 and n > 1:
        # The formula of the documentation: 3 (N - 1) / N P resharded, 2 (N - 1) / N P kept, per rank.
        total = sum(sum(seen["bytes"].values()) for seen in results)
        p, counts = results[0]["P"], results[0]["counts"]
        assert total == (gathers + 1) * (n - 1) * p + (n - 1) * counts


# Memory


def storages_at_rest(shape: tuple[int, ...]) -> dict[str, int]:
    model = Even()
    optimizer = build(model, make_mesh(shape))
    for _ in range(2):
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    runtime = find_runtime(model)
    runtime.wait_published()
    records = runtime.params
    momenta = [optimizer.state[r.resting]["momentum_buffer"]._local_tensor for r in records]
    return {
        "weights": sum(r.local.untyped_storage().nbytes() for r in records),
        "momentum": sum(m.untyped_storage().nbytes() for m in momenta),
        "gathered": sum(r.gathered.untyped_storage().nbytes() for r in records),
        "kept": 4 * sum(r.full_shape.numel() for r in records if r.keeps_weight),
        "owned": 4 * sum(r.full_shape.numel() for r in records if r.is_owner),
        "all": 4 * sum(r.full_shape.numel() for r in records),
    }


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_at_rest_a_rank_keeps_what_it_owns(ranks, shape):
    results = ranks(4, storages_at_rest, shape)
    for seen in results:
        assert seen["weights"] == seen["kept"]
        assert seen["momentum"] == seen["owned"]
        assert seen["gathered"] == 0
    assert sum(seen["owned"] for seen in results) == results[0]["all"]


def gathered_bytes_during_forward(reshard: bool) -> tuple[list[int], list[int], int]:
    """Bytes of gathered weights whenever a layer starts, in forward and (by its gradients) in backward."""
    model = Even(depth=4)
    optimizer = build(model, make_mesh((2,)), reshard_after_forward=reshard)
    runtime = find_runtime(model)
    seen: list[int] = []

    def look(*_: Any) -> None:
        storages = {r.gathered.untyped_storage() for r in runtime.params if r.gathered is not None}
        seen.append(sum({s.data_ptr(): s.nbytes() for s in storages if s.nbytes()}.values()))

    model(torch.randn(4, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    for layer in model.layers:
        layer.norm.register_forward_pre_hook(look)
    x = model(torch.randn(4, WIDTH))
    forward, seen[:] = list(seen), []
    for record in runtime.params:
        record.gathered.register_post_accumulate_grad_hook(look)
    x.square().mean().backward()
    return forward, seen, 4 * sum(r.full_shape.numel() for r in runtime.groups[0].params)


def test_weights_live_as_long_as_their_residency_says(ranks):
    forward, backward, layer = ranks(2, gathered_bytes_during_forward, True)[0]
    assert max(forward) <= 2 * layer  # itself and the prefetched next one
    assert max(backward) <= 3 * layer  # itself, the prefetched one, and the last until its backward is over
    forward, backward, layer = ranks(2, gathered_bytes_during_forward, False)[0]
    assert max(forward) == 4 * layer
    assert backward[-1] <= 2 * layer  # freed as backward goes along


# The right elements


class Bag(nn.Module):
    """Matrices of given shapes and dtypes; the gradient of each is its target, exactly."""

    def __init__(self, shapes: list[tuple[int, int]], dtypes: list[torch.dtype]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Matrix(torch.arange(r * c).view(r, c).to(d) + 1000 * i)
            for i, ((r, c), d) in enumerate(zip(shapes, dtypes, strict=True))
        )

    def forward(self, targets: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(())
        for matrix, target in zip(self.layers, targets, strict=True):
            total = total + (matrix() * target).sum().float()
        return total


class Matrix(nn.Module):
    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value)
        self.seen: torch.Tensor | None = None

    def forward(self) -> torch.Tensor:
        self.seen = self.weight.detach().clone()
        return self.weight


def carry(
    shape: tuple[int, ...],
    shapes: list[tuple[int, int]],
    dtypes: list[torch.dtype],
    slots: list[int],
    grouping: int,
) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    model = Bag(shapes, dtypes)
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 if rank == 0 else -1)  # whoever is not the owner has something else
    import dmuon.ownership

    owners = iter(slots)
    real = dmuon.ownership.assign
    dmuon.ownership.assign = lambda matrices, n, **kw: [next(owners) % n for _ in matrices]
    try:
        boundary = (lambda name, m: False) if grouping == 0 else Matrix
        dedicate(model, make_mesh(shape), predicate=lambda n, p: True, hook_boundary=boundary)
    finally:
        dmuon.ownership.assign = real
    runtime = find_runtime(model)
    sign = {r.param_name: 1 if r.owner_rank == 0 else -1 for r in runtime.params}

    def target(index: int, r: int) -> torch.Tensor:
        rows, cols = shapes[index]
        return ((torch.arange(rows * cols).view(rows, cols) * (r + 1) + index) % 16).to(dtypes[index]) * world

    # Gather: every rank computes with the owner's weight. Reduce: the owner has the mean of all targets.
    model([target(i, rank) for i in range(len(shapes))]).backward()
    for index, record in enumerate(runtime.params):
        assert torch.equal(model.layers[index].seen, initial[record.param_name] * sign[record.param_name])
        expected = sum(target(index, r) for r in range(world)) / world
        gradient = record.resting.grad
        assert gradient.shape == expected.shape
        if record.is_owner:
            assert torch.equal(record.local_gradient(), expected)
            assert with_gradients([record])
        else:
            assert record.local_gradient().numel() == 0
    # Publish: what the owner writes, its replicas and every later reader have.
    for record in runtime.params:
        if record.is_owner:
            record.local.add_(7)
        record.mark_updated()
    runtime.publish({record: Update() for record in runtime.params})
    for record in runtime.params:
        value = initial[record.param_name] * sign[record.param_name] + 7
        assert torch.equal(dmuon.full_tensor(record.resting).detach(), value)
        if record.keeps_weight:
            assert torch.equal(record.local, value)
    with torch.no_grad():
        model([target(i, rank) for i in range(len(shapes))])
    for index, record in enumerate(runtime.params):
        assert torch.equal(model.layers[index].seen, initial[record.param_name] * sign[record.param_name] + 7)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    mesh=st.sampled_from([(4,), (2, 2), (4, 1), (1, 4), (2,), (1,)]),
    grouping=st.sampled_from([0, 1]),
    matrices=st.lists(
        st.tuples(
            st.tuples(st.integers(1, 7), st.integers(1, 7)),
            st.sampled_from([torch.float32, torch.float64]),
            st.integers(0, 3),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_gather_reduce_and_publish_carry_the_right_elements(ranks, mesh, grouping, matrices):
    shapes, dtypes, slots = (list(column) for column in zip(*matrices, strict=True))
    world = mesh[0] * (mesh[1] if len(mesh) == 2 else 1)
    ranks(world, carry, mesh, shapes, dtypes, slots, grouping)


@given(
    st.lists(st.integers(0, 100)), st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int8])
)
def test_packed_tensors_are_aligned_and_apart(numels, dtype):
    offsets, total = packed_offsets(numels, dtype)
    assert all(offset * dtype.itemsize % 16 == 0 for offset in offsets)
    ends = [offset + numel for offset, numel in zip(offsets, numels, strict=True)]
    starts = [*offsets, total][1:]
    assert all(end <= start for end, start in zip(ends, starts, strict=True))
    assert total - sum(numels) < 16 // dtype.itemsize * max(1, len(numels))


# Groups and channels


def shared_groups(shape: tuple[int, ...]) -> int:
    before = len(dist.distributed_c10d._world.pg_map)
    torch.manual_seed(1)
    model = Transformer()
    oracle = Transformer()
    oracle.load_state_dict(model.state_dict())
    mesh = make_mesh(shape)
    after_mesh = len(dist.distributed_c10d._world.pg_map)
    dedicate(model, mesh, predicate=is_proj, process_groups="shared")
    shard(model, mesh)
    optimizer = dmuon.Muon(model)
    reference = ReferenceMuon(oracle, is_proj)
    for step in range(2):
        backward_both(model, oracle, step, loss_of)
        step_both(optimizer, reference)
        assert_weights_close(model, oracle)
    assert before < after_mesh or len(shape) == 1
    return len(dist.distributed_c10d._world.pg_map) - after_mesh


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_shared_process_groups_make_no_new_ones(ranks, shape):
    assert ranks(4, shared_groups, shape) == [0] * 4


def group_timeouts() -> list[float]:
    model = Even()
    build(model, make_mesh((2, 2)))
    groups = {
        id(channel._group): channel._group
        for g in find_runtime(model).groups
        for channel in (
            g._channels.gather,
            g._channels.reduce,
            g._channels.reduce_replicas,
            g._channels.publish,
        )
    }
    return [g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups.values()]


def test_our_process_groups_take_over_the_users_timeout(ranks):
    for timeouts in ranks(4, group_timeouts, group_timeout=17.0):
        assert timeouts == [17.0] * 4


def hook_boundaries(how: str) -> list[str]:
    model = Even(depth=2)
    mesh = make_mesh((2,))
    boundary: Any = {
        "class": nn.Linear,
        "function": lambda name, m: name.endswith("1"),
        "none": None,
        "blocks": None,
    }[how]
    dedicate(model, mesh, predicate=is_proj, hook_boundary=boundary)
    if how != "blocks":
        shard(model, mesh)
    else:
        for p in model.parameters():
            p.requires_grad_(p.ndim == 2)
    runtime = find_runtime(model)
    runtime.seal()
    model(torch.randn(3, WIDTH)).sum().backward()
    return [group.name for group in runtime.groups]


def test_groups_follow_the_boundary_asked_for(ranks):
    layers = ["layers.0", "layers.1"]
    assert ranks(2, hook_boundaries, "none")[0] == layers
    assert ranks(2, hook_boundaries, "blocks")[0] == layers
    assert ranks(2, hook_boundaries, "function")[0] == ["the root module", "layers.1"]
    names = ranks(2, hook_boundaries, "class")[0]
    assert names == [
        f"{layer}.{name}" for layer in layers for name in ("a_proj", "b_proj", "up_proj", "down_proj")
    ]


# Overlap


def record_intervals() -> dict[str, list[tuple[float, float]]]:
    """When gathers and reductions are in flight, and when layers compute, in one iteration."""
    import time

    model = Even(depth=4)
    optimizer = build(model, make_mesh((4,)))
    events: dict[str, list[Any]] = {"gather": [], "reduce": [], "layer": [], "backward": []}
    for _ in range(2):
        model(torch.randn(64, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    runtime = find_runtime(model)
    real = {"gather": DedicatedGroup.gather, "reduce": DedicatedGroup.reduce}
    running: list[int] = []

    def issue(phase: str) -> Any:
        def issued(group: DedicatedGroup, *args: Any) -> Any:
            events[phase].append((runtime.groups.index(group), len(running), time.perf_counter()))
            return real[phase](group, *args)

        return issued

    DedicatedGroup.gather, DedicatedGroup.reduce = issue("gather"), issue("reduce")
    try:
        for index, layer in enumerate(model.layers):
            layer.norm.register_forward_pre_hook(lambda *_, index=index: events["layer"].append(index))
        loss = model(torch.randn(64, WIDTH)).square().mean()
        order_of_gathers = [g for g, _, _ in events["gather"]]
        events["gather"].clear()
        start = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
    finally:
        DedicatedGroup.gather, DedicatedGroup.reduce = real["gather"], real["reduce"]
    return {
        "forward": order_of_gathers,
        "layers": events["layer"],
        "backward": [g for g, _, _ in events["gather"]],
        "reduces": [g for g, _, _ in events["reduce"]],
        "during backward": [start < t < end for _, _, t in events["reduce"]],
    }


def test_prefetch_and_reduction_follow_the_model(ranks):
    for seen in ranks(4, record_intervals):
        # Each layer asks for its own weights, then for the next one's, before it computes.
        assert seen["forward"] == [0, 1, 1, 2, 2, 3, 3]
        assert seen["layers"] == [0, 1, 2, 3]
        assert seen["backward"] == [3, 2, 2, 1, 1, 0, 0]
        assert seen["reduces"] == [3, 2, 1, 0]
        assert all(seen["during backward"])


def test_traffic_counts_from_zero_again():
    traffic = Traffic()
    traffic.add("gather", 5)
    traffic.add("gather", 7)
    assert (traffic.collectives, traffic.bytes) == ({"gather": 2}, {"gather": 12})
    traffic.reset()
    assert (traffic.collectives, traffic.bytes) == ({}, {})


def slots_and_owners(shape: tuple[int, ...]) -> list[int]:
    from dmuon.layout import DataParallelLayout

    layout = DataParallelLayout.from_meshes(make_mesh(shape))
    for slot in range(layout.size):
        assert layout.slot_of(layout.owner_of_slot(slot)) == slot
    here = layout.global_rank(layout.here)
    assert here == dist.get_rank()
    assert layout.is_owner(layout.here)
    assert layout.row[layout.here.shard] == layout.column[layout.here.replicate] == here
    assert layout.keeps_weight(Owner(layout.here.shard, 0))
    return [layout.global_rank(layout.owner_of_slot(slot)) for slot in range(layout.size)]


@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1), (1, 4)], ids=str)
def test_every_slot_is_a_rank_of_its_own(ranks, shape):
    for seen in ranks(4, slots_and_owners, shape):
        assert sorted(seen) == [0, 1, 2, 3]
