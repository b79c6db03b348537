"""Fixtures and settings that all tests share."""

import re
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


# Combinations whose parts other tests have, each with something else; `make test-all` runs them too.
THINNED = [
    r"until_backward_done(?!.*dp4)(?<!dp4-until_backward_done)",
    r"^tests/test_(?!tensor_parallel|formulas|overlap|distributed_gram).*hsdp2x1-tp2",
    r"^tests/test_(engine|update|unused|recomputation|evaluation|tied|param|accumulation|clip|scaler).*ddp4",
    r"test_examples.*\[adamw-(replicate|ddp|dp=2,tp=2)",
    r"test_distributed_gram.*fewer_bytes.*-[1256]\]",
    r"test_tensor_parallel.*equals_the_oracle\[(?!dp2-tp2).*False",
    r"test_accumulation.*same_update\[(?!dp4).*nested",
    r"test_training.*-False\]",
    r"^tests/test_(engine|update|unused|recomputation|evaluation|tied|param|scaler|accumulation).*(?<!d)dp2-tp2",
    r"test_examples.*another_mesh\[(adamw|dmuon-(replicate|dp=4|ddp=4))",
    r"test_resume.*(anywhere|whole_tensors)\[(hsdp|ddp4|dp2[]-])(?!tp)",
    r"test_recomputation.*hsdp2x2",
    r"test_faults.*a_rank_dies\[(backward|step|save-2)",
    r"test_faults.*named\[backward",
    r"test_resume.*(call|unrounded)\[(hsdp|ddp4|dp2-tp2)",
    r"test_resume.*whole_tensors\[(?!dp4).*-True",
    r"test_scaler.*mix_proj",
    r"test_takeover.*\[(hsdp|ddp4|ddp2-tp2)",
    r"test_scratch.*step_to_step\[(False|all|scatter|gather)",
    # What the random loops have, on every layout:
    r"^tests/test_(engine|update|unused|evaluation|tied|param|scaler|review).*\[(hsdp2x2|replicate2-shard2)",
    r"^tests/test_(engine|unused).*until_backward_done",
    r"test_formulas.*formulas\[(?!dp2-tp2|dp4-even).*-even",
    r"test_examples.*one_process\[dmuon-(dp=4|ddp=4|replicate=2,dp=2\])",
    r"test_examples.*test_interrupt_ends",
    r"test_distributed_gram.*settings\[\{'(replicate|ddp)",
    r"test_distributed_gram.*fewer_bytes\[\{'dp': 1",
    r"test_sequence_parallel.*dp4-tp1",
    r"test_tensor_parallel.*equals_the_oracle\[(dp4-tp1|hsdp1x2|hsdp2x2-tp1|ddp1-tp4)",
    r"test_tensor_parallel.*distributed_gram\[(hsdp2x1-tp2|dp1-tp4)-0",
    r"test_inspect.*test_full_tensor\[\((1, 4|4, 1|2,)",
    r"test_precision.*hundred.*\[(hsdp2x2|ddp)",
    r"^tests/test_(engine|update|unused|evaluation|tied|param|scaler).*\[ddp2-tp2",
    r"test_engine.*torchs_own_clipping\[\{'replicate",
    r"test_formulas.*(hsdp1x2|ddp1-tp4|hsdp2x2-tp1|dp4-tp1)",
    r"test_faults.*a_rank_dies\[(exchange|save-1)",
    r"test_faults.*named\[forward",
    r"test_distributed_gram.*fewer_bytes.*-[38]\]",
    r"test_examples.*one_process\[dmuon-replicate",
    r"test_examples.*another_mesh\[dmuon-ddp",
    r"test_checkpoint.*full_state_dicts.*\[\(4,",
    r"test_tensor_parallel.*clipping\[(dp1-tp4|hsdp)",
    r"test_tensor_parallel.*distributed_gram\[hsdp",
    r"test_docs.*usual_calls.*\[(dp4-tp1|hsdp1x2|ddp1)",
    r"test_scale.*bookkeeping\(\{'(replicate|ddp)",
    r"test_clip.*torchs_clipping\[(fsdp|hsdp|ddp)\]",
    r"test_review.*leaves_gradients.*ddp4",
    r"test_review.*preallocated.*\[(ddp4|dp4)",
    r"test_resume.*(whole_tensors\[dp2-tp2|unrounded\[ddp2-tp2|call\[ddp2-tp2)",
    r"test_scale.*one_group",
    r"test_tensor_parallel.*distributed_gram\[(dp1-tp4|ddp2-tp2)-None",
    r"test_training.*\[\(4, 1\)",
    r"test_precision.*hundred.*dp2-tp2",
    r"test_sequence_parallel.*dp1-tp4-(LocalGate|GateForTwo)",
    r"test_clip.*any_placements\[torch.float64",
    r"test_examples.*one_process\[adamw-dp=4",
    r"test_scratch.*step_to_step\[True-False",
    r"test_interrupted.*right\[.*-(0-False|2-True)",
    r"test_side_stream.*oracle\[(?!hsdp).*-2\]",
    r"test_side_stream.*order\[(dp4|hsdp|ddp2)",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="run the combinations, too, that are left out usually"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all"):
        return
    left_out = [item for item in items if any(re.search(pattern, item.nodeid) for pattern in THINNED)]
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]


def pytest_configure() -> None:
    torch.set_num_threads(1)  # the oracle computes as the ranks do


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """`ranks(4, fn, *args, timeout=60, **kwargs)`: the return values of `fn` on four ranks, in rank order."""
    pool = Ranks()
    yield pool
    pool.close()
