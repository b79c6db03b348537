"""The planner's times: against cases computed by hand."""

import time
from dataclasses import replace

import pytest

from dmuon.optim.newton_schulz import operation_count
from dmuon.planner import Mesh, Options, load, plan_model
from dmuon.planner.advice import layouts, sentences
from dmuon.planner.iteration import Block, Times, exposed
from dmuon.planner.machine import MACHINES, Line, Machine, machine_of, together
from dmuon.planner.model import Model, PlanError, from_names

# 1e12 operations and 1e9 bytes a second of everything, but 1e8 bytes between nodes of two ranks.
SIMPLE = Machine("simple", "", 2, 1, 1, 1, 1, 1, 0.1, hop_inside=1, hop_between=10, launch=100)


def model_of(layers: int = 4, side: int = 8) -> Model:
    return from_names("m", [(f"h.{i}.up.weight", (side, side)) for i in range(layers)])


def times_of(mesh: str, model: Model | None = None, machine: Machine = SIMPLE, tokens: int = 10) -> Times:
    return Times(plan_model(model or model_of(), Mesh.parse(mesh)), machine, tokens)


def test_rings_pass_every_rank_and_the_nodes_between():
    assert SIMPLE.ring(Line(1, 1), 10) == (0, 0)
    latency, transfer = SIMPLE.ring(Line(2, 2), 1000)
    assert (latency, transfer) == pytest.approx((101e-6, 1e-6))
    latency, transfer = SIMPLE.ring(Line(8, 2), 1000)  # 3 crossings, 4 hops inside; two cards a node
    assert (latency, transfer) == pytest.approx((134e-6, 5e-6))
    latency, transfer = SIMPLE.ring(Line(8, 1), 1000)  # 7 crossings, one card
    assert (latency, transfer) == pytest.approx((170e-6, 10e-6))


def test_an_all_reduce_is_two_rings_in_one_launch():
    assert SIMPLE.all_reduce(Line(4, 2), 1000) == pytest.approx((124e-6, 1500 / 0.2e9))
    assert SIMPLE.all_reduce(Line(1, 1), 1000) == (0, 0)


def test_an_all_to_all_is_as_slow_as_what_leaves_the_node():
    assert SIMPLE.all_to_all(Line(2, 2), 1000) == pytest.approx((101e-6, 1e-6))
    assert SIMPLE.all_to_all(Line(4, 2), 900) == pytest.approx((110e-6, 600 / 0.1e9))


def test_queues_wait_together_and_share_the_links():
    assert together([SIMPLE.ring(Line(2, 2), 1000), SIMPLE.ring(Line(8, 1), 1000)]) == pytest.approx(181e-6)


def test_ranks_of_a_mesh_dim_stand_so_far_apart():
    assert SIMPLE.line(8, 1) == (8, 2)
    assert SIMPLE.line(8, 2) == (8, 1)
    assert MACHINES["h100-8"].line(16, 2) == (16, 4)
    assert MACHINES["h100-8"].line(2, 1) == (2, 2)


def test_what_a_forward_and_a_backward_cannot_hide():
    hidden = [Block(forward=10, gather=5, reduce=5)] * 3
    # The first gather of each pass, and the last reduction: the last block's gather waits for nobody.
    assert exposed(hidden, reshard=True) == 5 + 5 + 5
    assert exposed(hidden, reshard=False) == 5 + 5
    # Gathers of 30 behind forwards of 10: 30, then 20 more for each of two. In backward 30, and each block's
    # gather is under way for 20 of computation: twice 10 more.
    slow = [Block(forward=10, gather=30)] * 3
    assert exposed(slow, reshard=True) == 30 + 20 + 20 + 30 + 10 + 10
    # A publish is in front of the gather in forward alone.
    assert exposed([Block(forward=10, gather=5, publish=7)] * 3, reshard=True) == 12 + 2 + 2 + 5
    # A reduction of 50: block 1 begins at 20 after backward, and is not held up; block 0 waits for none.
    late = [Block(forward=10, reduce=50)] * 3
    assert exposed(late, reshard=True) == 50 + 50 + 50 - 20 - 20


def test_products_take_six_operations_a_weight_and_token():
    times = times_of("dp=2")
    assert times.dmuon().compute == pytest.approx(6 * 4 * 64 * 10 / 1e12)
    experts = from_names("m", [(f"h.0.experts.{e}.up.weight", (8, 8)) for e in range(4)])
    some = Model("m", experts.params, active=0.5)
    assert times_of("dp=2", some).dmuon().compute == pytest.approx(6 * 2 * 64 * 10 / 1e12)
    cut = from_names("m", [("h.0.up_proj.weight", (8, 8))])
    assert times_of("tp=2", cut).dmuon().compute == pytest.approx(6 * 32 * 20 / 1e12)  # tokens of both ranks


def test_the_step_is_that_of_the_busiest_rank():
    options = Options(ns_algorithm="auto")
    each = operation_count(8, 8) / 1e12

    def step(mesh: str) -> tuple[float, float]:
        times = Times(plan_model(model_of(), Mesh.parse(mesh), options), SIMPLE, 10)
        return times.dmuon().orthogonalize, times.two_exchanges().orthogonalize

    assert step("dp=2") == pytest.approx((2 * each, 2 * each))
    assert step("replicate=2,shard=2") == pytest.approx((each, 2 * each))  # replicas do the same twice there
    assert step("dp=8") == pytest.approx((each, each))


