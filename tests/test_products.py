"""Products with a symmetric result, and matrices orthogonalized together."""

import functools
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import dmuon
from dmuon.engine.runtime import find_runtime
from dmuon.optim import products
from dmuon.optim.newton_schulz import newton_schulz
from dmuon.optim.products import backend_name, matrices_at_once, panel_height, symmetric_product
from models import Transformer, build, is_proj, loss_of, make_mesh

CPU = torch.device("cpu")


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def integers(*shape: int) -> torch.Tensor:
    """Small ones, so that sums are exact in any order."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(sum(shape))).float()


@settings(max_examples=60)
@given(
    batch=st.integers(1, 3),
    side=st.integers(1, 40),
    inner=st.integers(1, 20),
    height=st.integers(1, 45),
    tall=st.booleans(),
    plus=st.booleans(),
    alpha=st.sampled_from([1.0, 2.0]),
)
def test_panels_give_the_whole_product(batch, side, inner, height, tall, plus, alpha):
    x = integers(batch, inner, side).mT if tall else integers(batch, side, inner)
    base = x @ x.mT + 1
    out = torch.full((batch, side, side), torch.nan)
    product = functools.partial(products._panels, height=height)
    product(x, x.mT, out=out, plus=base if plus else None, alpha=alpha, beta=3.0)
    expected = alpha * (x @ x.mT) + (3 * base if plus else 0)
    assert torch.equal(out, expected)


def test_full_products_give_the_whole_product():
    x = integers(2, 5, 7)
    out = torch.full((2, 5, 5), torch.nan)
    products._full(x, x.mT, out=out, alpha=2.0, beta=3.0)
    assert torch.equal(out, 2 * x @ x.mT)
    expected = 2 * x @ x.mT + 3 * out
    assert torch.equal(
        products._full(x, x.mT, out=torch.empty_like(out), plus=out, alpha=2.0, beta=3.0), expected
    )


@pytest.mark.parametrize(("side", "panels"), [(256, 2), (384, 3), (1024, 8), (1040, 8), (4096, 8)])
def test_panels_save_operations(side, panels):
    """(p + 1) / 2p of them, for p panels."""
    height = panel_height(side, torch.float32)
    assert -(-side // height) == panels
    with torch.device("meta"):
        x, out = torch.empty(1, side, 64), torch.empty(1, side, side)
        with FlopCounterMode(display=False) as counter:
            symmetric_product("auto", side, side, torch.float32, CPU)(x, x.mT, out=out, alpha=1.0, beta=0.0)
    ends = [min(side, height * (i + 1)) for i in range(panels)]
    heights = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    assert counter.get_total_flops() == sum(2 * 64 * h * end for h, end in zip(heights, ends, strict=True))
    if side == height * panels:
        assert counter.get_total_flops() * 2 * panels == 2 * 64 * side * side * (panels + 1)


def test_what_auto_takes(two_threads):
    """Panels only where each keeps all threads busy."""
    for side, dtype, expected in [
        (511, torch.float32, products._full),
        (512, torch.float32, products._panels),
        (1023, torch.bfloat16, products._full),
        (1024, torch.bfloat16, products._panels),
    ]:
        product = symmetric_product("auto", side, 2 * side, dtype, CPU)
        assert getattr(product, "func", product) is expected
    assert symmetric_product("full", 4096, 4096, torch.float32, CPU) is products._full
    assert symmetric_product("panels", 9, 8, torch.float32, CPU).keywords == {"height": 8}
    assert backend_name("auto", torch.float32, CPU) == "panels from 512 rows on, else full"
    assert backend_name("full", torch.float32, CPU) == "full"
    assert matrices_at_once(511, 4096, torch.float32, CPU) == 1
    assert matrices_at_once(512, 512, torch.float32, CPU) == 1
    assert matrices_at_once(128, 512, torch.float32, CPU) == 32


@pytest.mark.parametrize("shape", [(256, 256), (260, 700), (700, 300), (3, 256, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("algorithm", ["direct", "gram"])
def test_backends_agree(shape, dtype, algorithm):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    exact = newton_schulz(matrix.double(), algorithm="direct", backend="full")
    for backend in ("panels", "auto", "full"):
        result = newton_schulz(matrix, dtype=dtype, algorithm=algorithm, backend=backend)
        assert (result - exact).abs().max() < 1e-5


# A kernel that is not there, or not right

KERNELS = ["quack", "triton"]


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_need_a_gpu(kernel):
    with pytest.raises(RuntimeError, match=f'"{kernel}" cannot be used: it needs an? .*GPU.* Take'):
        newton_schulz(torch.ones(2, 2), backend=kernel)


def test_backends_by_name():
    names = r"\('auto', 'full', 'panels', 'quack', 'triton'\)"
    with pytest.raises(ValueError, match=f"ns_backend must be one of {names}, got 'fast'"):
        newton_schulz(torch.ones(2, 2), backend="fast")


def asked_for_a_kernel() -> str:
    with pytest.raises(RuntimeError, match="ns_backend=") as caught:
        build(Transformer(), make_mesh((2,)), predicate=is_proj, ns_backend="triton")
    return str(caught.value)


def test_the_optimizer_refuses_it_on_every_rank(ranks):
    """And not in the step, where those that own nothing would not notice."""
    assert len(set(ranks(2, asked_for_a_kernel))) == 1


def stand_in(monkeypatch: pytest.MonkeyPatch, product: Callable[..., None]) -> None:
    """A Hopper GPU, as far as our questions go, and packages for it; the tensors are on the CPU."""

    def ours(a, b, *, out, plus, alpha, beta):
        product(a, b, plus, out, alpha=alpha, beta=beta)
        return out

    functions = {
        "quack.gemm_interface": {"gemm_symmetric": product},
        "dmuon.optim.triton_product": {"symmetric_product": ours},
    }
    monkeypatch.setitem(sys.modules, "quack", types.ModuleType("quack"))
    for name, contents in functions.items():
        module = types.ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    linspace = torch.linspace
    monkeypatch.setattr(torch, "linspace", lambda *args, device=None, **kwargs: linspace(*args, **kwargs))
    products._why_not.cache_clear()


@pytest.fixture(autouse=True)
def forget_kernels() -> Iterator[None]:
    yield
    products._why_not.cache_clear()


def right(a, b, C=None, out=None, *, alpha=1.0, beta=1.0):  # the package's own names
    out.copy_(a @ b * alpha + (0 if C is None else beta * C))


def transposed(a, b, C=None, out=None, *, alpha=1.0, beta=1.0):
    right(a.flip(1), b, C, out, alpha=alpha, beta=beta)


def unwritten(a, b, C=None, out=None, *, alpha=1.0, beta=1.0):
    out.fill_(torch.nan)


def raising(a, b, C=None, out=None, *, alpha=1.0, beta=1.0):
    raise TypeError("another interface")


WRONG = [(transposed, "wrong products"), (unwritten, "wrong products"), (raising, "another interface")]
GPU = torch.device("cuda")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("product", [right, *(product for product, _ in WRONG)])
def test_kernels_are_used_only_where_they_are_right(monkeypatch, kernel, product):
    stand_in(monkeypatch, product)
    if product is right:
        expected = {"quack": products._quack, "triton": products._triton}[kernel]
        assert symmetric_product(kernel, 64, 128, torch.bfloat16, GPU) is expected
        assert backend_name(kernel, torch.bfloat16, GPU) == kernel
    else:
        with pytest.raises(RuntimeError, match=f"{dict(WRONG)[product]}.*Take"):
            symmetric_product(kernel, 64, 128, torch.bfloat16, GPU)
    with pytest.raises(RuntimeError, match=r"no products in torch.float32"):
        symmetric_product(kernel, 64, 128, torch.float32, GPU)


@pytest.mark.parametrize("product", [right, transposed])
def test_what_auto_takes_on_a_gpu(monkeypatch, product):
    stand_in(monkeypatch, product)
    expected, name = (products._quack, "quack") if product is right else (products._full, "full")
    assert symmetric_product("auto", 64, 128, torch.bfloat16, GPU) is expected
    assert backend_name("auto", torch.float16, GPU) == name
    assert symmetric_product("auto", 64, 128, torch.float32, GPU) is products._full
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    products._why_not.cache_clear()
    assert symmetric_product("auto", 64, 128, torch.bfloat16, GPU) is products._full


@pytest.mark.parametrize(("rows", "cols"), [(64, 100), (100, 64), (63, 64)])
@pytest.mark.parametrize("backend", ["auto", "quack"])
def test_quack_is_not_given_rows_that_are_not_aligned(monkeypatch, backend, rows, cols):
    """It would raise in the middle of a step, on the owner alone."""
    stand_in(monkeypatch, right)
    assert symmetric_product(backend, rows, cols, torch.bfloat16, GPU) is products._full
    assert symmetric_product("triton", rows, cols, torch.bfloat16, GPU) is products._triton


def test_our_kernel_gives_the_whole_product():
    """In Triton's interpreter, which has to be asked for before the first import of Triton."""
    pytest.importorskip("triton", reason="there is no Triton for this system")
    script = Path(__file__).parent / "interpreted.py"
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all products are right\n"


