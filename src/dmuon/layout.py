"""Where things live: the data-parallel mesh as dmuon sees it, and the owner coordinate on it.

Every layout is a value here. FSDP2 on one mesh dim and HSDP on two differ in `replicate_size` alone, DDP in
`replicated`; the engine reads these values and has no code of its own for any layout.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard


@dataclass(frozen=True)
class Owner:
    """The coordinate on the data-parallel mesh that keeps a dedicated parameter.

    `shard` selects the rank inside each row (the ranks that shard the model together), `replicate` the row
    whose copy is the true one. Without HSDP `replicate` is 0.
    """

    shard: int
    replicate: int = 0


@dataclass(frozen=True)
class DataParallelLayout:
    """The data-parallel mesh, this rank's place on it, and the ranks it talks to.

    `mesh` is the very mesh that FSDP2 is given: `(shard,)`, or `(replicate, shard)` under HSDP, so that
    dedicated and base parameters meet in the same DTensor operations.

    Under DDP (`replicated`) the one mesh dim is the row: the owner's weights go to all of it after every
    step, and stay there.
    """

    mesh: DeviceMesh
    row: tuple[int, ...]  # global ranks that share my replicate coordinate, by shard coordinate
    column: tuple[int, ...]  # global ranks that share my shard coordinate, by replicate coordinate
    here: Owner  # my own coordinate
    replicated: bool = False  # DDP: every rank of the row keeps the gathered weights all the time
    _joint: dict[DeviceMesh, DeviceMesh] = field(default_factory=dict, repr=False, compare=False)

    @property
    def shard_size(self) -> int:
        """Number of ranks in a row."""
        return len(self.row)

    @property
    def replicate_size(self) -> int:
        """Number of rows; 1 without HSDP."""
        return len(self.column)

    @property
    def size(self) -> int:
        """Number of data-parallel ranks, which is the number of owner slots."""
        return self.shard_size * self.replicate_size

    @property
    def device(self) -> torch.device:
        """The device on which this rank keeps its parameters."""
        if self.mesh.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(
            self.mesh.device_type, torch.get_device_module(self.mesh.device_type).current_device()
        )

    def owner_of_slot(self, slot: int) -> Owner:
        """Slot `i` of the assignment as a coordinate: shard first, so that early slots fill a row."""
        return Owner(shard=slot % self.shard_size, replicate=slot // self.shard_size)

    def slot_of(self, owner: Owner) -> int:
        """The inverse of `owner_of_slot`."""
        return owner.replicate * self.shard_size + owner.shard

    def global_rank(self, owner: Owner) -> int:
        """The global rank at a data-parallel coordinate (of this rank's own slice of the mesh)."""
        return self._ranks[owner.replicate][owner.shard]

    @cached_property
    def _ranks(self) -> list[list[int]]:
        """Global ranks, [replicate, shard]."""
        return self.mesh.mesh.view(-1, self.shard_size).tolist()

    def coordinate_of(self, rank: int) -> Owner | None:
        """The data-parallel coordinate of any global rank; None if it is not on the root mesh."""
        root, names = root_mesh(self.mesh), self.mesh.mesh_dim_names
        where = (root.mesh == rank).nonzero()
        if len(where) == 0:
            return None
        index = [root.mesh_dim_names.index(n) for n in names] if names and root.mesh_dim_names else [0]
        coordinate = [int(where[0][i]) for i in index]
        return Owner(coordinate[-1], coordinate[0] if self.mesh.ndim == 2 else 0)

    def with_tp(self, mesh: DeviceMesh) -> DeviceMesh:
        """The data-parallel dims and behind them those of a tensor-parallel mesh; one object for all
        parameters, since making a mesh takes time and memory in proportion to its ranks."""
        if mesh not in self._joint:
            self._joint[mesh] = joint_mesh(self.mesh, mesh)
        return self._joint[mesh]

    def keeps_weight(self, owner: Owner) -> bool:
        """Whether this rank keeps the weight at rest: the owner, and its replicas in the other rows."""
        return self.here.shard == owner.shard

    def is_owner(self, owner: Owner) -> bool:
        """Whether this rank is the owner: it keeps momentum and gradient and runs Newton-Schulz."""
        return self.here == owner

    @property
    def publish_ranks(self) -> tuple[int, ...]:
        """Those who keep a weight and get the new one after a step: the column, under DDP the row."""
        return self.row if self.replicated else self.column

    def publish_source(self, owner: Owner) -> int:
        """Position of the owner in `publish_ranks`."""
        return owner.shard if self.replicated else owner.replicate

    def weight_placements(self) -> tuple[Placement, ...]:
        """Placements of a resting weight, which are FSDP2's own."""
        return (Shard(0),) if self.mesh.ndim == 1 else (Replicate(), Shard(0))

    def owner_placements(self) -> tuple[Placement, ...]:
        """Placements of what lives on the one owner: gradient and momentum."""
        return (Shard(0),) if self.mesh.ndim == 1 else (Shard(0), Shard(0))

    def broadcast_from_owner(self, whole: torch.Tensor, owner: Owner) -> None:
        """Bring a tensor from the owner to all data-parallel ranks, in place: down its column, then along
        the rows. Synchronous, on the mesh's own process groups."""
        if self.replicate_size > 1 and self.keeps_weight(owner):
            dist.broadcast(whole, self.column[owner.replicate], group=self.mesh.get_group(0))
        if self.shard_size > 1:
            dist.broadcast(whole, self.row[owner.shard], group=self.mesh.get_group(self.mesh.ndim - 1))

    @classmethod
    def from_meshes(
        cls, mesh: DeviceMesh, replicate_mesh: DeviceMesh | None = None, *, replicated: bool = False
    ) -> DataParallelLayout:
        """Read the layout off the meshes the user passed.

        Args:
            mesh: the 1-D mesh that shards, or the 2-D `(replicate, shard)` mesh of HSDP.
            replicate_mesh: the 1-D mesh that replicates, from the same root mesh as `mesh`.
            replicated: for DDP: `mesh` has one dim, over which the model is whole on every rank.

        Raises:
            TypeError: if an argument is not a DeviceMesh.
            ValueError: for another number of dims, unnamed dims under HSDP, or meshes of different roots.
        """
        for name, value in (("mesh", mesh), ("replicate_mesh", replicate_mesh)):
            absent = name == "replicate_mesh" and value is None
            if not absent and not isinstance(value, DeviceMesh):
                raise TypeError(f"{name} must be a DeviceMesh, got {type(value).__name__}")
        if replicate_mesh is not None:
            mesh = _hsdp_mesh(mesh, replicate_mesh)
        if replicated and mesh.ndim != 1:
            raise ValueError(
                f"for DDP, mesh must have one dim, got {mesh.ndim}. Pass the data-parallel slice, such as "
                'mesh["dp"]; several dims can be made one: mesh["replicate", "shard"]._flatten("dp").'
            )
        if mesh.ndim not in (1, 2):
            raise ValueError(
                f"mesh must have one dim (FSDP2) or two, (replicate, shard) (HSDP); got {mesh.ndim} dims. "
                'Pass the data-parallel slice, such as mesh["dp"].'
            )
        if mesh.ndim == 2 and mesh.mesh_dim_names is None:
            raise ValueError(
                "a two-dimensional mesh needs mesh_dim_names, as fully_shard does: "
                'init_device_mesh(..., mesh_dim_names=("replicate", "shard"))'
            )
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(f"rank {dist.get_rank()} is not part of {mesh}")
        row = dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1))
        column = dist.get_process_group_ranks(mesh.get_group(0)) if mesh.ndim == 2 else [dist.get_rank()]
        here = Owner(coordinate[-1], coordinate[0] if mesh.ndim == 2 else 0)
        return cls(mesh, tuple(row), tuple(column), here, replicated)


