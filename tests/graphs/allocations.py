"""How much memory a call takes at once, as the profiler saw it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch


def largest_allocation(run: Callable[[], object], folder: Path) -> int:
    """Bytes of the largest tensor that the second of two calls allocates; inference mode."""
    with torch.inference_mode():
        run()
        with torch.profiler.profile(profile_memory=True) as profiler:
            run()
    # Only the exported trace has what compiled code allocates.
    profiler.export_chrome_trace(str(folder / "trace.json"))
    trace = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return max(event["args"]["Bytes"] for event in trace if event["name"] == "[memory]")
