"""E5: the phases of a start."""

from __future__ import annotations

from itertools import count

import pytest

from engine.startup import StartupClock, describe_startup


def test_phases_add_up_in_order() -> None:
    """E5: Oracle: a clock that gives 0, 1, 2, …: each phase takes one tick, ready all of them."""
    ticks = count()
    clock = StartupClock(lambda: float(next(ticks)))
    for name in ("load", "compile", "load"):
        with clock.phase(name):
            pass
    with pytest.raises(RuntimeError), clock.phase("capture"):
        raise RuntimeError
    phases = clock.finish()
    assert phases == {"load": 2.0, "compile": 1.0, "capture": 1.0, "ready": 9.0}
    assert list(phases) == ["load", "compile", "capture", "ready"]
    assert describe_startup(phases) == "load 2.0 s, compile 1.0 s, capture 1.0 s, ready 9.0 s"
