"""What the documentation shows runs as it stands there, and its quotes and links are true.

A comment in the line above a block, which readers do not see, says how it is run:

    <!-- run: 4 ranks -->              a script of its own, on so many processes
    <!-- run: continues -->            goes on where the script before it on the page stops: before its last
                                       line, which destroys the process group
    <!-- run: 4 ranks, given model --> a part of a script; what stands before it is in `GIVEN`
    <!-- output -->                    what the first rank prints in the script above it
"""

import ast
import contextlib
import copy
import importlib
import io
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dmuon
from models import assert_weights_close, mean_backward
from reference import ReferenceMuon

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

BLOCK = re.compile(
    r"(?:^<!-- (?P<marker>[^\n]*) -->\n)?^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
LAST_LINE = "dist.destroy_process_group()\n"

MODEL = """
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up_proj = nn.Linear(width, 4 * width, bias=False)
        self.down_proj = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return x + self.down_proj(torch.tanh(self.up_proj(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width=8, depth=2):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, 3, bias=False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
model = Model()
"""
TP_MODEL = """
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
""" + MODEL.replace('(dist.get_world_size(),), mesh_dim_names=("dp",)', '(2, 2), mesh_dim_names=("dp", "tp")')
GIVEN = {
    "tp": TP_MODEL,
    "nothing": 'import torch.distributed as dist\ndist.init_process_group("gloo")\n',
    "model": MODEL,
    "trained": "import contextlib\n"
    + MODEL
    + """
dmuon.dedicate_params(model, mesh)
fully_shard(model, mesh=mesh)
optimizer = dmuon.Muon(model)
inputs = torch.ones(2, 8)
""",
    "gradients": MODEL
    + """
dmuon.dedicate_params(model, mesh)
fully_shard(model, mesh=mesh)
optimizer = dmuon.Muon(model)
model(torch.ones(2, 8)).sum().backward()
""",
}


@dataclass
class Program:
    """A script of the documentation, with its continuations."""

    page: str
    line: int
    ranks: int
    code: str
    output: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def programs() -> Iterator[Program]:
    for page in PAGES:
        text = page.read_text()
        latest: Program | None = None
        for block in BLOCK.finditer(text):
            marker, code = block["marker"] or "", block["code"]
            line = text[: block.start("code")].count("\n") + 1
            if marker == "output":
                latest.output += code.splitlines()
            elif block["language"] == "python" and marker == "run: continues":
                latest.code = latest.code.removesuffix(LAST_LINE) + code.removesuffix(LAST_LINE) + LAST_LINE
            elif block["language"] == "python":
                run = re.fullmatch(r"run: (\d) ranks?(?:, given (\w+))?", marker)
                assert run, f"{page.name}:{line}: nothing says how this block is run"
                if latest is not None:
                    yield latest
                given = GIVEN[run[2]] + code + LAST_LINE if run[2] else code
                assert given.endswith(LAST_LINE), f"{page.name}:{line}: a script destroys its process group"
                latest = Program(page.name, line, int(run[1]), given)
        if latest is not None:
            yield latest


def run_as_script(code: str, name: str) -> str:
    """Run a script in this process, in the process group there is; what it printed."""
    handlers, level = logging.root.handlers[:], logging.root.level
    output = io.StringIO()
    calls: list[str] = []
    with (
        mock.patch.object(dist, "init_process_group", calls.append),
        mock.patch.object(dist, "destroy_process_group", partial(calls.append, "the end")),
        contextlib.redirect_stdout(output),
    ):
        exec(compile(code, name, "exec"), {"__name__": "__main__"})
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
    assert calls == ["gloo", "the end"]
    return output.getvalue()


@pytest.mark.parametrize("program", list(programs()), ids=str)
def test_scripts_run_as_written(ranks, program):
    code = program.code.replace('"cuda"', '"cpu"')
    printed = ranks(program.ranks, run_as_script, code, str(program))[0].splitlines()
    losses = re.compile(r"step \d+: loss ")  # their last digit differs between machines
    for line in program.output:
        if found := losses.match(line):
            assert any(other.startswith(found[0]) for other in printed), line
        else:
            assert line in printed, "\n".join(printed)


# Error messages


def text_of(node: ast.expr) -> str:
    """A string as the documentation quotes it: `...` where values stand."""
    if isinstance(node, ast.Constant):
        return re.sub(r"%[ds]", "...", str(node.value))  # for logging
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value) for value in node.values)
    return "..."


