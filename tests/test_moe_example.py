"""The example of a mixture of experts: the same losses however the experts are divided."""

import argparse
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def losses(ep: int) -> list[float]:
    sys.path.append(str(EXAMPLES))
    try:
        import train_moe

        options = {"ep": ep, "steps": 4, "batch_size": 4, "lr": 0.02, "log_every": 2}
        return train_moe.train(argparse.Namespace(**options))
    finally:
        sys.path.remove(str(EXAMPLES))


def test_experts_may_be_divided_or_not(ranks):
    alone, divided, both = (ranks(n, losses, ep)[0] for n, ep in ((1, 1), (2, 2), (4, 2)))
    assert alone[-1] < alone[0]
    assert divided == pytest.approx(alone, abs=1e-4)
    assert both == pytest.approx(alone, abs=1e-4)
