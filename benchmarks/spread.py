"""How measurements are told: the median, with the quartiles in brackets."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def spread(values: Sequence[float], digits: int) -> str:
    """The median and the quartiles."""
    low, middle, high = quartiles(values)
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median, the upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def by_round(values: Sequence[float], of: Sequence[float]) -> list[float]:
    """Ratios within each round."""
    return [value / base for value, base in zip(values, of, strict=True)]