def messages() -> dict[str, str]:
    """The errors that the package raises, and its warnings, by where."""
    found = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            if ast.unparse(node.func).endswith(("Error", "logger.warning")):
                text = text_of(node.args[0])
                if re.search(r"\w{3}", text):  # else it passes another error's message on
                    found[f"{path.name}:{node.lineno}"] = text
    return found


def fits(message: str, quote: str) -> bool:
    """Whether a quote is of a message; either may have `...` where the other is explicit."""
    patterns = [re.escape(text).replace(re.escape("..."), ".*") for text in (message, quote)]
    return bool(re.fullmatch(patterns[0], quote) or re.fullmatch(patterns[1], message))


QUOTES = re.findall(r"^> `(.*)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)


def test_every_error_is_in_troubleshooting():
    missing = [
        f"{where}: {message}"
        for where, message in messages().items()
        if not any(fits(message, quote) for quote in QUOTES)
    ]
    assert not missing, "\n".join(missing)


def test_every_quote_is_of_an_error_or_of_torch():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    ours = re.findall(r"^> `(.*)`$", text[: text.index("## Messages of torch")], re.MULTILINE)
    raised = list(messages().values())
    strange = [quote for quote in ours if not any(fits(message, quote) for message in raised)]
    assert not strange, "\n".join(strange)


# Links


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


# The site


def test_the_site_builds(tmp_path, caplog):
    """No broken link or anchor, no page outside of the navigation, no name unknown to the reference."""
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from mkdocs.exceptions import Abort

    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True)
    with caplog.at_level(logging.WARNING), contextlib.suppress(Abort):
        build(config)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert not warnings, "\n".join(warnings)
    assert (tmp_path / "index.html").exists()


def test_the_reference_has_every_public_name():
    described = re.findall(r"^::: dmuon\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(described) == sorted(dmuon.__all__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_the_package_exist(page):
    for name in re.findall(r"`(dmuon(?:\.\w+)+)", page.read_text()):
        parts = name.split(".")
        found: Any = importlib.import_module(parts[0])
        for place, part in enumerate(parts[1:], 2):
            if parts[1] == "integrations" and place > 2:
                pytest.importorskip(parts[2])
            if not hasattr(found, part):
                importlib.import_module(".".join(parts[:place]))
            found = getattr(found, part)


# A model with the usual names, set up by the usual calls

WIDTH, HIDDEN, HEAD_WIDTH, TOKENS = 8, 24, 2, 13


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        heads = [projection(x).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for projection in projections]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(WIDTH)
        self.self_attn = Attention()
        self.mlp_norm = nn.RMSNorm(WIDTH)
        self.mlp = MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


ATTENTION_PLAN = {
    "q_proj": ColwiseParallel(),
    "k_proj": ColwiseParallel(),
    "v_proj": ColwiseParallel(),
    "o_proj": RowwiseParallel(),
}
MLP_PLAN = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
MODEL_PLAN = {
    **{f"layers.*.self_attn.{name}": style for name, style in ATTENTION_PLAN.items()},
    **{f"layers.*.mlp.{name}": style for name, style in MLP_PLAN.items()},
}


def in_layer(name: str, param: nn.Parameter) -> bool:
    return "proj" in name and param.ndim == 2


def two_dims(model: Decoder, sizes: tuple[int, ...]) -> dmuon.Muon:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    for layer in model.layers:
        parallelize_module(layer.self_attn, mesh["tp"], ATTENTION_PLAN)
        parallelize_module(layer.mlp, mesh["tp"], MLP_PLAN)
    dmuon.dedicate_params(model, mesh["dp"], predicate=in_layer)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return dmuon.Muon(model, lr=0.02, momentum=0.95, adamw_lr=1e-3)


def three_dims(model: Decoder, sizes: tuple[int, ...]) -> dmuon.Muon:
    mesh3d = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard", "tp"))
    parallelize_module(model, mesh3d["tp"], MODEL_PLAN)
    dmuon.dedicate_params(model, mesh=mesh3d["shard"], replicate_mesh=mesh3d["replicate"], predicate=in_layer)
    fully_shard(model, mesh=mesh3d["replicate", "shard"])
    return dmuon.Muon(model, lr=0.02)


def ddp(model: Decoder, sizes: tuple[int, ...]) -> dmuon.Muon:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], MODEL_PLAN)
    dmuon.dedicate_params_ddp_tp(model, mesh["dp"], predicate=in_layer)
    dmuon.replicate_tp(model, mesh["dp"])
    return dmuon.Muon(model, lr=0.02)


