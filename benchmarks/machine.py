"""The machine that a measurement was made on, in words, for the heading of its results."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def describe() -> str:
    """CPU model, cores of this process, torch version and its threads; the GPU's name where there is one.

    One line, such as "Some CPU @ 3.0 GHz, 8 cores, torch 2.9.0 with 4 threads".
    """
    parts = [
        cpu_name(),
        f"{cores()} cores",
        f"torch {torch.__version__} with {torch.get_num_threads()} threads",
    ]
    if torch.cuda.is_available():
        parts.append(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
    return ", ".join(parts)


def cpu_name() -> str:
    """The processor's own name, where the system tells it; else its architecture."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model") and value.strip():
                return " ".join(value.split())
    return platform.processor() or platform.machine() or "unknown CPU"


def cores() -> int:
    """Cores this process may run on: fewer than the machine's if it was told so."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