def test_a_matrix_that_is_cut_is_orthogonalized_by_one_rank():
    names = [("h.0.up_proj.weight", (8, 8)), ("h.0.other.weight", (8, 8))]
    times = times_of("tp=2", from_names("m", names))
    one, other = (m for m in times.plan.matrices)
    assert times.orthogonalize() == pytest.approx(2 * times.plan.operations(8, 8) / 1e12)
    assert one.share.is_cut
    assert not other.share.is_cut


def test_two_all_to_alls_carry_each_matrix_there_and_back():
    times = times_of("dp=2")
    cost = 2 * (2 * 101e-6 + 4 * 64 * 2 / 2 / 2 / 1e9)  # two batches of two matrices; half is here already
    assert times.two_exchanges().exchange == pytest.approx(cost)
    assert times.dmuon().exchange == 0


def test_states_are_read_and_written():
    elements = 4 * 64 / 2
    assert times_of("dp=2").adamw().update == pytest.approx(7 * 4 * elements / 1e9)
    assert times_of("dp=2").two_exchanges().update == pytest.approx(5 * 4 * elements / 1e9)
    assert times_of("dp=2").dmuon().update == pytest.approx(5 * 4 * elements / 1e9)  # even here


def test_teams_share_what_the_busiest_rank_waits_for():
    """Llama 3 405B on 16,384 ranks, at 400 TFLOP/s."""
    model, machine = load("llama-3-405b"), replace(MACHINES["h100-8"], tflops=400)
    mesh = Mesh.parse("replicate=64,shard=32,tp=8")
    alone, teams = (plan_model(model, mesh, Options(teams=policy)) for policy in ("never", "beneficial"))
    times = Times(alone, machine, 8192)
    assert 0.8 < times.orthogonalize() < 0.85
    assert 0.1 < Times(teams, machine, 8192).orthogonalize() < 0.13
    assert any("teams of 8" in sentence for sentence in sentences(times))
    assert max(load.operations for load in teams.loads.values()) * 7.9 < max(
        load.operations for load in alone.loads.values()
    )
    assert teams.rest.sum(2).max() < alone.rest.sum(2).max()
    assert teams.peak.max() < alone.peak.max()


def test_a_layout_is_told_what_is_wrong_and_the_way_out():
    long = sentences(times_of("dp=2048", load("llama-3-8b"), MACHINES["h100-8"], 2048))
    assert any("cannot hide behind forwards" in s and "Use rows of" in s for s in long)
    fast = replace(SIMPLE, launch=1e-6, hop_inside=1e-6, hop_between=1e-6, between=1e3, inside=1e3)
    idle = sentences(times_of("dp=8", model_of(side=64), fast))
    assert any("4 of 8 ranks orthogonalize nothing" in s and "tp_distributed_gram" in s for s in idle)
    stacks = sentences(times_of("dp=64,ep=8", load("mixtral-8x7b"), MACHINES["h100-8"], 8192))
    assert any("stacks of 8 experts leave 56 of the 64 ranks" in s and "at most 8" in s for s in stacks)
    assert sentences(times_of("dp=8", load("llama-3-8b"), MACHINES["h100-8"], 32768)) == []


def test_layouts_that_fit_are_found_the_fastest_first():
    model, machine = load("llama-3-8b"), MACHINES["h100-8"]
    found = layouts(model, 64, machine, Options(), 8192)
    assert [layout.iteration.total for layout in found] == sorted(layout.iteration.total for layout in found)
    assert all(layout.peak <= 80 * 2**30 and layout.plan.mesh.ranks == 64 for layout in found)
    assert len({layout.plan.mesh.text for layout in found}) == len(found) > 8
    for layout in found[:2]:  # what is printed can be asked for
        assert Mesh.parse(layout.plan.mesh.text) == layout.plan.mesh
    tight = layouts(model, 64, machine, Options(), 8192, activations=76)
    assert {layout.plan.mesh.text for layout in tight} < {layout.plan.mesh.text for layout in found}
    with pytest.raises(PlanError, match="the least is"):
        layouts(load("llama-3-405b"), 8, machine, Options(), 8192)


def test_values_are_given_by_hand():
    machine = machine_of("b200-8", ["gpus=4", "hop_between=2.5"])
    assert (machine.gpus, machine.hop_between, machine.tflops) == (4, 2.5, 2250)


@pytest.mark.parametrize(
    ("name", "mesh"), [("llama-3-405b", "replicate=64,shard=32,tp=8"), ("deepseek-v3", "dp=2048,ep=64")]
)
def test_the_largest_are_planned_in_seconds(name, mesh):
    begin = time.process_time()
    times = times_of(mesh, load(name), MACHINES["h100-8"], 8192)
    assert times.plan.balance < 1.02
    assert times.dmuon().total > times.adamw().compute
    assert times.plan.peak.max() > 0
    assert time.process_time() - begin < 10
