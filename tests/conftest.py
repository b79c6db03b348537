"""Fixtures and settings that all tests share."""

import importlib.util
from collections.abc import Iterator

import hypothesis
import pytest
import torch

import programs
from ranks import Ranks

# Tests of programs that are not installed (`make setup FRAMEWORKS=no`).
_PROGRAMS = ("accelerate", "lightning", "peft", "torchtitan", "transformers")
collect_ignore = [f"test_{name}.py" for name in _PROGRAMS if importlib.util.find_spec(name) is None]

# Examples that run on several ranks take as long as they take.
hypothesis.settings.register_profile(
    "ranks",
    hypothesis.settings.get_profile(hypothesis.settings.get_current_profile_name()),
    deadline=None,
)
hypothesis.settings.load_profile("ranks")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the combinations, too")
    parser.addoption("--write-programs", action="store_true", help="write the table of docs/programs.md")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the combinations: parameters marked so, and those that an `always` mark does not name.

    `always("dp4", "hsdp2x2-True")` names parts of a test's id. A test that has none of them runs in full.
    """
    if config.getoption("--all"):
        return
    named = {item for item in items if any(part in _parts(item) for part in _always(item))}
    tests = {item.nodeid.split("[")[0] for item in named}
    gone = {
        item
        for item in items
        if item.get_closest_marker("combination")
        or (_always(item) and item not in named and item.nodeid.split("[")[0] in tests)
    }
    config.hook.pytest_deselected(items=list(gone))
    items[:] = [item for item in items if item not in gone]


def _always(item: pytest.Item) -> tuple[str, ...]:
    mark = item.get_closest_marker("always")
    return tuple(f"-{part}-" for part in mark.args) if mark is not None else ()


def _parts(item: pytest.Item) -> str:
    return f"-{item.callspec.id}-" if hasattr(item, "callspec") else ""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "combination: what other tests have the parts of; with --all only")
    config.addinivalue_line(
        "markers", "always(*ids): of this test's parameters, those that run without --all"
    )
    if config.getoption("--write-programs"):
        programs.WRITING.append(True)
    torch.set_num_threads(1)  # the oracle computes as the ranks do


def pytest_sessionfinish() -> None:
    if programs.WRITING and programs.ROWS:
        programs.write_table()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """`ranks(4, fn, *args, timeout=120, **kwargs)`: what `fn` returns on four ranks, in rank order."""
    pool = Ranks()
    yield pool
    pool.close()
