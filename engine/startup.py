"""How long each phase of a start took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOAD, COMPILE, CAPTURE, READY = "load", "compile", "capture", "ready"


class StartupClock:
    """Times named phases from its construction on; a phase that comes again adds up."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_s = clock()
        self._phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the body's time as `name`'s, also when it raises."""
        assert name != READY, "ready is the whole start"
        began_s = self._clock()
        try:
            yield
        finally:
            self._phases[name] = self._phases.get(name, 0.0) + self._clock() - began_s

    def finish(self) -> dict[str, float]:
        """Seconds of each phase in order, and as `ready` of all since construction."""
        return {**self._phases, READY: self._clock() - self._started_s}


def describe_startup(startup_s: dict[str, float]) -> str:
    """One line for the log: load 1.2 s, compile 3.4 s, …"""
    return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in startup_s.items())
