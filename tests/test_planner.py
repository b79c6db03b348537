"""The planner: models from every source, meshes, cuts, reports and the command line.

That its owners, collectives, bytes and memory are those of the run time is in test_formulas.py.
"""

import contextlib
import io
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from dmuon.engine.runtime import find_runtime
from dmuon.engine.tensor_parallel import _slices
from dmuon.optim.newton_schulz import operation_count
from dmuon.ownership import chunks
from dmuon.planner import Dtypes, Mesh, Options, Plan, PlanError, from_module, load, plan_model
from dmuon.planner.cli import main
from dmuon.planner.cut import DEFAULT, Rule, cut_dim, is_replicated, parse
from dmuon.planner.mesh import Place
from dmuon.planner.model import Model, Parameter, choose_by_pattern, from_names
from dmuon.planner.registry import CONFIGS
from dmuon.planner.report import report
from dmuon.planner.traffic import PHASES
from layouts import Model as Cut
from layouts import build, is_proj

FLOAT32 = Options(dtypes=Dtypes(), ns_algorithm="auto")


def plan(model: str | Model, mesh: str, options: Options | None = None) -> Plan:
    return plan_model(load(model) if isinstance(model, str) else model, Mesh.parse(mesh), options)


# Models


@pytest.mark.parametrize(
    ("name", "parameters", "matrices"),
    [
        ("gpt2", 124_439_808, 4 * 12),
        ("gpt2-xl", 1_557_611_200, 4 * 48),
        ("llama-3-8b", 8_030_261_248, 7 * 32),
        ("llama-3-70b", 70_553_706_496, 7 * 80),
        ("llama-3-405b", 405_853_388_800, 7 * 126),
        ("llama-3.2-1b", 1_235_814_400, 7 * 16),
        ("qwen2.5-7b", 7_615_616_512, 7 * 28),
        ("qwen2.5-72b", 72_706_203_648, 7 * 80),
        ("qwen3-30b-a3b", 30_532_122_624, (4 + 1 + 3 * 128) * 48),
        ("mixtral-8x7b", 46_702_792_704, (4 + 1 + 3 * 8) * 32),
        ("mixtral-8x22b", 140_620_634_112, (4 + 1 + 3 * 8) * 56),
        ("deepseek-v3", 671_026_419_200 - 58 * 256, 8 * 3 + (5 + 1 + 3 * 257) * 58),  # less the buffers
        ("kimi-k2", 1_026_408_232_448 - 60 * 384, 8 + (5 + 1 + 3 * 385) * 60),
        ("vit-h-14", 632_045_800, 6 * 32),
    ],
)
def test_public_models_have_their_published_sizes(name, parameters, matrices):
    model = load(name)
    assert model.numel == parameters
    assert len(model.dedicated) == matrices
    assert len({param.name for param in model.params}) == len(model.params)


def test_every_model_of_the_registry_is_tested():
    marks = test_public_models_have_their_published_sizes.pytestmark
    assert {case[0] for case in marks[0].args[1]} == set(CONFIGS)


class Attention(nn.Module):
    def __init__(self, width: int, shared: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, shared, bias=False)
        self.v_proj = nn.Linear(width, shared, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)


class DecoderLayer(nn.Module):
    def __init__(self, width: int, hidden: int, shared: int) -> None:
        super().__init__()
        self.self_attn = Attention(width, shared)
        self.mlp = MLP(width, hidden)
        self.input_layernorm = nn.RMSNorm(width)
        self.post_attention_layernorm = nn.RMSNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(DecoderLayer(16, 40, 8) for _ in range(3))
        self.norm = nn.RMSNorm(16)


