"""The oracle: Muon and AdamW in one plain process, on the mean gradient, with Newton-Schulz in float64."""

from collections.abc import Callable, Iterable

import torch
import torch.nn as nn

QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrix: torch.Tensor, steps: int = 5, coefficients: tuple = QUINTIC) -> torch.Tensor:
    """Newton-Schulz as written in the paper, in float64."""
    triples = [coefficients] * steps if isinstance(coefficients[0], float) else list(coefficients)[:steps]
    x = matrix.double()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=1e-7)
    for a, b, c in triples:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if tall else x).to(matrix.dtype)


class ReferenceMuon:
    """One process, whole matrices, nothing clever. `muon` chooses the matrices, by name."""

    def __init__(
        self,
        model: nn.Module,
        muon: Callable[[str, nn.Parameter], bool],
        *,
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        nesterov: bool = True,
        scale: str = "original",
        ns_steps: int = 5,
        coefficients: tuple = QUINTIC,
        cautious: bool = False,
        row_beta: float | None = None,
        adamw_lr: float = 1e-3,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_weight_decay: float = 0.0,
    ) -> None:
        named = list(model.named_parameters())
        self.muon = [p for n, p in named if muon(n, p)]
        rest = [p for n, p in named if not muon(n, p)]
        self.adamw = (
            torch.optim.AdamW(rest, lr=adamw_lr, betas=adamw_betas, eps=1e-8, weight_decay=adamw_weight_decay)
            if rest
            else None
        )
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.nesterov, self.scale = nesterov, scale
        self.ns_steps, self.coefficients, self.cautious = ns_steps, coefficients, cautious
        self.row_beta, self.squares = row_beta, {}
        self.buffers: dict[nn.Parameter, torch.Tensor] = {}

    @torch.no_grad()
    def step(self) -> None:
        for p in self.muon:
            if p.grad is None:
                continue
            buffer = self.buffers.setdefault(p, torch.zeros_like(p))
            buffer.mul_(self.momentum).add_(p.grad, alpha=1 - self.momentum)
            update = p.grad * (1 - self.momentum) + buffer * self.momentum if self.nesterov else buffer
            rows, cols = p.shape
            factor = {
                "original": max(1, rows / cols) ** 0.5,
                "match_rms_adamw": 0.2 * max(rows, cols) ** 0.5,
                "spectral": (rows / cols) ** 0.5,
                "none": 1.0,
            }[self.scale]
            orthogonal = orthogonalize(update, self.ns_steps, self.coefficients)
            if self.row_beta is not None:
                orthogonal = self.normalised(p, orthogonal)
            decayed = p * (orthogonal * p >= 0) if self.cautious else p
            p.copy_(p - self.lr * self.weight_decay * decayed - self.lr * factor * orthogonal)
        if self.adamw is not None:
            self.adamw.step()

    def normalised(self, p: nn.Parameter, orthogonal: torch.Tensor) -> torch.Tensor:
        """NorMuon (arXiv:2510.05491), for the norm of an orthogonal matrix."""
        rows, cols = p.shape
        squares = self.squares.get(p, torch.zeros(rows))
        squares = self.row_beta * squares + (1 - self.row_beta) * orthogonal.square().sum(1) / cols
        self.squares[p] = squares
        scaled = orthogonal / (squares.sqrt() + 1e-8)[:, None]
        return scaled * min(rows, cols) ** 0.5 / scaled.square().sum().sqrt().clamp(min=1e-30)

    def zero_grad(self, params: Iterable[nn.Parameter] | None = None) -> None:
        for p in params if params is not None else self.all_parameters():
            p.grad = None

    def all_parameters(self) -> list[nn.Parameter]:
        rest = self.adamw.param_groups[0]["params"] if self.adamw is not None else []
        return [*self.muon, *rest]
