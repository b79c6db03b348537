"""Stacks of experts and fused projections on every layout, against one process with separate matrices."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import dmuon
from dmuon.engine.parameter import local_part
from dmuon.engine.runtime import find_runtime
from dmuon.optim import parts
from reference import ReferenceMuon

WIDTH, HIDDEN = 6, 4
SETTINGS = {"lr": 0.05, "weight_decay": 0.1, "adamw_lr": 3e-3}
FUSED = dmuon.Structure(sizes=(6, 2, 2))  # grouped queries: 6 of queries, 2 of keys, 2 of values


class Experts(nn.Module):
    """Expert i takes the tokens that are i modulo their number; gate and up behind each other."""

    gradients = (Replicate(),)  # of experts that are a DTensor: their ranks have the same tokens

    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(count, 2 * HIDDEN, WIDTH) / 2)
        self.down = nn.Parameter(torch.randn(count, WIDTH, HIDDEN) / 2)

    def forward(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        # Real models exchange tokens; here, the experts' pieces are brought together.
        gate_up, down = (
            w.full_tensor(grad_placements=self.gradients) if isinstance(w, DTensor) else w
            for w in (self.gate_up, self.down)
        )
        out = torch.zeros_like(x)
        for i in range(len(down)):
            gate, up = (x[choice == i] @ gate_up[i].T).chunk(2, dim=-1)
            out[choice == i] = (F.silu(gate) * up) @ down[i].T
        return out


class SeparateExperts(nn.Module):
    def __init__(self, experts: Experts) -> None:
        super().__init__()
        gates, ups = experts.gate_up.detach().chunk(2, dim=1)
        self.gate, self.up, self.down = (
            nn.ParameterList(nn.Parameter(w.clone()) for w in whole)
            for whole in (gates, ups, experts.down.detach())
        )

    def forward(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for i in range(len(self.down)):
            tokens = x[choice == i]
            out[choice == i] = (F.silu(tokens @ self.gate[i].T) * (tokens @ self.up[i].T)) @ self.down[i].T
        return out


class Block(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 10, bias=False)
        self.out = nn.Linear(6, WIDTH, bias=False)
        self.experts = Experts(count)

    def forward(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        q, k, v = self.projected(self.norm(x))
        x = x + self.out(q * (k * v).sum(-1, keepdim=True))
        return x + self.experts(x, choice)

    def projected(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.qkv(x).split((6, 2, 2), dim=-1)


class SeparateBlock(Block):
    def __init__(self, block: Block) -> None:
        nn.Module.__init__(self)
        self.norm, self.out = copy.deepcopy(block.norm), copy.deepcopy(block.out)
        self.q, self.k, self.v = (nn.Parameter(w.clone()) for w in block.qkv.weight.detach().split((6, 2, 2)))
        self.experts = SeparateExperts(block.experts)

    def projected(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x @ self.q.T, x @ self.k.T, x @ self.v.T


class Mixture(nn.Module):
    def __init__(self, count: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(count) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, choice)
        return self.head(x)


def separate(model: Mixture) -> Mixture:
    oracle = copy.deepcopy(model)
    oracle.blocks = nn.ModuleList(SeparateBlock(block) for block in model.blocks)
    return oracle


def is_muons(name: str, param: nn.Parameter) -> bool:
    return "blocks" in name and param.ndim > 1


STRUCTURE = {"*.qkv.weight": FUSED, "*.gate_up": dmuon.Structure(sizes=(HIDDEN, HIDDEN))}


def loss_of(model: nn.Module, seed: int, count: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(12, WIDTH, generator=generator)
    choice = torch.arange(12) % count
    choice[choice == seed % count] = (seed + 1) % count  # on every rank another expert has nothing to do
    choice[choice == count - 1] = 0  # and one has nothing anywhere
    return model(x, choice).pow(2).mean()


def distribute(model: Mixture, sizes: dict[str, int], **options) -> dmuon.Muon:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if "ddp" in sizes:
        dmuon.dedicate_params_ddp(model, mesh["ddp"], predicate=is_muons, structure=STRUCTURE)
        dmuon.replicate(model, mesh["ddp"])
        return dmuon.Muon(model, **SETTINGS, **options)
    if "ep" in sizes:
        return distribute_experts(model, mesh, **options)
    if "tp" in sizes:
        for block in model.blocks:
            place(block.experts, "gate_up", mesh["tp"], Shard(2))
            place(block.experts, "down", mesh["tp"], Shard(1))
        where = {"mesh": mesh["dp"]}
    elif "replicate" in sizes:
        where = {"mesh": mesh["shard"], "replicate_mesh": mesh["replicate"]}
    else:
        where = {"mesh": mesh["dp"]}
    dmuon.dedicate_params(model, **where, predicate=is_muons, structure=STRUCTURE)
    around = {"mesh": mesh if "replicate" in sizes else where["mesh"]}
    for block in model.blocks:
        fully_shard(block, **around)
    fully_shard(model, **around)
    return dmuon.Muon(model, **SETTINGS, **options)


def distribute_experts(model: Mixture, mesh, **options) -> dmuon.Muon:
    """As torchtitan: experts over `ep` and FSDP2's ranks, everything else over all ranks, one root mesh."""
    for block in model.blocks:
        place(block.experts, "gate_up", mesh["ep"], Shard(0))
        place(block.experts, "down", mesh["ep"], Shard(0))
        block.experts.gradients = (Partial(),)  # each rank has tokens of its own
    dense = mesh["efsdp", "ep"]._flatten("dp")
    dmuon.dedicate_params(model, dense, predicate=is_muons, structure=STRUCTURE)
    for block in model.blocks:
        fully_shard(block.experts, mesh=mesh["efsdp"])
        block.experts.set_gradient_divide_factor(dense.size())
        block.experts.set_force_sum_reduction_for_comms(True)  # gloo cannot divide while it sums
        fully_shard(block, mesh=dense)
    fully_shard(model, mesh=dense)
    return dmuon.Muon(model, **SETTINGS, **options)


