"""Text as bytes, cut into training batches: by default the Python sources of this Python's standard library.

Everything here is deterministic. Files are read in sorted order, and the batch of a step is a function of
(seed, step) alone, of which each data-parallel rank takes its part. So a resumed run sees exactly the batches
that the first run would have seen, on whatever mesh it goes on.
"""

from __future__ import annotations

import glob
import sysconfig
from pathlib import Path

import numpy as np
import torch

VOCAB_SIZE = 256  # one token per byte value
SEPARATOR = b"\0"  # between files; text does not contain it
VALIDATION_EVERY = 20  # one file in this many is kept for validation

# Installed packages differ from machine to machine; tests are half of the rest, and as machine-made as the
# character tables in `encodings`, whose near-copies would also leak from training into validation.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}


def find_files(pattern: str | None = None) -> list[Path]:
    """The files that `pattern` (a glob, with `**`) matches, sorted; without one, the standard library's."""
    if pattern is not None:
        files = sorted(path for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_file())
        source = f"--data {pattern!r}"
    else:
        root = Path(sysconfig.get_paths()["stdlib"])
        relative = (path.relative_to(root) for path in root.rglob("*.py"))
        files = [root / path for path in sorted(relative) if not SKIPPED_FOLDERS & set(path.parts)]
        source = f"the standard library's folder {root}"
    if len(files) < 2:
        raise ValueError(
            f"{source} has {len(files)} files; training and validation need at least one each. "
            "Pass a glob that matches more files with --data."
        )
    return files


def split_files(files: list[Path]) -> tuple[list[Path], list[Path]]:
    """Training and validation files: every 20th file, counted from the middle of the first 20, validates."""
    offset = min(VALIDATION_EVERY, len(files)) // 2
    validation = files[offset::VALIDATION_EVERY]
    chosen = set(validation)
    return [path for path in files if path not in chosen], validation


def read_tokens(files: list[Path]) -> np.ndarray:
    """The bytes of all files, one after the other, as a uint8 array."""
    return np.frombuffer(SEPARATOR.join(path.read_bytes() for path in files), dtype=np.uint8)


class TextData:
    """Batches of (inputs, targets), both int64 of shape (sequences, seq_len), targets one token ahead.

    Of the `batch_size` sequences of a batch, data-parallel rank `rank` of `ranks` gets its equal part.
    """

    def __init__(
        self, pattern: str | None, *, seq_len: int, batch_size: int, rank: int, ranks: int, seed: int
    ) -> None:
        train_files, validation_files = split_files(find_files(pattern))
        self.train, self.validation = read_tokens(train_files), read_tokens(validation_files)
        shortest = min(len(self.train), len(self.validation))
        if shortest <= seq_len:
            raise ValueError(f"a sequence of {seq_len} tokens does not fit: the shorter split has {shortest}")
        self.seq_len, self.batch_size, self.seed = seq_len, batch_size, seed
        part = batch_size // ranks
        self.mine = slice(rank * part, (rank + 1) * part)

    def train_batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random windows of the training text, drawn from a generator of this (seed, step)."""
        generator = np.random.default_rng([self.seed, step])
        starts = generator.integers(0, len(self.train) - self.seq_len, size=self.batch_size)
        return self._windows(self.train, starts[self.mine])

    def validation_batch(self, index: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Batch `index` of `count`: together they are windows spread evenly over the text."""
        total = count * self.batch_size
        starts = np.linspace(0, len(self.validation) - self.seq_len - 1, num=total).astype(np.int64)
        return self._windows(self.validation, starts.reshape(count, -1)[index, self.mine])

    def _windows(self, tokens: np.ndarray, starts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        offsets = starts[:, None] + np.arange(self.seq_len + 1)  # B, T + 1
        windows = torch.from_numpy(tokens[offsets].astype(np.int64))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def unigram_entropy(tokens: np.ndarray) -> float:
    """Nats per token of the best model that ignores context: the loss that a model must beat."""
    share = np.bincount(tokens, minlength=VOCAB_SIZE) / len(tokens)
    share = share[share > 0]
    return float(-(share * np.log(share)).sum())
