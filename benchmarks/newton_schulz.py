"""Newton-Schulz on the CPU: time against torch's kernel and against the machine's own products, and error.

    python benchmarks/newton_schulz.py
    python benchmarks/newton_schulz.py --threads 1 --shapes 256x256 1024x4096 --out /tmp/ns.md

For each shape, in the same run and in turn, round by round:

- `dmuon`: `dmuon.newton_schulz` with its defaults for the device;
- `torch`: the kernel of `torch.optim.Muon`, which computes in bfloat16 whatever the device is good at; left
  out ("-") where a call would take more than twenty seconds;
- `torch, same dtype`: its arithmetic (Gram matrix, its square, product with X; all products in full) in the
  dtype that dmuon uses;
- `products`: as many operations as `dmuon.optim.newton_schulz.operation_count` says, in square products of
  the machine's best size and dmuon's dtype. This is the peak that the last column is measured against; since
  dmuon computes symmetric results in part, it can come out ahead.

Each round gives one ratio; the table has the medians over the rounds and, in brackets, the quartiles.
The error is the largest of any entry against the direct form in float64, of a matrix with singular values
from 1e-3 to 1.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from dmuon.optim.newton_schulz import newton_schulz, operation_count
from machine import describe
from spread import by_round, spread

SHAPES = ["256x256", "512x512", "1024x1024", "2048x2048", "256x1024", "512x2048", "1024x4096", "2048x8192"]
LONGEST_CALL = 20.0  # seconds
QUINTIC = (3.4445, -4.7750, 2.0315)
RESULTS = Path(__file__).parent / "results"


def shape_of(text: str) -> tuple[int, int]:
    """ "512x2048" as two integers."""
    rows, x, cols = text.partition("x")
    if not (x and rows.isdigit() and cols.isdigit() and int(rows) and int(cols)):
        raise argparse.ArgumentTypeError(f"{text!r} is not ROWSxCOLS")
    return int(rows), int(cols)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=[shape_of(s) for s in SHAPES])
    parser.add_argument("--threads", type=int, help="of torch; default: its own choice")
    parser.add_argument("--rounds", type=int, default=9, help="default 9")
    parser.add_argument(
        "--seconds", type=float, default=0.1, help="at least, for each measurement in a round"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "newton_schulz.md")
    return parser


@dataclass(frozen=True)
class Contest:
    """What is compared, where.

    `dtype` is that of dmuon's products, None its default for the device. The best rate of square products is
    looked for among those of `sides`.
    """

    device: torch.device
    dtype: torch.dtype | None = None
    algorithm: str = "auto"
    backend: str = "auto"
    sides: Sequence[int] = (256, 512, 1024, 2048)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that None stands for."""
        if self.dtype is not None:
            return self.dtype
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def dmuon(self, matrix: Tensor) -> Tensor:
        """`matrix` orthogonalized."""
        return newton_schulz(matrix, dtype=self.dtype, algorithm=self.algorithm, backend=self.backend)

    def same_arithmetic(self, matrix: Tensor) -> Tensor:
        """What torch's kernel computes, in our dtype."""
        a, b, c = QUINTIC
        x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
        x = (x / x.norm().clamp(min=1e-7)).to(self.compute_dtype)
        for _ in range(5):
            gram = x @ x.mT
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x

    def best_product(self, seconds: float) -> tuple[int, float]:
        """The side of square products that run at the highest rate, and their operations per second."""
        rates = {side: rate(self.compute_dtype, self.device, side, seconds) for side in self.sides}
        best = max(rates, key=lambda side: rates[side])
        return best, rates[best]

    def torch_takes(self, rows: int, cols: int) -> float:
        """About how many seconds a call of torch's kernel takes."""
        return operation_count(rows, cols, algorithm="direct") / rate(torch.bfloat16, self.device)

    def error(self, rows: int, cols: int) -> float:
        """Largest difference from the direct form in float64."""
        generator = torch.Generator().manual_seed(rows + cols)
        side = min(rows, cols)
        normal = (torch.randn(n, side, generator=generator, dtype=torch.float64) for n in (rows, cols))
        u, v = (torch.linalg.qr(matrix.to(self.device))[0] for matrix in normal)
        values = torch.logspace(0, -3, side, dtype=torch.float64, device=self.device)
        matrix = ((u * values) @ v.mT).float()
        exact = newton_schulz(matrix.double(), dtype=torch.float64, algorithm="direct", backend="full")
        return (self.dmuon(matrix).double() - exact).abs().max().item()

    def measure(self, rows: int, cols: int, side: int, rounds: int, seconds: float) -> dict[str, list[float]]:
        """Seconds of each contestant that takes part: [rounds]."""
        matrix = torch.randn(rows, cols, device=self.device)
        contestants: dict[str, tuple[Callable[[], object], float]] = {
            "dmuon": (lambda: self.dmuon(matrix), 1.0),
            "torch": (lambda: _zeropower_via_newtonschulz(matrix, QUINTIC, 5, 1e-7), 1.0),
            "same": (lambda: self.same_arithmetic(matrix), 1.0),
            "products": (
                product(side, self.compute_dtype, self.device),
                operation_count(rows, cols) / (2 * side**3),
            ),
        }
        if self.torch_takes(rows, cols) > LONGEST_CALL:
            del contestants["torch"]
        functions = [function for function, _ in contestants.values()]
        readings = in_rounds(functions, rounds, seconds, self.device)
        return {
            name: [factor * reading for reading in mine]
            for (name, (_, factor)), mine in zip(contestants.items(), readings, strict=True)
        }

    def table(self, shapes: Sequence[tuple[int, int]], rounds: int, seconds: float) -> Iterator[str]:
        """Lines of Markdown, as they are measured."""
        name = str(self.compute_dtype).removeprefix("torch.")
        side, rate = self.best_product(max(seconds, 0.3))
        yield (
            f"Five steps in {name}, backend {self.backend}, form {self.algorithm}. "
            f"Products of {side} x {side} run at {rate / 1e12:.3g} TFLOP/s. "
            f"Medians and quartiles of {rounds} rounds."
        )
        yield ""
        yield (
            f"| shape | dmuon, ms | torch / dmuon | torch's arithmetic in {name} / dmuon | products / dmuon "
            "| largest error |"
        )
        yield "|---|---:|---:|---:|---:|---:|"
        for rows, cols in shapes:
            times = self.measure(rows, cols, side, rounds, seconds)
            ours = times["dmuon"]
            ratios = [
                spread(by_round(times[name], ours), 2) if name in times else "-"
                for name in ("torch", "same", "products")
            ]
            cells = [
                f"{rows}x{cols}",
                spread([1e3 * seconds for seconds in ours], 2),
                *ratios,
                f"{self.error(rows, cols):.1e}",
            ]
            yield f"| {' | '.join(cells)} |"