def place(module: nn.Module, name: str, mesh, placement) -> None:
    param = distribute_tensor(getattr(module, name).detach(), mesh, [placement])
    setattr(module, name, nn.Parameter(param))


def assert_equal(model: Mixture, oracle: Mixture) -> dict[str, torch.Tensor]:
    state = {name: dmuon.full_tensor(p).detach() for name, p in model.named_parameters()}
    for name, weight in oracle.named_parameters():
        theirs = name
        expert = None
        if ".experts." in name:
            theirs, _, expert = name.rpartition(".")
        block, _, part = theirs.rpartition(".")
        if part in ("gate", "up"):
            mine = state[f"{block}.gate_up"].chunk(2, dim=1)[part == "up"][int(expert)]
        elif expert is not None:
            mine = state[theirs][int(expert)]
        elif part in ("q", "k", "v"):
            mine = state[f"{block}.qkv.weight"].split((6, 2, 2))["qkv".index(part)]
        else:
            mine = state[name]
        torch.testing.assert_close(
            mine, weight.detach(), rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    return state


def train(sizes: dict[str, int], count: int = 5, steps: int = 4, **options) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Mixture(count)
    oracle = separate(model)
    reference = ReferenceMuon(oracle, is_muons, **SETTINGS)
    optimizer = distribute(model, sizes, **options)
    world, rank = dist.get_world_size() // sizes.get("tp", 1), dist.get_rank() // sizes.get("tp", 1)
    for step in range(steps):
        loss_of(model, 100 * step + rank, count).backward()
        for r in range(world):
            (loss_of(oracle, 100 * step + r, count) / world).backward()
        if step == 2 and "ep" not in sizes:  # a state of whole tensors; torch cannot cut uneven experts so
            whole = StateDictOptions(full_state_dict=True)
            kept = copy.deepcopy(dmuon.get_optimizer_state_dict(model, optimizer, options=whole))
            for entry in optimizer.state.values():
                for value in entry.values():
                    local_part(value).zero_()
            dmuon.set_optimizer_state_dict(model, optimizer, kept, options=whole)
        mine = dmuon.clip_grad_norm_(model, 0.05)
        theirs = torch.nn.utils.clip_grad_norm_(oracle.parameters(), 0.05)
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
        state = assert_equal(model, oracle)
    return state


LAYOUTS = [
    pytest.param({"dp": 4}, id="dp4"),
    pytest.param({"replicate": 2, "shard": 2}, id="hsdp2x2"),
    pytest.param({"dp": 2, "tp": 2}, id="dp2-tp2"),
    pytest.param({"efsdp": 2, "ep": 2}, id="efsdp2-ep2"),
    pytest.param({"ddp": 2}, id="ddp2"),
]


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_training_equals_one_process_with_separate_matrices(ranks, sizes):
    ranks(torch.Size(sizes.values()).numel(), train, sizes)


@pytest.mark.parametrize("sizes", [{"dp": 4}, {"efsdp": 2, "ep": 2}], ids=["dp4", "efsdp2-ep2"])
def test_there_may_be_more_ranks_than_experts(ranks, sizes):
    ranks(4, train, sizes, count=2, steps=2)


def state_of(model: Mixture, optimizer: dmuon.Muon) -> dict:
    return {
        "model": dmuon.get_model_state_dict(model),
        "optim": dmuon.get_optimizer_state_dict(model, optimizer),
    }


def resume(saved_on: dict[str, int], loaded_on: dict[str, int], path: str, phase: str) -> None:
    """Three steps, a checkpoint, two more on another layout: as five in one process. With a state per row."""
    sizes = saved_on if phase == "save" else loaded_on
    torch.manual_seed(0)
    model = Mixture()
    oracle = separate(model)
    reference = ReferenceMuon(oracle, is_muons, **SETTINGS, row_beta=0.9)
    if phase == "load":
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
    optimizer = distribute(model, sizes, variant=dmuon.NorMuon(beta2=0.9))
    every = range(3) if phase == "save" else range(5)
    for step in every:
        for r in range(2):
            (loss_of(oracle, 100 * step + r) / 2).backward()
        reference.step()
        reference.zero_grad()
    if phase == "load":
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=path)
        dmuon.set_model_state_dict(model, state["model"])
        dmuon.set_optimizer_state_dict(model, optimizer, state["optim"])
    for step in range(3) if phase == "save" else range(3, 5):
        # Two batches, whatever the number of ranks.
        loss_of(model, 100 * step + dist.get_rank() // sizes.get("tp", 1) % 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(model, oracle)
    if phase == "save":
        state = state_of(model, optimizer)
        if "tp" not in sizes:
            placements = state["model"]["blocks.0.experts.down"].placements
            for value in state["optim"]["state"]["blocks.0.experts.down"].values():
                assert value.placements == placements
        dcp.save(state, checkpoint_id=path)


@pytest.mark.parametrize(
    ("saved_on", "loaded_on"),
    [
        pytest.param({"dp": 2}, {"efsdp": 2, "ep": 2}, id="dp2-to-ep"),
        pytest.param({"efsdp": 2, "ep": 2}, {"dp": 2}, id="ep-to-dp2", marks=pytest.mark.combination),
        pytest.param({"dp": 2, "tp": 2}, {"ddp": 2}, id="dp2-tp2-to-ddp2"),
        pytest.param(
            {"replicate": 2, "shard": 2}, {"dp": 4}, id="hsdp-to-dp4", marks=pytest.mark.combination
        ),
    ],
)
def test_training_is_resumed_on_another_layout(ranks, tmp_path, saved_on, loaded_on):
    for phase, sizes in (("save", saved_on), ("load", loaded_on)):
        ranks(torch.Size(sizes.values()).numel(), resume, saved_on, loaded_on, str(tmp_path), phase)


def step_alone(sizes: dict[str, int]) -> tuple[list[str], list[int], dict[str, int]]:
    torch.manual_seed(0)
    model = Mixture()
    optimizer = distribute(model, sizes)
    for _ in range(2):  # the first step makes sure that all ranks have the same groups
        loss_of(model, dist.get_rank()).backward()
        with CommDebugMode() as counted:
            optimizer.step()
    runtime = find_runtime(model)
    experts = model.blocks[0].experts.down
    return (
        [stack.name for stack in runtime.stacks],
        [param.owner_rank for param in runtime.params],
        {"collectives": counted.get_total_counts(), "here": experts.to_local().shape[0]},
    )


@pytest.mark.parametrize("sizes", [{"dp": 4}, {"efsdp": 2, "ep": 2}], ids=["dp4", "efsdp2-ep2"])
def test_a_step_issues_no_collective_and_dense_matrices_go_where_experts_do_not(ranks, sizes):
    answers = ranks(4, step_alone, sizes)
    names, owners, _ = answers[0]
    assert names == [f"blocks.{i}.experts.{name}" for i in (0, 1) for name in ("gate_up", "down")]
    assert all(counted["collectives"] == 0 for *_, counted in answers)
    here = [counted["here"] for *_, counted in answers]
    assert sum(here) == 5
    if "dp" in sizes:  # five experts, two on each rank, then one, then none
        assert here == [2, 2, 1, 0]
        assert 3 in owners
        assert set(owners) <= {2, 3}


def replicas_share() -> tuple[int, torch.Tensor]:
    """How many experts' matrices this rank has orthogonalized in a step, and its part of a stack."""
    torch.manual_seed(0)
    model = Mixture()
    optimizer = distribute(model, {"replicate": 2, "shard": 2})
    loss_of(model, dist.get_rank()).backward()
    seen = []
    original = parts.orthogonalize
    with mock.patch.object(
        parts, "orthogonalize", lambda b, *rest: seen.append(b.shape) or original(b, *rest)
    ):
        optimizer.step()
    experts = [shape[0] for shape in seen if shape[1:] in ((HIDDEN, WIDTH), (WIDTH, HIDDEN))]
    return sum(experts), model.blocks[0].experts.down.to_local()


def test_replicas_share_the_experts_and_stay_equal_bit_by_bit(ranks):
    answers = ranks(4, replicas_share)  # ranks 0 and 2 hold three experts, 1 and 3 two
    # For each expert gate, up and down, in two blocks.
    assert [count for count, _ in answers] == [12, 6, 6, 6]
    for first, second in ((0, 2), (1, 3)):
        assert torch.equal(answers[first][1], answers[second][1])


def cut_inside() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = Mixture()
    dmuon.dedicate_params(model, mesh, predicate=is_muons)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.ndim == 3 else None)
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match=r"blocks\.0\.experts\.gate_up holds 5 matrices, which fully_shard"):
        dmuon.Muon(model)


