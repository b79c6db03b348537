"""Distributed Muon for PyTorch: every matrix is orthogonalized whole, once, by its one owner.

dmuon.dedicate_params(model, mesh["dp"])                  # before fully_shard
...                                                       # fully_shard as always
optimizer = dmuon.Muon(model, lr=0.02, adamw_lr=1e-3)     # after it
"""

from .accumulation import no_sync
from .api import (
    dedicate_params,
    dedicate_params_ddp,
    dedicate_params_ddp_tp,
    dedicated_parameters,
    full_tensor,
    replicate,
    replicate_tp,
)
from .checkpoint.sharded import as_sharded
from .checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    to_torch_state_dict,
)
from .clip import clip_grad_norm_
from .engine.parameter import DedicatedParam
from .inspect import get_dedicated_params, get_owned_params, summary
from .optim.muon import Muon
from .optim.newton_schulz import newton_schulz
from .optim.variants import NorMuon, State, Variant, ema_
from .qk_clip import AttentionHeads, qk_clip_
from .scaler import GradScaler
from .structure import Structure

__version__ = "0.1.0"

__all__ = [
    "AttentionHeads",
    "DedicatedParam",
    "GradScaler",
    "Muon",
    "NorMuon",
    "State",
    "Structure",
    "Variant",
    "as_sharded",
    "clip_grad_norm_",
    "dedicate_params",
    "dedicate_params_ddp",
    "dedicate_params_ddp_tp",
    "dedicated_parameters",
    "ema_",
    "full_tensor",
    "get_dedicated_params",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_owned_params",
    "newton_schulz",
    "no_sync",
    "qk_clip_",
    "replicate",
    "replicate_tp",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "summary",
    "to_torch_state_dict",
]