# In the optimizer


def batches_of_a_step() -> tuple[list[int], list[int], bool]:
    """How many matrices each batch had, and how many there were of each shape; and whether one at a time
    gives the same."""
    from dmuon.optim import parts

    weights, sizes = [], []
    original, at_once = parts.orthogonalize, parts.Recipe.at_once
    for limit in (None, 1):
        torch.manual_seed(0)
        model = Transformer()
        optimizer = build(model, make_mesh((1,)), predicate=is_proj)
        parts.orthogonalize = lambda batch, *args: sizes.append(len(batch)) or original(batch, *args)
        parts.Recipe.at_once = at_once if limit is None else lambda *args: 1
        for step in range(2):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        parts.orthogonalize, parts.Recipe.at_once = original, at_once
        weights.append([param.detach().clone() for param in model.parameters()])
    shapes: dict = {}
    for record in find_runtime(model).params:
        shapes[record.full_shape] = shapes.get(record.full_shape, 0) + 1
    same = all((a - b).abs().max() < 1e-6 for a, b in zip(*weights, strict=True))
    return sizes, list(shapes.values()), same


def test_matrices_of_one_shape_go_together(ranks):
    sizes, of_shape, same = ranks(1, batches_of_a_step)[0]
    assert sizes == 2 * of_shape + [1] * (2 * sum(of_shape))
    assert max(of_shape) > 1
    assert same


def summary_of_backends() -> list[str]:
    lines = []
    for backend in ("auto", "full"):
        model = Transformer()
        mesh = make_mesh((1,))
        build(model, mesh, predicate=is_proj, ns_backend=backend)
        lines.append(dmuon.summary(model).splitlines()[-1])
    return lines


def test_the_summary_says_which(ranks):
    auto, full = ranks(1, summary_of_backends)[0]
    assert auto == "newton-schulz: in float32, symmetric products: panels from 256 rows on, else full"
    assert full == "newton-schulz: in float32, symmetric products: full"
