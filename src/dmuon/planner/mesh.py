"""A device mesh as numbers: how many ranks there are, and where each one stands."""

from __future__ import annotations

from dataclasses import dataclass

from ..ownership import chunks
from .model import PlanError

_FORMS = "dp=N, replicate=R,shard=N, or ddp=N; with tp=T and, but for ddp, ep=E or without"


@dataclass(frozen=True)
class Place:
    """A rank's coordinates."""

    shard: int
    replicate: int
    tp: int


@dataclass(frozen=True)
class Mesh:
    """The mesh dims that matter, whatever they are called on the user's DeviceMesh.

    Ranks count as on `init_device_mesh("cuda", (replicate, shard, tp))`: those of one TP group are
    consecutive.

    Attributes:
        shard: ranks of a row, which share the model; 1 under DDP.
        replicate: rows; 1 without HSDP or DDP.
        tp: tensor-parallel ranks.
        ep: experts are cut over so many ranks of a row first; None: they are as the model has them.
        ddp: the model is whole on every data-parallel rank.
        text: as the user has written it.
    """

    shard: int
    replicate: int = 1
    tp: int = 1
    ddp: bool = False
    ep: int | None = None
    text: str = ""

    @property
    def slots(self) -> int:
        """Data-parallel ranks: those that can own matrices."""
        return self.shard * self.replicate

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.slots * self.tp

    @property
    def row_name(self) -> str:
        """What the dim over which weights are gathered is called."""
        return "shard" if "shard" in self.text else "dp"

    @property
    def column_name(self) -> str:
        """What the dim over which updates are published is called."""
        return "ddp" if self.ddp else "replicate"

    def place_of(self, rank: int) -> Place:
        """Coordinates of a global rank."""
        return Place(rank // self.tp % self.shard, rank // self.tp // self.shard, rank % self.tp)

    def held(self, count: int, shard: int) -> int:
        """How many matrices of a stack of `count` the ranks at a shard coordinate have."""
        ep = self.ep or 1  # as torchtitan: `ep` cuts first, and its ranks are neighbours
        return chunks(chunks(count, ep)[shard % ep], self.shard // ep)[shard // ep]

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Read `replicate=16,shard=8,tp=8`, `dp=64`, `ddp=8,tp=2` and the like.

        Raises:
            PlanError: for anything else.
        """
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, equals, size = (piece.strip() for piece in part.partition("="))
            if name not in ("dp", "replicate", "shard", "ddp", "tp", "ep") or not equals:
                raise PlanError(f"mesh {text!r}: cannot read {part.strip()!r}. A mesh is {_FORMS}")
            if name in sizes:
                raise PlanError(f"mesh {text!r} has {name} twice")
            if not (size.isascii() and size.isdigit()) or int(size) < 1:
                raise PlanError(f"mesh {text!r}: the size of {name} must be a whole number of at least 1")
            sizes[name] = int(size)
        data = sorted(sizes.keys() - {"tp", "ep"})
        if data not in ([], ["dp"], ["ddp"], ["shard"], ["replicate", "shard"]):
            raise PlanError(f"mesh {text!r}: {', '.join(data)} do not go together. A mesh is {_FORMS}")
        row = sizes.get("dp", 1) * sizes.get("shard", 1)
        if "ep" in sizes and ("ddp" in sizes or row % sizes["ep"]):
            raise PlanError(f"mesh {text!r}: ep must divide the ranks of a row, {row}, and ddp has none")
        return cls(
            shard=row,
            ep=sizes.get("ep"),
            replicate=sizes.get("ddp", 1) * sizes.get("replicate", 1),
            tp=sizes.get("tp", 1),
            ddp="ddp" in sizes,
            text=",".join(f"{name}={size}" for name, size in sizes.items()),
        )
