"""A contestant: a file with a `build` function, found in a folder.

A file of a peers folder is a module with

    NAME: str                 how tables call it
    UPDATE: str               optional: peers that name the same update are expected to have the same loss
    NOTE: str                 optional: one sentence on what it does, printed under the tables
    DTYPE: torch.dtype        optional: of its Newton-Schulz; where that would take seconds, for want of
                              instructions for it, the peer runs only if it is asked for

    def build(model: nn.Module, mesh: DeviceMesh) -> tuple[nn.Module, optimizer]
        Spread the model over the mesh (dims: see examples/parallel.py) and return it, wrapped or not, and
        something with `step()` and `zero_grad()`. Every rank calls it, with equal weights.

    def supports(mesh: DeviceMesh) -> str | None
        Optional: why this mesh is not for this peer; None or "" if it is.

    def finish(optimizer) -> None
        Optional: wait for what `step()` has started and not finished.

    def newton_schulz(model: nn.Module) -> Callable[[], None]
        Optional: a function that runs the orthogonalizations of one `step()` on this rank, on matrices of its
        own and nothing else. It is timed in a row of its own.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

BUILT_IN = Path(__file__).parent / "peers"


class Unfit(Exception):
    """A peer has no place in this contest; the message says why."""


@dataclass(frozen=True)
class Peer:
    """One contestant. `file` is the name of its file, without folder and suffix."""

    file: str
    module: ModuleType | None  # None: it could not be imported
    error: str = ""  # why not

    @property
    def name(self) -> str:
        return str(getattr(self.module, "NAME", self.file))

    @property
    def update(self) -> str:
        return str(getattr(self.module, "UPDATE", ""))

    @property
    def note(self) -> str:
        return str(getattr(self.module, "NOTE", ""))

    @property
    def dtype(self) -> torch.dtype | None:
        return getattr(self.module, "DTYPE", None)

    def why_not(self, mesh: DeviceMesh) -> str:
        """Why this peer does not run on this mesh; empty if it does."""
        supports = getattr(self.module, "supports", None)
        return self.error or (supports(mesh) if supports else None) or ""

    def build(self, model: nn.Module, mesh: DeviceMesh) -> tuple[nn.Module, Any]:
        if self.module is None:
            raise Unfit(self.error)
        return self.module.build(model, mesh)

    def finish(self, optimizer: Any) -> None:
        """Wait for what `step()` has not finished."""
        if finish := getattr(self.module, "finish", None):
            finish(optimizer)

    def newton_schulz(self, model: nn.Module) -> Callable[[], None] | None:
        """The orthogonalizations of this rank and nothing else, if the peer tells."""
        loop = getattr(self.module, "newton_schulz", None)
        return loop(model) if loop else None


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    if isinstance(error, Unfit):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def find_peers(folders: Iterable[Path], only: Iterable[str] = ()) -> list[Peer]:
    """The peers in the built-in folder and in `folders`, by file name; `only` some of them, if not empty.

    Raises:
        ValueError: if a folder is not there, two files have the same name, or `only` names none.
    """
    files: dict[str, Path] = {}
    for folder in (BUILT_IN, *folders):
        if not folder.is_dir():
            raise ValueError(f"--peers {folder}: there is no such folder")
        for path in sorted(folder.glob("[!_]*.py")):
            if path.stem in files:
                raise ValueError(f"{path} and {files[path.stem]} have the same name: rename one of them")
            files[path.stem] = path
    wanted = list(only) or list(files)
    if missing := [name for name in wanted if name not in files]:
        raise ValueError(f"there is no peer {missing[0]!r}; there are {', '.join(files)}")
    return [load(files[name]) for name in sorted(wanted)]


def load(path: Path) -> Peer:
    """Import a peer's file; a failure is kept, not raised."""
    name = f"benchmark_peer_{path.stem}"  # a name of its own: muon_fsdp2 is also the name of a package
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a user's file does, the others run
        return Peer(path.stem, None, first_line(error))
    return Peer(path.stem, module)