def token_loss(model: nn.Module, seed: int) -> torch.Tensor:
    tokens = torch.randint(0, TOKENS, (2, 6), generator=torch.Generator().manual_seed(seed))
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train_two_steps(set_up: Any, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    torch.manual_seed(1)
    model = Decoder()
    oracle = copy.deepcopy(model)
    reference = ReferenceMuon(oracle, in_layer)
    optimizer = set_up(model, sizes)
    tp = sizes[-1]
    replicas = dist.get_world_size() // tp
    for step in range(2):
        token_loss(model, 10 * step + dist.get_rank() // tp).backward()
        mean_backward(oracle, token_loss, [10 * step + replica for replica in range(replicas)])
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
        reference.zero_grad()
    assert_weights_close(model, oracle)
    return [
        {
            "name": dp.param_name,
            "local": tuple(dp._orig_size),
            "full": tuple(dp.full_shape),
            "shard_dim": dp.shard_dim,
            "is_tp_owner": dp.is_tp_owner,
            "tp_group_size": dp.tp_group.size() if dp.tp_group else 1,
        }
        for dp in dmuon.get_owned_params(model, rank=dist.get_rank())
    ]


SETUPS = [
    pytest.param(two_dims, (2, 2), id="dp2-tp2"),
    pytest.param(two_dims, (1, 4), id="dp1-tp4"),
    pytest.param(two_dims, (4, 1), id="dp4-tp1"),
    pytest.param(three_dims, (2, 1, 2), id="hsdp2x1-tp2"),
    pytest.param(three_dims, (1, 2, 2), id="hsdp1x2-tp2"),
    pytest.param(three_dims, (2, 2, 1), id="hsdp2x2-tp1"),
    pytest.param(ddp, (2, 2), id="ddp2-tp2"),
    pytest.param(ddp, (1, 4), id="ddp1-tp4"),
]


@pytest.mark.always("dp2-tp2", "hsdp2x1-tp2", "ddp2-tp2")
@pytest.mark.parametrize(("set_up", "sizes"), SETUPS)
def test_the_usual_calls_train_as_one_process(ranks, set_up, sizes):
    by_rank = ranks(4, train_two_steps, set_up, sizes)
    shapes = {n: tuple(p.shape) for n, p in Decoder().named_parameters() if in_layer(n, p)}
    tp = sizes[-1]
    owners: dict[str, list[int]] = {}
    for rank, records in enumerate(by_rank):
        for record in records:
            full, name = shapes[record["name"]], record["name"]
            dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
            local = [size // tp if i == dim else size for i, size in enumerate(full)]
            assert record["full"] == full
            assert record["local"] == tuple(local)
            assert record["tp_group_size"] == tp
            assert record["shard_dim"] == (dim if tp > 1 else None)
            owners.setdefault(name, []).extend([rank] if record["is_tp_owner"] else [])
    assert sorted(owners) == sorted(shapes)
    assert all(len(ranks) == 1 for ranks in owners.values())  # one of the TP group in the owner row
    assert {rank for (rank,) in owners.values()} == set(range(4))  # and all ranks take their part