def _hsdp_mesh(shard_mesh: DeviceMesh, replicate_mesh: DeviceMesh) -> DeviceMesh:
    """The 2-D `(replicate, shard)` slice that two 1-D slices of one root mesh came from."""
    for name, value in (("mesh", shard_mesh), ("replicate_mesh", replicate_mesh)):
        if value.ndim != 1:
            raise ValueError(f"with replicate_mesh both meshes must have one dim; {name} has {value.ndim}")
        if value.mesh_dim_names is None:
            raise ValueError(
                f"{name} has no mesh_dim_names; HSDP needs named dims: slice both meshes from one "
                'init_device_mesh(..., mesh_dim_names=("replicate", "shard"))'
            )
    assert shard_mesh.mesh_dim_names is not None  # for the type checker; checked above
    assert replicate_mesh.mesh_dim_names is not None
    names = (replicate_mesh.mesh_dim_names[0], shard_mesh.mesh_dim_names[0])
    root = root_mesh(shard_mesh)
    if root != root_mesh(replicate_mesh) or any(n not in (root.mesh_dim_names or ()) for n in names):
        raise ValueError(
            f"mesh ({names[1]!r}) and replicate_mesh ({names[0]!r}) must be slices of one root mesh: "
            f'root["{names[1]}"] and root["{names[0]}"]'
        )
    if names[0] == names[1]:
        raise ValueError(f"mesh and replicate_mesh are the same mesh dim {names[0]!r}")
    return root[names]


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that a slice was taken from."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # torch 2.9

    return _mesh_resources.get_root_mesh(mesh)


def joint_mesh(*meshes: DeviceMesh) -> DeviceMesh:
    """One mesh with the dims of several slices of one root mesh, in this order."""
    if len(meshes) == 1:
        return meshes[0]
    if hasattr(DeviceMesh, "_concatenate"):
        return DeviceMesh._concatenate(list(meshes))
    # torch 2.9, where the dims must be in the root's order
    return root_mesh(meshes[0])[tuple(name for mesh in meshes for name in mesh.mesh_dim_names or ())]


def wrap_local(
    local: torch.Tensor, shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> DTensor:
    """A DTensor of global `shape` whose local part is `local`, whatever torch would have put there.

    Resting tensors are uneven on purpose; see `docs/design.md` for what torch does right with them.
    """
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
