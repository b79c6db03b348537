"""Fixtures and settings that all tests share."""

from collections.abc import Iterator

import hypothesis
import pytest
import torch

from ranks import Ranks

# Examples that run on several ranks take as long as they take.
hypothesis.settings.register_profile(
    "ranks",
    hypothesis.settings.get_profile(hypothesis.settings.get_current_profile_name()),
    deadline=None,
)
hypothesis.settings.load_profile("ranks")


def pytest_configure() -> None:
    torch.set_num_threads(1)  # the oracle computes as the ranks do


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """`ranks(4, fn, *args, timeout=60, **kwargs)`: the return values of `fn` on four ranks, in rank order."""
    pool = Ranks()
    yield pool
    pool.close()