class Llama(nn.Module):
    """With the names and shapes of a Llama of `transformers`."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder()
        self.lm_head = nn.Linear(16, 50, bias=False)


CONFIG = {
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_a_config_gives_what_the_run_time_finds_in_the_model(tmp_path):
    with torch.device("meta"):
        found = from_module(Llama())
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert load(str(tmp_path)).params == found.params
    assert load(str(tmp_path / "config.json")).params == found.params
    assert len(found.dedicated) == 21
    assert {param.block for param in found.dedicated} == {f"model.layers.{i}" for i in range(3)}


def write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Headers and as many bytes as they promise, in float16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(dict(sorted(header.items()))).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def test_safetensors_headers_give_what_the_config_gives(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    expected = load(str(tmp_path / "config.json"))
    shapes = {param.name: param.shape for param in expected.params}
    names = list(shapes)
    files = {"a.safetensors": names[10:], "b.safetensors": names[:10]}
    for file, members in files.items():
        write_safetensors(tmp_path / file, {name: shapes[name] for name in members})
    assert set(load(str(tmp_path)).params) == set(expected.params)
    assert load(str(tmp_path / "b.safetensors")).params == expected.params[:10]
    index = {"weight_map": {name: file for file, members in files.items() for name in members}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model = load(str(tmp_path))
    assert set(model.params) == set(expected.params)
    assert any("safetensors" in note for note in model.notes)
    index["weight_map"]["more.weight"] = "a.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(PlanError, match=r"more.weight"):
        load(str(tmp_path))


def test_layers_in_an_index_are_in_the_order_of_their_numbers(tmp_path):
    shapes = {f"layers.{i}.up.weight": (4, 8) for i in (10, 2, 1)}
    write_safetensors(tmp_path / "a.safetensors", shapes)
    index = {"weight_map": dict.fromkeys(shapes, "a.safetensors")}
    (tmp_path / "x.index.json").write_text(json.dumps(index))
    blocks = [param.block for param in load(str(tmp_path / "x.index.json")).params]
    assert blocks == ["layers.1", "layers.2", "layers.10"]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("m.safetensors", b"", "not a safetensors file"),
        ("m.safetensors", (1 << 40).to_bytes(8, "little") + b"{}", "not a safetensors file"),
        ("m.safetensors", (4).to_bytes(8, "little") + b"[1]]", "not a safetensors file"),
        ("m.safetensors", (11).to_bytes(8, "little") + b'{"a":{"b":1}}', "not a safetensors file"),
        ("config.json", b"{", "cannot be read as JSON"),
        ("config.json", b"[]", "no JSON object"),
        ("config.json", b'{"model_type": "strange"}', "'strange' is not known; known are deepseek_v3"),
        ("config.json", b'{"model_type": "llama", "vocab_size": 3}', "no entry 'hidden_size'"),
        ("x.index.json", b"{}", "no weight_map"),
        ("model.bin", b"", "neither a .json nor"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, file, content, message):
    (tmp_path / file).write_bytes(content)
    with pytest.raises(PlanError, match=message) as raised:
        load(str(tmp_path / file))
    assert file in str(raised.value)


def test_a_directory_without_a_model_is_named(tmp_path):
    with pytest.raises(PlanError, match="neither safetensors files nor a config"):
        load(str(tmp_path))
    with pytest.raises(PlanError, match="there is no file"):
        load(str(tmp_path / "config.json"))


def test_a_function_builds_the_model_on_meta(tmp_path, monkeypatch):
    (tmp_path / "planned_model.py").write_text(
        "import torch\nfrom test_planner import Llama\nnumber = 3\n"
        "def build():\n    model = Llama()\n    assert model.lm_head.weight.is_meta\n    return model\n"
        "class Other:\n    build = staticmethod(lambda: torch.nn.Embedding(3, 2))\n"
        "def nothing():\n    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with torch.device("meta"):
        assert load("planned_model:build").params == from_module(Llama()).params
    for text, message in [
        ("planned_model:nothing", "returns a int"),
        ("planned_model:absent", "has no absent"),
        ("planned_model:number", "cannot be called"),
        ("planned_model:Other.build", "nothing to dedicate"),
        ("no_such_module_here:f", "cannot import"),
    ]:
        with pytest.raises(PlanError, match=message):
            load(text)


def test_an_unknown_model_is_told_what_there_is():
    with pytest.raises(PlanError, match=r"unknown model 'llama-9'.*gpt2, .*kimi-k2.*config.json"):
        load("llama-9")


def test_patterns_choose_what_is_dedicated():
    model = from_names("m", [("head.weight", (9, 4)), ("layers.0.a.weight", (4, 4)), ("layers.0.b", (2, 4))])
    assert [param.name for param in model.dedicated] == ["layers.0.a.weight"]
    changed = choose_by_pattern(model, ["head", r"layers\.\d\.b"], ["a.weight$"])
    assert [param.name for param in changed.dedicated] == ["head.weight", "layers.0.b"]
    for include, exclude, message in [
        (["("], [], "not a regular expression"),
        ([], ["nothing"], "matches no parameter"),
    ]:
        with pytest.raises(PlanError, match=message):
            choose_by_pattern(model, include, exclude)
    with pytest.raises(PlanError, match="not a matrix"):
        choose_by_pattern(from_names("m", [("a.0.weight", (4,))]), ["a"], [])
    with pytest.raises(PlanError, match="--include"):
        plan(choose_by_pattern(model, [], ["a.weight"]), "dp=2")


# Meshes and cuts


def test_meshes_are_read():
    mesh = Mesh.parse("replicate=16,shard=8,tp=4")
    assert (mesh.replicate, mesh.shard, mesh.tp, mesh.slots, mesh.ranks, mesh.ddp) == (
        16,
        8,
        4,
        128,
        512,
        False,
    )
    assert mesh.place_of(4 * 8 + 4 * 2 + 3) == Place(shard=2, replicate=1, tp=3)
    assert Mesh.parse(" tp = 2 , ddp = 3 ").ranks == 6
    ddp = Mesh.parse("ddp=3")  # rows of one rank
    assert (ddp.replicate, ddp.shard, ddp.ddp) == (3, 1, True)
    assert Mesh.parse("tp=4").slots == 1
    assert [Mesh.parse(text).row_name for text in ("dp=2", "shard=2", "replicate=2,shard=2")] == [
        "dp",
        "shard",
        "shard",
    ]
    assert [Mesh.parse(text).column_name for text in ("replicate=2,shard=2", "ddp=2")] == ["replicate", "ddp"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read ''"),
        ("8", "cannot read '8'"),
        ("dp:8", "cannot read 'dp:8'"),
        ("pp=2,dp=4", "cannot read 'pp=2'"),
        ("dp=2,dp=2", "has dp twice"),
        ("dp=0", "size of dp must be a whole number of at least 1"),
        ("dp=-2", "size of dp"),
        ("dp=2.5", "size of dp"),
        ("dp=", "size of dp"),
        ("dp=²", "size of dp"),
        ("dp=2,shard=2", "dp, shard do not go together"),
        ("replicate=2", "replicate do not go together"),
        ("ddp=2,replicate=2", "do not go together"),
    ],
)
def test_meshes_that_are_none_are_refused(text, message):
    with pytest.raises(PlanError, match=message) as raised:
        Mesh.parse(text)
    assert repr(text) in str(raised.value)


def test_tensor_parallelism_cuts_the_usual_layers():
    kinds = {param.name.split(".")[-2]: cut_dim(param, DEFAULT) for param in load("llama-3-8b").params}
    assert kinds == {
        **dict.fromkeys(["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"], 0),
        **dict.fromkeys(["o_proj", "down_proj"], 1),
        **dict.fromkeys(["input_layernorm", "post_attention_layernorm", "norm"], None),
    }
    gpt2 = {".".join(param.name.split(".")[-2:]): cut_dim(param, DEFAULT) for param in load("gpt2").params}
    assert gpt2["c_attn.weight"] == gpt2["c_fc.weight"] == 1
    assert gpt2["c_proj.weight"] == gpt2["c_attn.bias"] == 0
    assert gpt2["c_proj.bias"] is gpt2["ln_1.weight"] is None
    for name in ("mixtral-8x7b", "deepseek-v3", "vit-h-14", "qwen3-30b-a3b"):
        uncut = {p.name.split(".")[-2] for p in load(name).dedicated if cut_dim(p, DEFAULT) is None}
        assert uncut <= {"gate", "q_a_proj", "kv_a_proj_with_mqa"}, name


def test_the_plan_for_tensor_parallelism_can_be_changed():
    param = Parameter("layers.0.mlp.up_proj.weight", (8, 4), True, "layers.0")
    bias = Parameter("layers.0.mlp.up_proj.bias", (8,), False, "layers.0")
    assert (cut_dim(param, DEFAULT), cut_dim(bias, DEFAULT)) == (0, 0)
    columns = parse("up_proj=columns")
    assert (cut_dim(param, columns), cut_dim(bias, columns)) == (1, None)
    assert is_replicated(bias, columns)
    assert not is_replicated(param, columns)
    assert cut_dim(param, parse("mlp.up_proj=columns")) == 1  # the longer name
    assert cut_dim(param, parse("up_proj=none")) is None
    assert not is_replicated(param, parse("up_proj=none"))
    assert is_replicated(param, parse("up_proj=replicate"))
    assert parse("none,a=rows") == {"a": Rule("rows", cuts_bias=True)}
    for text in ("up_proj", "=rows", "up_proj=both"):
        with pytest.raises(PlanError, match="--tp-plan"):
            parse(text)


@pytest.mark.parametrize(("size", "count"), [(8, 4), (13, 4), (5, 4), (2, 4), (0, 2)])
def test_pieces_are_those_of_the_run_time(size, count):
    slices = [_slices(torch.Size((size,)), [(0, count, i)])[0] for i in range(count)]
    assert chunks(size, count) == [piece.stop - piece.start for piece in slices]


# What follows


def test_work_is_counted_where_it_is_done():
    names = [("h.0.up_proj.weight", (8, 4)), ("h.0.down_proj.weight", (4, 8)), ("h.0.mix.weight", (6, 6))]
    model = from_names("m", names)
    long, square = operation_count(8, 4), operation_count(6, 6)
    alone = plan(model, "dp=1", FLOAT32)
    assert {place: load.operations for place, load in alone.loads.items()} == {(0, 0): 2 * long + square}
    pair = plan(model, "tp=2", FLOAT32)  # the uncut one on both
    assert {place: load.operations for place, load in pair.loads.items()} == {
        (0, 0): long + square,
        (0, 1): long + square,
    }


def test_balance_is_that_of_the_assignment():
    eight = plan("llama-3-8b", "dp=8", FLOAT32)
    numbers = report(eight)["balance"]
    busiest = max(load.operations for load in eight.loads.values())
    mean = sum(operation_count(*param.shape) for param in eight.model.dedicated) / 8
    assert numbers["over_bound"] == numbers["over_mean"] == pytest.approx(busiest / mean)
    assert numbers["rank_over_bound"] == numbers["rank_over_mean"] == pytest.approx(busiest / mean)
    many = report(plan("llama-3-8b", "dp=512", FLOAT32))
    assert many["balance"]["owners"] == 224  # a matrix each
    assert many["balance"]["over_bound"] == 1.0  # one of the largest each: no assignment can do better
    assert many["balance"]["over_mean"] > 2
    assert any("288 of 512" in note for note in many["notes"])


def test_limits_say_how_many_owners_are_of_use():
    numbers = report(plan("llama-3-8b", "dp=8", FLOAT32))
    rows = {row["layer"]: row for row in numbers["limits"]}
    total = sum(operation_count(*param.shape) for param in load("llama-3-8b").dedicated)
    assert rows["mlp.up_proj"]["useful_owners"] == total // operation_count(14336, 4096)
    assert rows["mlp.up_proj"]["count"] == 32
    assert sum(row["share_of_operations"] for row in rows.values()) == pytest.approx(1)
    assert numbers["limits"][0]["layer"].startswith("mlp.")
    assert rows["mlp.up_proj"]["share_of_bound"] == pytest.approx(8 * operation_count(14336, 4096) / total)


def test_averages_are_those_of_the_page_on_bytes():
    even = plan("llama-3-8b", "dp=8", FLOAT32)
    dedicated = 4 * sum(param.numel for param in even.model.dedicated)
    moved = even.moves[:, 0, :, 1].double().mean(0)
    assert moved[PHASES.index("gather")] == 2 * 7 / 8 * dedicated
    assert moved[PHASES.index("reduce")] == 7 / 8 * (dedicated + counts_of(even))
    kept = plan("llama-3-8b", "dp=8", Options(dtypes=Dtypes(), reshard=False))
    assert kept.moves[..., 0, 1].double().mean() == 7 / 8 * dedicated
    rows = plan("llama-3-8b", "replicate=4,shard=2", FLOAT32)
    for phase in ("reduce_replicas", "publish"):
        moved = rows.moves[:, 0, PHASES.index(phase), 1].double().mean()
        assert moved == 3 / 8 * (dedicated + counts_of(rows))
    assert rows.rest[..., 0].sum() == 4 * dedicated
    assert rows.rest[..., 1].sum() == dedicated


def counts_of(each: Plan) -> int:
    """Bytes of the counts of all matrices: those of each group's owners are padded."""
    owned = Counter((m.param.block, m.slot) for m in each.matrices)
    return sum(-(-4 * count // 16) * 16 for count in owned.values())


def test_each_phase_is_on_its_mesh_dim():
    def dims(mesh: str) -> dict[str, str]:
        numbers = report(plan("llama-3-8b", mesh))["traffic"]
        assert numbers["bytes"]["mean"] == pytest.approx(sum(p["bytes"]["mean"] for p in numbers["phases"]))
        assert numbers["bytes"]["mean"] == pytest.approx(sum(d["mean"] for d in numbers["by_dim"].values()))
        return {phase["phase"]: phase["dim"] for phase in numbers["phases"]}

    assert dims("dp=1") == {}
    assert dims("dp=4") == {"gather": "dp", "reduce": "dp"}
    assert dims("replicate=2,shard=2,tp=2") == {
        "gather": "shard",
        "reduce": "shard",
        "reduce_replicas": "replicate",
        "publish": "replicate",
        "exchange": "tp",
        "publish_exchange": "tp",
    }
    assert dims("ddp=4") == {"reduce_replicas": "ddp", "publish": "ddp"}


def gathered_bytes(reshard: bool) -> tuple[list[int], list[int]]:
    """Bytes of gathered weights whenever a layer starts, in forward and (by its gradients) in backward."""
    model = Cut(width=8, hidden=32, depth=4)
    optimizer = build(model, {"dp": 2}, reshard=reshard)
    runtime = find_runtime(model)
    seen: list[int] = []

    def look(*_: Any) -> None:
        storages = [param.gathered.untyped_storage() for param in runtime.params]
        seen.append(sum({s.data_ptr(): s.nbytes() for s in storages if s.nbytes()}.values()))

    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    for layer in model.layers:
        layer.norm.register_forward_pre_hook(look)
    loss = model(torch.randn(4, 8)).square().mean()
    forward, seen[:] = list(seen), []
    for param in runtime.params:
        param.gathered.register_post_accumulate_grad_hook(look)
    loss.backward()
    return forward, seen


@pytest.mark.parametrize("reshard", [True, False])
def test_gathered_weights_at_their_peak(ranks, reshard):
    forward, backward = ranks(2, gathered_bytes, reshard)[0]
    with torch.device("meta"):
        model = from_module(Cut(width=8, hidden=32, depth=4), predicate=is_proj)
    planned = plan(model, "dp=2", Options(dtypes=Dtypes(), reshard=reshard))
    assert max(forward) == max(backward) == planned.work[0].gathered


def test_gradients_at_their_peak_are_two_groups_and_a_buffer():
    even = plan(from_names("m", [(f"h.{i}.up.weight", (8, 16)) for i in range(4)]), "dp=2")
    packed = 2 * 8 * 16 + 16  # bfloat16, and a count that is padded
    assert even.work[0].gathered == even.work[0].gradients - packed == 2 * 2 * 8 * 16


def test_updates_wait_for_their_publish():
    names = [("h.0.up_proj.weight", (8, 4)), ("h.0.mix.weight", (4, 4))]
    sizes = {mesh: plan(from_names("m", names), mesh).updates.tolist() for mesh in ("dp=2", "ddp=2", "tp=2")}
    assert sizes == {"dp=2": [[0], [0]], "ddp=2": [[64], [32]], "tp=2": [[64, 0]]}


def test_under_ddp_weights_are_kept_once():
    once = plan("gpt2", "ddp=4", FLOAT32)
    assert once.work[0].gathered == 0
    assert (once.rest[..., 0] == 4 * sum(param.numel for param in once.model.dedicated)).all()
    assert plan("gpt2", "ddp=4").work[0].gathered == 2 * sum(p.numel for p in once.model.dedicated)


def test_peaks_contain_what_rests():
    for mesh in ("dp=4", "replicate=2,shard=2,tp=2", "ddp=4"):
        peaks = plan("gpt2", mesh)
        assert (peaks.peak >= peaks.rest.sum(2)).all()
        assert peaks.peak.shape == (peaks.mesh.slots, peaks.mesh.tp)


def test_pieces_that_are_empty_and_matrices_that_are_whole_are_noted():
    small = from_names("m", [("h.0.up_proj.weight", (2, 4)), ("h.0.other.weight", (4, 4))])
    notes = report(plan(small, "tp=4"))["notes"]
    assert any("tp=4 does not fit 1 matrices" in note for note in notes)
    assert any("1 matrices are not cut" in note and "other" in note for note in notes)
    nothing = Options(tp_plan={})
    notes = report(plan(small, "tp=4", nothing))["notes"]
    assert any("cuts no matrix" in note for note in notes)


# The command line


def run(*arguments: str) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main(["plan", *arguments]) == 0
    assert not dist.is_initialized()
    return output.getvalue()


def refused(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


GPT2 = ("--model", "gpt2", "--machine", "h100-8")


def test_text_says_what_was_asked_for():
    text = run(*GPT2, "--mesh", "dp=4,tp=2", "--compare", "ddp=8", "--compare", "replicate=2,shard=4")
    for part in (
        "124,439,808 parameters",
        "8 ranks",
        "publish_exchange",
        "momentum",
        "peak",
        "c_fc",
        "data sheets",
    ):
        assert part in text
    assert text.count("ddp=8") == 1
    assert "\x1b" not in text  # no colours in a file


SPREAD = {"max", "mean", "min"}
KEYS = {
    "": {
        "schema",
        "mesh",
        "model",
        "options",
        "balance",
        "newton_schulz",
        "time",
        "traffic",
        "memory",
        "limits",
        "notes",
        "compare",
    },
    "mesh": {"text", "ranks", "slots", "shard", "replicate", "tp", "ep", "ddp"},
    "model": {
        "name",
        "parameters",
        "matrices",
        "stacks",
        "dedicated_parameters",
        "base_parameters",
        "dedicated_bytes",
        "groups",
    },
    "options": {
        "weight_bytes",
        "compute_bytes",
        "reduce_bytes",
        "momentum_bytes",
        "ns_bytes",
        "reshard_after_forward",
        "ns_steps",
        "ns_algorithm",
        "teams",
        "tp_plan",
    },
    "balance": {
        "over_bound",
        "over_mean",
        "owners",
        "slots",
        "rank_over_bound",
        "rank_over_mean",
        "busy_ranks",
        "ranks",
    },
    "newton_schulz": {
        "busiest_rank_operations",
        "mean_rank_operations",
        "teams",
    },
    "time": {"machine", "tokens", "adamw", "dmuon", "two_exchanges", "advice"},
    "traffic": {"phases", "by_dim", "collectives", "bytes"},
    "memory": {"rest", "updates", "peak", "peak_rank", "peak_rank_work"},
}


def test_json_has_the_documented_schema():
    content = json.loads(run(*GPT2, "--mesh", "dp=4,tp=2", "--compare", "ddp=8", "--json", "--matrices"))
    matrices = content.pop("matrices")
    assert set(content) == KEYS[""]
    assert content["schema"] == 3
    for each in (content, *content["compare"]):
        for key, keys in KEYS.items():
            assert key == "" or set(each[key]) == keys
        assert set(each["traffic"]["phases"][0]) == {"phase", "dim", "collectives", "bytes"}
        assert set(each["memory"]["peak_rank_work"]) == {"gathered", "gradients", "step"}
        assert set(each["traffic"]["bytes"]) == set(each["memory"]["rest"]["total"]) == SPREAD
        assert set(each["limits"][0]) == {
            "layer",
            "shape",
            "count",
            "share_of_operations",
            "share_of_bound",
            "useful_owners",
        }
    assert [each["mesh"]["text"] for each in (content, *content["compare"])] == ["dp=4,tp=2", "ddp=8"]
    assert len(matrices) == 48
    assert matrices[0]["name"] == "transformer.h.0.attn.c_attn.weight"
    assert matrices[0]["shape"] == [768, 2304]
    assert set(matrices[0]["owner"]) == {"shard", "replicate", "tp"}
    page = (Path(__file__).parents[1] / "docs" / "planner.md").read_text()
    for keys in (*KEYS.values(), SPREAD):
        assert all(f"`{key}`" in page for key in keys)


def test_the_same_question_has_the_same_answer():
    arguments = (*GPT2, "--mesh", "replicate=2,shard=4,tp=2", "--json", "--matrices")
    assert run(*arguments) == run(*arguments)


def test_settings_reach_the_plan():
    def ask(*arguments: str) -> dict[str, Any]:
        return json.loads(run(*GPT2, "--mesh", "dp=2,tp=2", "--json", *arguments))

    usual = ask()
    assert usual["options"]["weight_bytes"] == 4
    assert usual["options"]["compute_bytes"] == usual["options"]["reduce_bytes"] == 2
    other = ask("--compute-dtype", "float32", "--reduce-dtype", "float64", "--weight-dtype", "bfloat16")
    assert [other["options"][f"{name}_bytes"] for name in ("weight", "compute", "reduce")] == [2, 4, 8]
    phases = [each["traffic"]["phases"][-1] for each in (usual, ask("--ns-dtype", "float32"))]
    assert [phase["phase"] for phase in phases] == 2 * ["publish_exchange"]
    assert 2 * phases[0]["bytes"]["mean"] == phases[1]["bytes"]["mean"]
    gathers = [each["traffic"]["phases"][0]["bytes"]["mean"] for each in (usual, ask("--no-reshard"))]
    assert gathers[0] == 2 * gathers[1]
    assert usual["time"]["machine"]["tflops"] == 989
    more = ask("--ns-steps", "10", "--tflops", "100", "--set", "gpus=1")["time"]
    assert more["dmuon"]["orthogonalize"] == pytest.approx(2 * 9.89 * usual["time"]["dmuon"]["orthogonalize"])
    assert "gpus given" in more["machine"]["source"]
    assert ask("--tokens", "4096")["time"]["dmuon"]["compute"] * 2 == usual["time"]["dmuon"]["compute"]
    assert (
        ask("--momentum-dtype", "bfloat16")["memory"]["rest"]["momentum"]["max"] * 2
        == (usual["memory"]["rest"]["momentum"]["max"])
    )
    assert ask("--tp-plan", "none")["options"]["tp_plan"] == {}
    assert ask("--exclude", r"h\.0\.")["model"]["matrices"] == 44
    assert ask("--include", "wpe")["model"]["matrices"] == 49


def test_without_a_machine_there_are_no_times():
    content = json.loads(run("--model", "gpt2", "--mesh", "dp=2", "--json"))
    assert content["time"] is None
    assert content["newton_schulz"]["busiest_rank_operations"] > 0
    assert "An iteration" not in run("--model", "gpt2", "--mesh", "dp=2")


def test_the_best_layouts_are_printed():
    asked = ("--model", "mixtral-8x7b", "--ranks", "64", "--machine", "h100-8")
    found = json.loads(run(*asked, "--json"))["layouts"]
    times = [layout["iteration"]["total"] for layout in found]
    assert times == sorted(times)
    assert all(layout["peak"] < 80 * 2**30 for layout in found)
    assert found[0]["mesh"].split(",")[0] in run(*asked)


def test_errors_say_what_to_change(capsys):
    assert "unknown model 'gpt9'. Known are gpt2" in refused(capsys, "--model", "gpt9", "--mesh", "dp=2")
    assert "mesh 'dp'" in refused(capsys, *GPT2, "--mesh", "dp")
    assert "mesh 'x=2'" in refused(capsys, *GPT2, "--mesh", "dp=2", "--compare", "x=2")
    assert "has 4 ranks, not 8" in refused(capsys, *GPT2, "--mesh", "dp=2,tp=2", "--ranks", "8")
    hopper = ("--machine", "h100-8")
    for arguments, message in [
        (("--mesh", "dp=2", "--tflops", "3"), "change a --machine: one of a100-8"),
        (("--mesh", "dp=2", "--machine", "h1"), "known are a100-8"),
        (("--mesh", "dp=2", *hopper, "--set", "speed=3"), "VALUE of gpus, tflops"),
        (("--mesh", "dp=2", *hopper, "--set", "tflops=0"), "a positive one"),
        (("--mesh", "dp=6,ep=4"), "ep must divide the ranks of a row, 6"),
        (("--ranks", "8"), "or --ranks and --machine"),
        (("--ranks", "8", *hopper, "--activations", "79.9"), "no layout of gpt2 on 8 ranks fits in 0 GiB"),
    ]:
        assert message in refused(capsys, "--model", "gpt2", *arguments)
    for wrong in (("--tflops", "-1"), ("--tflops", "nan"), ("--ns-steps", "0"), ("--ranks", "x")):
        with pytest.raises(SystemExit, match="2"):
            main(["plan", "--model", "gpt2", "--mesh", "dp=2", *wrong])


def test_pictures_are_drawn(tmp_path, capsys):
    for name in ("plan.png", "again.png"):
        run(*GPT2, "--mesh", "dp=4", "--compare", "dp=2,tp=2", "--picture", str(tmp_path / name), "--json")
    content = (tmp_path / "plan.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert content == (tmp_path / "again.png").read_bytes()
    for absent in (tmp_path / "absent" / "plan.png", tmp_path / "plan.strange"):
        error = refused(capsys, *GPT2, "--mesh", "dp=4", "--json", "--picture", str(absent))
        assert f"--picture {absent}" in error


def test_a_package_that_is_missing_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert "pip install 'dmuon[plan]'" in refused(capsys, *GPT2, "--mesh", "dp=2")
    run(*GPT2, "--mesh", "dp=2", "--json")


def test_it_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "dmuon", "plan", "--help"], capture_output=True, text=True, check=True
    )
    for part in ("--mesh", "--compare", "--tp-plan", "llama-3-70b", "examples:"):
        assert part in done.stdout


def test_the_largest_mesh_and_the_most_matrices_can_be_planned():
    huge = plan("llama-3-405b", "dp=16384")
    assert huge.balance == 1.0
    assert len(huge.loads) == 882
    assert huge.moves.shape == (16384, 1, len(PHASES), 2)
    experts = plan("qwen3-30b-a3b", "replicate=8,shard=16,tp=4")
    assert experts.balance < 1.01


@pytest.mark.parametrize("mesh", ["replicate=3,shard=5,tp=2", "dp=7", "ddp=5,tp=2"])
def test_the_tables_of_all_ranks_are_those_of_each(mesh):
    gpt2 = plan("gpt2", mesh)
    moves, rest = gpt2.moves.flatten(0, 1).tolist(), gpt2.rest.flatten(0, 1).tolist()
    for rank in range(gpt2.mesh.ranks):
        mine = gpt2.moves_of(rank)
        assert moves[rank] == [list(mine.get(phase, (0, 0))) for phase in PHASES]
        assert rest[rank] == list(gpt2.rest_of(rank))
