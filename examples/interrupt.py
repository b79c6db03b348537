"""Ending a run at a step boundary."""

from __future__ import annotations

import os
import signal
from types import FrameType


class Interrupt:
    """From its construction on, Ctrl-C and termination signals no longer end this process: it asks here."""

    def __init__(self) -> None:
        self.parent = os.getppid()
        self.received = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def requested(self) -> bool:
        """Whether a signal came, or the launcher is gone."""
        # A launcher that was killed cannot pass signals on; without this the ranks would train on unseen.
        return self.received or os.getppid() != self.parent