def in_rounds(
    functions: Sequence[Callable[[], object]], rounds: int, seconds: float, device: torch.device
) -> list[list[float]]:
    """Seconds per call of each function, a value a round; another one is first in each round."""
    times: list[list[float]] = [[] for _ in functions]
    for number in range(rounds):
        for turn in range(len(functions)):
            place = (number + turn) % len(functions)
            times[place].append(time_of(functions[place], seconds, device))
    return times


def product(side: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """One square product."""
    a, b, out = (torch.randn(side, side, device=device).to(dtype) for _ in range(3))
    return lambda: torch.mm(a, b, out=out)


def rate(dtype: torch.dtype, device: torch.device, side: int = 256, seconds: float = 0.0) -> float:
    """Operations per second of square products."""
    return 2 * side**3 / time_of(product(side, dtype, device), seconds, device)


def time_of(function: Callable[[], object], seconds: float, device: torch.device) -> float:
    """Seconds per call: the best of as many calls as fit into `seconds`, at least two after a first one."""
    timed = _on_cuda if device.type == "cuda" else _on_cpu
    timed(function)
    end, times = time.perf_counter() + seconds, []
    while len(times) < 2 or time.perf_counter() < end:
        times.append(timed(function))
    return min(times)


def _on_cpu(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def _on_cuda(function: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def write(lines: Iterable[str], out: Path) -> None:
    """Print lines as they come, and write them to a file at the end."""
    done = []
    for line in lines:
        print(line, flush=True)
        done.append(line)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join([*done, ""]), encoding="utf-8")


def heading(title: str, script: str) -> list[str]:
    """The first lines of a file of results."""
    command = " ".join(["python", f"benchmarks/{script}", *sys.argv[1:]])
    return [f"# {title}", "", f"{describe()}. Made by `{command}`; what it measures is in the script.", ""]


def main() -> None:
    """Measure, print and write the table."""
    args = build_parser().parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    lines = Contest(torch.device("cpu")).table(args.shapes, args.rounds, args.seconds)
    write(itertools.chain(heading("Newton-Schulz", "newton_schulz.py"), lines), args.out)


if __name__ == "__main__":
    main()