def test_a_stack_that_is_cut_inside_its_matrices_is_refused(ranks):
    ranks(2, cut_inside)


def cut_by_both() -> None:
    """Expert and tensor parallelism, on the ranks that are data-parallel for all else."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("efsdp", "ep", "tp"))
    model = Mixture()
    for block in model.blocks:
        whole = block.experts.down.detach()
        block.experts.down = nn.Parameter(distribute_tensor(whole, mesh["ep", "tp"], [Shard(0), Shard(1)]))
    with pytest.raises(ValueError, match=r"blocks\.0\.experts\.down is .* cut along leading dims, not"):
        dmuon.dedicate_params(model, mesh["efsdp", "ep"]._flatten("dp"), predicate=is_muons)


def test_a_stack_that_expert_and_tensor_parallelism_cut_is_refused(ranks):
    ranks(4, cut_by_both)


def no_expert_is_chosen_by_default_unless_its_class_says_so() -> str:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    model = Mixture()
    dmuon.dedicate_params(model, mesh)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    dmuon.Muon(model)
    return dmuon.summary(model)


def test_the_summary_says_what_parameters_hold(ranks):
    text = ranks(1, no_expert_is_chosen_by_default_unless_its_class_says_so)[0]
    assert "holds: blocks.*.experts.gate_up: 5 of 8x6 (2 parameters)" in text
    assert [line for line in text.splitlines() if "experts.down" in line and "muon" in line]
