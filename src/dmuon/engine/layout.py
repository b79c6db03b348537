"""Where things live: the data-parallel mesh as dmuon sees it, and the owner coordinate on it.

Every layout is a value here: a grid of rows, whose ranks shard the model together, and columns, whose ranks
keep the same. FSDP2 is one row, HSDP several, DDP rows of one rank. The engine reads the two sizes and has no
code of its own for any layout.

A rank's place in a row or column is its rank in that process group, not its coordinate on the mesh: where the
ranks of a mesh do not ascend, the two differ, and torch's collectives and FSDP2 go by the former.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

_NOT_DATA_PARALLEL = {"tp", "tensor", "tensor_parallel", "pp", "pipeline", "pipeline_parallel"}

_worlds: weakref.WeakKeyDictionary[dist.ProcessGroup, dict] = weakref.WeakKeyDictionary()


def per_world() -> dict:
    """What is made once and shared by all models: it lives as long as the default process group.

    Not an attribute of a mesh, which would be pickled with every DTensor on it.
    """
    assert dist.group.WORLD is not None
    if dist.group.WORLD not in _worlds:
        _worlds.clear()  # of one that has been destroyed: a mesh in it may be what keeps it alive
    return _worlds.setdefault(dist.group.WORLD, {})


@dataclass(frozen=True)
class Owner:
    """The coordinate on the data-parallel mesh that keeps a dedicated parameter.

    `shard` selects the rank inside each row (the ranks that shard the model together), `replicate` the row
    whose copy is the true one. FSDP2 has one row; under DDP every rank is a row.
    """

    shard: int
    replicate: int = 0


@dataclass(frozen=True)
class DataParallelLayout:
    """The data-parallel mesh, this rank's place on it, and the ranks it talks to.

    `mesh` is the very mesh that FSDP2 is given: `(shard,)`, or `(replicate, shard)` under HSDP, so that
    dedicated and base parameters meet in the same DTensor operations. Under DDP it is `(replicate, 1)`.
    """

    mesh: DeviceMesh
    given: DeviceMesh  # as the user gave it: under DDP it has one dim
    ranks: tuple[tuple[int, ...], ...]  # global ranks, [replicate][shard]
    here: Owner  # my own coordinate
    _joint: dict[DeviceMesh, DeviceMesh] = field(default_factory=dict, repr=False, compare=False)

    @property
    def row(self) -> tuple[int, ...]:
        """Global ranks that share my replicate coordinate, by shard coordinate."""
        return self.ranks[self.here.replicate]

    @property
    def column(self) -> tuple[int, ...]:
        """Global ranks that share my shard coordinate, by replicate coordinate."""
        return tuple(row[self.here.shard] for row in self.ranks)

    @property
    def shard_size(self) -> int:
        """Number of ranks in a row; 1 under DDP."""
        return len(self.ranks[0])

    @property
    def replicate_size(self) -> int:
        """Number of rows; 1 with FSDP2 on one mesh dim."""
        return len(self.ranks)

    @property
    def size(self) -> int:
        """Number of data-parallel ranks, which is the number of owner slots."""
        return self.shard_size * self.replicate_size

    @property
    def is_ddp(self) -> bool:
        """Whether the user asked for a model that stays whole on every rank."""
        return self.given is not self.mesh

    @property
    def device(self) -> torch.device:
        """The device on which this rank keeps its parameters."""
        kind = self.mesh.device_type
        if kind == "cpu":
            return torch.device("cpu")
        return torch.device(kind, torch.get_device_module(kind).current_device())

    def owner_of_slot(self, slot: int) -> Owner:
        """Slot `i` of the assignment as a coordinate: shard first, so that early slots fill a row."""
        return Owner(shard=slot % self.shard_size, replicate=slot // self.shard_size)

    def slot_of(self, owner: Owner) -> int:
        """The inverse of `owner_of_slot`."""
        return owner.replicate * self.shard_size + owner.shard

    def global_rank(self, owner: Owner) -> int:
        """The global rank at a data-parallel coordinate (of this rank's own slice of the mesh)."""
        return self.ranks[owner.replicate][owner.shard]

    def coordinate_of(self, rank: int) -> Owner | None:
        """The data-parallel coordinate of any global rank; None if it is not on the root mesh."""
        grid = root_mesh(self.given).mesh
        theirs, mine = (grid == rank).nonzero(), (grid == dist.get_rank()).nonzero()
        if len(theirs) == 0:
            return None
        places = torch.isin(grid, self.given.mesh).nonzero()
        spanned = (places != places[0]).any(0)  # the dims of the root that are ours, flattened or not
        twin = int(grid[tuple(torch.where(spanned, theirs[0], mine[0]).tolist())])  # in this rank's slice
        found = [(r, row.index(twin)) for r, row in enumerate(self.ranks) if twin in row]
        return Owner(found[0][1], found[0][0]) if found else None

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

    def weight_placements(self) -> tuple[Placement, ...]:
        """Placements of a resting weight, which are FSDP2's own."""
        return (Shard(0),) if self.mesh.ndim == 1 else (Replicate(), Shard(0))

    def owner_placements(self) -> tuple[Placement, ...]:
        """Placements of what lives on the one owner: gradient and momentum."""
        return (Shard(0),) if self.mesh.ndim == 1 else (Shard(0), Shard(0))

    def broadcast_down(self, kept: torch.Tensor, owner: Owner) -> None:
        """Bring a tensor from the owner to its replicas, in place; those who keep the weight call it.
        Synchronous, on the mesh's own process group."""
        if self.replicate_size > 1:
            dist.broadcast(kept, self.column[owner.replicate], group=self.mesh.get_group(0))

    def broadcast_along(self, whole: torch.Tensor, owner: Owner) -> None:
        """Bring a tensor from those who keep the weight to their rows, in place. As `broadcast_down`."""
        if self.shard_size > 1:
            dist.broadcast(whole, self.row[owner.shard], group=self.mesh.get_group(self.mesh.ndim - 1))

    @classmethod
    def from_meshes(
        cls, mesh: DeviceMesh, replicate_mesh: DeviceMesh | None = None, *, ddp: bool = False
    ) -> DataParallelLayout:
        """Read the layout off the meshes the user passed.

        Args:
            mesh: the 1-D mesh that shards, or the 2-D `(replicate, shard)` mesh of HSDP.
            replicate_mesh: the 1-D mesh that replicates, from the same root mesh as `mesh`.
            ddp: `mesh` has one dim, over which the model is whole on every rank.

        Raises:
            TypeError: if an argument is not a DeviceMesh.
            ValueError: for another number of dims, unnamed dims under HSDP, meshes of different roots, or
                ranks in an order that is not one of whole rows and columns.
        """
        for name, value in (("mesh", mesh), ("replicate_mesh", replicate_mesh)):
            absent = name == "replicate_mesh" and value is None
            if not absent and not isinstance(value, DeviceMesh):
                raise TypeError(f"{name} must be a DeviceMesh, got {type(value).__name__}")
        if replicate_mesh is not None:
            mesh = _hsdp_mesh(mesh, replicate_mesh)
        if ddp and mesh.ndim != 1:
            raise ValueError(
                f"for DDP, mesh must have one dim, got {mesh.ndim}. Pass the data-parallel slice, such as "
                'mesh["dp"]; several dims can be made one: mesh["replicate", "shard"]._flatten("dp").'
            )
        if mesh.ndim not in (1, 2):
            raise ValueError(
                f"mesh must have one dim (FSDP2) or two, (replicate, shard) (HSDP); got {mesh.ndim} dims. "
                'Pass the data-parallel slice, such as mesh["dp"].'
            )
        _refuse_other_dims(mesh)
        if mesh.ndim == 2 and mesh.mesh_dim_names is None:
            raise ValueError(
                "a two-dimensional mesh needs mesh_dim_names, as fully_shard does: "
                'init_device_mesh(..., mesh_dim_names=("replicate", "shard"))'
            )
        if mesh.get_coordinate() is None:
            raise ValueError(f"rank {dist.get_rank()} is not part of {mesh}")
        grid = ranks_by_group(mesh)
        if ddp:
            grid = grid.view(-1, 1)
        ranks = tuple(map(tuple, grid.view(-1, grid.shape[-1]).tolist()))
        me = dist.get_rank()
        here = next(Owner(row.index(me), replicate) for replicate, row in enumerate(ranks) if me in row)
        return cls(_rows_of_one(mesh) if ddp else mesh, mesh, ranks, here)


def ranks_by_group(mesh: DeviceMesh) -> torch.Tensor:
    """The global ranks of a mesh, indexed in each dim by the rank in that dim's process group.

    Raises:
        ValueError: if there is no such order: the dims' groups order some ranks this way and some that.
    """
    grid = mesh.mesh
    for dim in range(mesh.ndim):  # a process group's ranks ascend
        grid = grid.sort(dim).values
    for dim in range(mesh.ndim):
        lines = grid.movedim(dim, -1).reshape(-1, grid.shape[dim]).tolist()
        theirs = mesh.mesh.movedim(dim, -1).reshape(-1, grid.shape[dim]).sort(-1).values.tolist()
        if sorted(lines) != sorted(theirs):
            raise ValueError(
                f"the ranks of {mesh} are in an order that is not one of whole rows and columns; let them "
                "ascend along each dim, as init_device_mesh does"
            )
    return grid


def _refuse_other_dims(mesh: DeviceMesh) -> None:
    """Refuse a mesh whose dims' names say that their ranks have the same data, or other layers."""
    names = mesh.mesh_dim_names or ()
    other = [name for name in names if name.lower() in _NOT_DATA_PARALLEL]
    if other:
        rest = [name for name in names if name not in other]
        instead = ", ".join(f'"{name}"' for name in rest) or '"dp"'
        raise ValueError(
            f"mesh has the dims {names}, over which gradients would be averaged, and by its name "
            f"{other[0]!r} is not data-parallel. Pass the data-parallel slice, such as mesh[{instead}], to "
            "dedicate_params and to fully_shard; or give the dim another name."
        )


def _rows_of_one(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh of one dim as (replicate, 1), on which FSDP2's HSDP is DDP. One for all models: it has process
    groups of its own."""
    made = per_world()
    key = ("rows of one", root_mesh(mesh), tuple(mesh.mesh.tolist()), mesh.mesh_dim_names)
    if key not in made:
        name = mesh.mesh_dim_names[0] if mesh.mesh_dim_names else "dp"
        names = (f"{name}_replicate", f"{name}_shard")
        if mesh.mesh_dim_names and hasattr(mesh, "_unflatten"):
            made[key] = mesh._unflatten(0, (mesh.size(), 1), names)
        else:  # a mesh without names, or torch 2.9, where tensor parallelism under DDP is not to be had
            made[key] = DeviceMesh(mesh.device_type, mesh.mesh.view(-1, 1), mesh_dim_names=names)
    return made[key]


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
    replicate, shard = replicate_mesh.mesh_dim_names[0], shard_mesh.mesh_dim_names[0]
    if replicate == shard:
        raise ValueError(f"mesh and replicate_mesh are the same mesh dim {shard!r}")
    ours = set(shard_mesh.mesh.tolist()) & set(replicate_mesh.mesh.tolist())
    if root_mesh(shard_mesh) != root_mesh(replicate_mesh) or len(ours) != 1:
        raise ValueError(
            f"mesh ({shard!r}) and replicate_mesh ({replicate!r}) must be two dims of one root mesh, such as "
            f'root = init_device_mesh(..., mesh_dim_names=("{replicate}", "{shard}")); several dims can be '
            f'made one before: root["dp_shard", "cp"]._flatten("dp_shard_cp").'
        )
    return joint_mesh(replicate_mesh, shard_mesh)


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


def local_slices(shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[slice, ...]:
    """Where this rank's part of an evenly cut tensor lies in the whole. A private name of torch's, without
    which its rules for uneven chunks would be written here once more."""
    local, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, local, strict=True))


def wrap_local(
    local: torch.Tensor, shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> DTensor:
    """A DTensor of global `shape` whose local part is `local`, whatever torch would have put there.

    Resting tensors are uneven on purpose; see `docs/design.md` for what torch does right with them.
    """
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
