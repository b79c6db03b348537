"""What a model would cost on a mesh: owners, balance, time, traffic, memory. No GPU, no process group.

`python -m dmuon plan` prints it; from Python:

    plan = plan_model(load("llama-3-70b"), Mesh.parse("replicate=16,shard=8,tp=8"))
    plan.balance, plan.moves_of(rank=0), plan.rest_of(rank=0)
"""

from .mesh import Mesh
from .model import Model, Parameter, PlanError, from_module
from .plan import Options, Plan
from .plan import plan as plan_model
from .source import load
from .traffic import Dtypes

__all__ = [
    "Dtypes",
    "Mesh",
    "Model",
    "Options",
    "Parameter",
    "Plan",
    "PlanError",
    "from_module",
    "load",
    "plan_model",
]
