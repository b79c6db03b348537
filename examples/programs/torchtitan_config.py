"""A config of torchtitan that trains its debug model with dmuon.

torchrun --nproc-per-node 8 -m torchtitan.train --module torchtitan_config --config llama3_debugmodel_muon
(with this folder on PYTHONPATH)
"""

from typing import Any

from torchtitan.models.llama3.config_registry import llama3_debugmodel

from dmuon.integrations.torchtitan import with_muon


def llama3_debugmodel_muon() -> Any:
    config = llama3_debugmodel()
    config.parallelism.spmd_backend = "partial_dtensor"
    return with_muon(config, lr=0.02, adamw_lr=8e-4)
