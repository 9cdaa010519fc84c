"""How far a training run is, and what it reports on the way."""

import time
from typing import Any

from torch import Tensor


class Clock:
    """How much of a run is over: by steps if it has a number of them, else by seconds.

    The schedule of a timed run begins when the set-up steps are over.
    """

    def __init__(self, seconds: float, num_steps: int, started: float) -> None:
        self.seconds, self.num_steps, self.started = seconds, num_steps, started
        self.begin = time.monotonic()

    def finish_setup(self) -> None:
        """Begin the schedule now."""
        self.begin = time.monotonic()
        setup_s = self.begin - self.started
        print(f"set up in {setup_s:.0f} s, {self.seconds - setup_s:.0f} s left", flush=True)

    def progress(self, step: int) -> float:
        """0 at the begin, 1 or more when the run is over."""
        if self.num_steps:
            return step / self.num_steps
        left_s = self.seconds - (self.begin - self.started)
        return (time.monotonic() - self.begin) / left_s if left_s > 0 else 1.0

    def elapsed_s(self) -> float:
        """Seconds since the schedule began."""
        return time.monotonic() - self.begin


class Report:
    """Losses and throughput, printed from time to time and kept for the record."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.history: list[tuple[int, int, list[float]]] = []
        self.start_interval(0)

    def start_interval(self, num_tokens: int) -> None:
        """Measure the throughput from here."""
        self.interval_start, self.interval_tokens = time.monotonic(), num_tokens

    def add(self, step: int, num_tokens: int, lr_scale: float, losses: list[Tensor]) -> None:
        """Print a line; reading the losses waits for the device."""
        values = [loss.item() for loss in losses]
        interval_s = time.monotonic() - self.interval_start
        rate = (num_tokens - self.interval_tokens) / interval_s
        shown = " ".join(f"{value:.3f}" for value in values)
        print(
            f"step {step} {num_tokens / 1e6:.1f}M tok {self.clock.elapsed_s():.0f}s "
            f"{rate:.0f} tok/s lr {lr_scale:.3f} loss {shown}",
            flush=True,
        )
        self.history.append((step, num_tokens, values))
        self.start_interval(num_tokens)

    def record(self, step: int, num_tokens: int) -> dict[str, Any]:
        """What training.json tells about the run."""
        return {"tokens": num_tokens, "steps": step, "loss": self.history}
