"""Newton-Schulz orthogonalization of matrices, and what it costs.

The iteration (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) replaces X by
p(X) = a X + b (X X^T) X + c (X X^T)^2 X. It leaves the singular vectors alone and maps each singular value
s to a s + b s^3 + c s^5, so that after a few steps every singular value that was not negligible is near one.

Two forms compute the same polynomial. The direct form is the line above. The Gram form, for oblong
matrices, joins two steps: both need only the small Gram matrix R = X X^T, since step k multiplies X from
the left by q_k = a I + b R_k + c R_k^2 and R from both sides, R_{k+1} = q_k R_k q_k. So the long side is
touched twice for two steps (making R, and applying q_1 q_0) instead of four times.

Why two steps and not all of them: R is known to about the unit roundoff u times its norm, so a small
eigenvalue may come out as -u. Each step multiplies such an error by a^2; the direct form, which makes R
afresh from X, never leaves the positive semidefinite matrices. Five steps on one R were wrong by 5e-3 in
float32 on ill-conditioned matrices, and more steps blew up; three steps on one R gave singular values of
1.48 in bfloat16 where at most 1.12 was right. In pairs, the largest error on such matrices is about that of
the direct form, in every precision.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from types import MappingProxyType

import torch
from torch import Tensor

from ..scratch import Scratch
from .products import Backend, SymmetricProduct, check_backend, multiply_add, symmetric_product

Triple = tuple[float, float, float]
Coefficients = str | Sequence[float] | Sequence[Sequence[float]]

# The published coefficient sets, one triple (a, b, c) per step. quintic: Jordan et al. 2024, the same triple
# for every step. polar_express: Amsel et al. 2025 (arXiv:2505.16932), safety factor 1.05. you: Jiacheng You's
# set, as quoted in that paper.
COEFFICIENTS: Mapping[str, tuple[Triple, ...]] = MappingProxyType(
    {
        "quintic": ((3.4445, -4.7750, 2.0315),),
        "polar_express": (
            (7.892583, -20.383014, 13.555306),
            (3.911485, -2.546464, 0.426899),
            (3.760658, -2.512819, 0.432365),
            (3.160400, -2.149650, 0.399637),
            (2.191097, -1.441662, 0.328146),
        ),
        "you": (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
    }
)

_ALGORITHMS = ("direct", "gram", "auto")
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@torch.no_grad()
def newton_schulz(
    matrix: Tensor,
    *,
    steps: int = 5,
    coefficients: Coefficients = "quintic",
    dtype: torch.dtype | None = None,
    algorithm: str = "auto",
    backend: Backend = "auto",
    eps: float = 1e-7,
) -> Tensor:
    """Return the Newton-Schulz orthogonalization of each matrix in a batch.

    Each matrix is first divided by `max(norm, eps)`, its Frobenius norm clamped as in
    `torch.optim.Muon`. The norm is the true one for every finite input: nothing overflows or vanishes
    on the way to it. So scaling a matrix does not change the result as long as its norm is above `eps`; one
    far below comes out near zero, and zero comes out zero. No finite input gives NaN or inf under the named
    coefficients; NaN or inf in a matrix makes all of that matrix NaN and touches no other.

    Args:
        matrix: shape (..., rows, cols), wide or tall, floating point. Read only; not differentiated through.
        steps: number of iterations, at least 1.
        coefficients: "quintic", "polar_express", "you", a triple for all steps, or a sequence of triples.
        dtype: precision of the matrix products: float32, float64, bfloat16 or float16. None takes bfloat16
            on CUDA; elsewhere float64 for a float64 matrix and float32 for all others.
        algorithm: "direct", "gram", or "auto" for the one with fewer operations (see
            `operation_count`); in bfloat16 "auto" is "direct", the more exact one there.
        backend: how products with a symmetric result are computed: "full", "panels", "quack", "triton", or
            "auto" for the fastest on the device; see `dmuon.optim.products`.
        eps: smallest divisor, in the units of `matrix`; finite, not negative.

    Returns:
        A new contiguous tensor with the shape, dtype and device of `matrix`.

    Raises:
        ValueError: for a matrix that is not floating point or has fewer than two dimensions, or an argument
            outside what is listed above.
        RuntimeError: if "quack" or "triton" is asked for and cannot be had.
    """
    settings = Settings(resolve_coefficients(coefficients, steps), dtype, algorithm, backend, eps)
    _check_matrix(matrix)
    if matrix.numel() == 0:
        return matrix.new_empty(matrix.shape)
    rows, cols = matrix.shape[-2:]
    batch = orthogonalize(matrix.reshape(-1, rows, cols), settings, Scratch(reuse=False))
    return batch.reshape(matrix.shape).to(matrix.dtype)


@dataclass(frozen=True)
class Settings:
    """How to orthogonalize: the arguments of `newton_schulz`, checked.

    Raises:
        ValueError: for one out of range.
    """

    triples: tuple[Triple, ...]
    dtype: torch.dtype | None = None
    algorithm: str = "auto"
    backend: Backend = "auto"
    eps: float = 1e-7

    def __post_init__(self) -> None:
        _check_algorithm(self.algorithm)
        check_backend(self.backend)
        _check_eps(self.eps)
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise ValueError(
                f"dtype must be None or one of {', '.join(map(str, _DTYPES))}, got {self.dtype!r}"
            )

    def compute_dtype(self, dtype: torch.dtype, device: torch.device) -> torch.dtype:
        """Precision of the products for a matrix of ``dtype``."""
        if self.dtype is not None:
            return self.dtype
        return torch.bfloat16 if device.type == "cuda" else torch.promote_types(dtype, torch.float32)

    def form(self, rows: int, cols: int, compute_dtype: torch.dtype) -> str:
        """ "direct" or "gram"."""
        if self.algorithm == "auto" and compute_dtype == torch.bfloat16:
            return "direct"  # the Gram form's error is about twice as large there
        return _choose(rows, cols, len(self.triples), self.algorithm)


def orthogonalize(batch: Tensor, settings: Settings, scratch: Scratch) -> Tensor:
    """As `newton_schulz`, in buffers that can be used again.

    batch: (batch, rows, cols), not empty; may be from ``scratch`` itself. Returns a buffer from ``scratch``
    of the same shape, in the compute dtype: whoever is done with it gives it back.
    """
    _, rows, cols = batch.shape
    dtype = settings.compute_dtype(batch.dtype, batch.device)
    x = _normalise(batch, settings.eps, dtype, scratch)
    product = symmetric_product(settings.backend, rows, cols, dtype, x.device)
    form = _gram_form if settings.form(rows, cols, dtype) == "gram" else _direct_form
    return form(x, settings.triples, product, scratch)


def _buffer(scratch: Scratch, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return scratch.take(math.prod(shape), dtype, device).view(shape)


def operation_count(rows: int, cols: int, *, steps: int = 5, algorithm: str = "auto") -> int:
    """Return the floating-point operations of the matrix products for one ``rows`` x ``cols`` matrix.

    A product of m x k by k x n counts 2 m k n; symmetric results are computed in full and counted in full.
    With m the smaller side and n the larger, a direct step is 4 m^2 n + 2 m^3, and a pair of steps in the
    Gram form is 4 m^2 n + 10 m^3; an odd last step is a direct one. So "auto", the smaller of the two counts,
    takes the Gram form from two steps on where n > 1.5 m. Precision and coefficients do not change the count.

    Raises:
        ValueError: for a negative or non-integer side, ``steps`` below 1, or an unknown algorithm.
    """
    for side in (rows, cols):
        if not _is_int(side) or side < 0:
            raise ValueError(f"rows and cols must be integers >= 0, got {rows!r} x {cols!r}")
    _check_steps(steps)
    _check_algorithm(algorithm)
    if algorithm == "auto":
        algorithm = _choose(rows, cols, steps, algorithm)
    return _count(rows, cols, steps, algorithm)


def resolve_coefficients(coefficients: Coefficients, steps: int) -> tuple[Triple, ...]:
    """Return the ``steps`` triples (a, b, c) to iterate with.

    ``coefficients`` is a name in :data:`COEFFICIENTS`, one triple, or a sequence of triples. One triple, bare
    or alone in its sequence, serves every step. Of several the first ``steps`` are used, and asking for more
    steps than triples is refused, except for "polar_express": its last triple repeats, as its paper
    (arXiv:2505.16932) does for steps beyond its table; singular values then tend to the safety
    factor 1.05.

    Raises:
        ValueError: for an unknown name, ``steps`` not an int >= 1, triples that are not three finite numbers,
            an empty sequence, or fewer triples than steps.
    """
    _check_steps(steps)
    triples = _named(coefficients) if isinstance(coefficients, str) else _custom(coefficients)
    if len(triples) >= steps:
        return triples[:steps]
    if len(triples) == 1 or coefficients == "polar_express":
        return triples + triples[-1:] * (steps - len(triples))
    raise ValueError(
        f"coefficients {coefficients!r} has {len(triples)} triples for {steps} steps: "
        f"take steps <= {len(triples)}, give {steps} triples, or one triple for all steps"
    )


def _named(name: str) -> tuple[Triple, ...]:
    if name not in COEFFICIENTS:
        raise ValueError(
            f"unknown coefficients {name!r}: accepted are {', '.join(map(repr, COEFFICIENTS))}, "
            "a triple (a, b, c), or a sequence of triples"
        )
    return COEFFICIENTS[name]


def _custom(coefficients: Sequence[float] | Sequence[Sequence[float]]) -> tuple[Triple, ...]:
    rows: Sequence[object] = ()
    if isinstance(coefficients, Sequence) and len(coefficients) > 0:
        rows = [coefficients] if isinstance(coefficients[0], Real) else coefficients
    triples = tuple(_triple(row) for row in rows)
    if not triples or None in triples:
        raise ValueError(
            "coefficients must be a name, one triple (a, b, c) of finite numbers, or several in a sequence; "
            f"got {coefficients!r}"
        )
    return tuple(triple for triple in triples if triple is not None)


def _triple(row: object) -> Triple | None:
    """Return ``row`` as a triple of floats, or None if it is not one."""
    if not isinstance(row, Sequence) or len(row) != 3 or not all(_is_finite_number(x) for x in row):
        return None
    return float(row[0]), float(row[1]), float(row[2])


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _check_steps(steps: int) -> None:
    if not _is_int(steps) or steps < 1:
        raise ValueError(f"steps must be an int >= 1, got {steps!r}")


def _check_algorithm(algorithm: str) -> None:
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"unknown algorithm {algorithm!r}: accepted are {', '.join(map(repr, _ALGORITHMS))}")


def _check_eps(eps: float) -> None:
    if not _is_finite_number(eps) or eps < 0:
        raise ValueError(f"eps must be a finite number >= 0, got {eps!r}")


def _check_matrix(matrix: Tensor) -> None:
    if matrix.ndim < 2:
        raise ValueError(f"matrix must have at least two dimensions, got shape {tuple(matrix.shape)}")
    if matrix.dtype not in _DTYPES:
        raise ValueError(f"matrix must be one of {', '.join(map(str, _DTYPES))}, got {matrix.dtype}")


def _choose(rows: int, cols: int, steps: int, algorithm: str) -> str:
    if algorithm != "auto":
        return algorithm
    return min(("direct", "gram"), key=lambda form: _count(rows, cols, steps, form))


def _count(rows: int, cols: int, steps: int, form: str) -> int:
    m, n = min(rows, cols), max(rows, cols)
    pairs = steps // 2 if form == "gram" else 0
    direct_step = 4 * m * m * n + 2 * m**3
    gram_pair = 4 * m * m * n + 10 * m**3
    return pairs * gram_pair + (steps - 2 * pairs) * direct_step


def _normalise(batch: Tensor, eps: float, dtype: torch.dtype, scratch: Scratch) -> Tensor:
    """Return ``x / max(frobenius_norm(x), eps)`` for each matrix of (batch, rows, cols), contiguous.

    The division is done in float32 at least, the result has ``dtype``.
    """
    scaled, peak, norm = measure(batch, scratch)
    zero = peak == 0
    peak = peak.masked_fill(zero, 1)
    # max(true norm, eps) in units of the peak. Not `eps / peak`: torch computes that through 1 / peak, which
    # overflows for a subnormal peak.
    divisor = torch.maximum(norm, torch.full_like(peak, eps) / peak).masked_fill(zero, 1)
    return divide(scaled, divisor, dtype, scratch)


def measure(batch: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor, Tensor]:
    """Each matrix divided by its largest entry, that entry (0 for a matrix of zeros or without elements), and
    the Frobenius norm in its units; in float32 at least.

    batch: (batch, rows, cols). Returns a buffer of this shape, and twice (batch, 1, 1). In units of the
    largest entry the squares stay in range. Norms of rows first, then of those: one long float32 sum would
    lose digits (5e-4 for 4096 x 4096 on CPU).
    """
    precision = torch.promote_types(batch.dtype, torch.float32)
    if batch.numel() == 0:
        nothing = batch.new_zeros(len(batch), 1, 1, dtype=precision)
        return batch.to(precision), nothing, nothing
    # As largest and smallest entry: on CPU a norm of order infinity takes twenty times as long.
    largest, smallest = (extreme(batch, dim=(-2, -1), keepdim=True) for extreme in (torch.amax, torch.amin))
    peak = torch.maximum(largest, smallest.neg()).to(precision)  # (batch, 1, 1)
    unit = peak.masked_fill(peak == 0, 1)
    scaled = torch.div(batch, unit, out=_buffer(scratch, batch.shape, precision, batch.device))
    norm = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)  # (batch, rows, 1)
    return scaled, peak, torch.linalg.vector_norm(norm, dim=-2, keepdim=True)


def divide(scaled: Tensor, divisor: Tensor, dtype: torch.dtype, scratch: Scratch) -> Tensor:
    """`scaled` of `measure`, which is given back or used again, over (batch, 1, 1), in ``dtype``."""
    if dtype == scaled.dtype:
        return scaled.div_(divisor)
    result = torch.div(scaled, divisor, out=_buffer(scratch, scaled.shape, dtype, scaled.device))
    scratch.give_back(scaled)
    return result


def _direct_form(x: Tensor, triples: Sequence[Triple], product: SymmetricProduct, scratch: Scratch) -> Tensor:
    """Iterate on X itself. ``x`` (batch, rows, cols) is used as a buffer; the result may be another one."""
    other = _buffer(scratch, x.shape, x.dtype, x.device)
    gram, polynomial = _small_buffers(x, 2, scratch)
    for triple in triples:
        _direct_step(x, triple, gram, polynomial, product, out=other)
        x, other = other, x
    scratch.give_back(other, gram, polynomial)
    return x


def _gram_form(x: Tensor, triples: Sequence[Triple], product: SymmetricProduct, scratch: Scratch) -> Tensor:
    """Iterate on the Gram matrix, two steps per Gram matrix made from X; buffers as in the direct form."""
    other = _buffer(scratch, x.shape, x.dtype, x.device)
    gram, first, second = _small_buffers(x, 3, scratch)
    for k in range(0, len(triples), 2):
        if k + 1 < len(triples):
            gram_of(x, product, out=gram)
            factor = _pair_factor(gram, triples[k], triples[k + 1], first, second, product)
            apply_factor(factor, x, scale=triples[k][0] * triples[k + 1][0], out=other)
        else:
            _direct_step(x, triples[k], gram, first, product, out=other)
        x, other = other, x
    scratch.give_back(other, gram, first, second)
    return x


def _pair_factor(
    gram: Tensor, first: Triple, second: Triple, w0: Tensor, work: Tensor, product: SymmetricProduct
) -> Tensor:
    """Return q_1 q_0 - a_0 a_1 I for the two steps from R = ``gram``; all three buffers are overwritten.

    With w_k = b_k R_k + c_k R_k^2 the factor of step k is q_k = a_k I + w_k. All are polynomials in R, so
    that their products are symmetric. The multiples of I are left to the addition of ``a`` times the other
    operand: as large diagonals inside the products they would cost digits (2.5e-4 instead of 5e-5 in float32
    on a matrix of equal rows, 128 x 512, polar_express).
    """
    a0, a1 = first[0], second[0]
    _polynomial(gram, first, product, out=w0)
    product(w0, gram, plus=gram, alpha=1.0, beta=a0, out=work)  # q_0 R_0
    product(work, w0, plus=work, alpha=1.0, beta=a0, out=gram)  # R_1 = q_0 R_0 q_0
    _polynomial(gram, second, product, out=work)  # w_1
    product(work, w0, plus=w0, alpha=1.0, beta=a1, out=gram)  # a_1 w_0 + w_1 w_0
    return gram.add_(work, alpha=a0)


def _direct_step(
    x: Tensor, triple: Triple, gram: Tensor, polynomial: Tensor, product: SymmetricProduct, *, out: Tensor
) -> None:
    """Write a X + (b R + c R^2) X to ``out``, for R the Gram matrix of X; overwrites both small buffers."""
    gram_of(x, product, out=gram)
    _polynomial(gram, triple, product, out=polynomial)
    apply_factor(polynomial, x, scale=triple[0], out=out)


def _small_buffers(x: Tensor, count: int, scratch: Scratch) -> list[Tensor]:
    side = min(x.shape[-2:])
    return [_buffer(scratch, (x.shape[0], side, side), x.dtype, x.device) for _ in range(count)]


# Tall matrices are multiplied from the right, not transposed: row-major outputs keep CPU bfloat16 fast, where
# a column-major batched output falls off the fast path.
def _is_tall(x: Tensor) -> bool:
    return x.shape[-2] > x.shape[-1]


def gram_of(x: Tensor, product: SymmetricProduct, *, out: Tensor, tall: bool | None = None) -> None:
    """Write X X^T (wide) or X^T X (tall) to ``out``. tall: None, by the shape of X; else as X is a part of
    such a matrix."""
    a, b = (x.mT, x) if (_is_tall(x) if tall is None else tall) else (x, x.mT)
    product(a, b, alpha=1.0, beta=0.0, out=out)


def _polynomial(gram: Tensor, triple: Triple, product: SymmetricProduct, *, out: Tensor) -> None:
    """Write b R + c R^2 to ``out``."""
    _, b, c = triple
    product(gram, gram, plus=gram, alpha=c, beta=b, out=out)


def apply_factor(factor: Tensor, x: Tensor, *, scale: float, out: Tensor, tall: bool | None = None) -> None:
    """Write scale X + factor X (wide) or scale X + X factor (tall) to ``out``; ``factor`` is symmetric."""
    a, b = (x, factor) if (_is_tall(x) if tall is None else tall) else (factor, x)
    multiply_add(x, a, b, alpha=1.0, beta=scale, out=out)
