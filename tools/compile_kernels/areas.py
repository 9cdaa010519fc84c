"""The kernels area by area, each area a list of calls that launch them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tools.compile_kernels import attention, gdn, linear, moe, sample
from tools.compile_kernels.recorder import CompiledKernel, Recorder

Call = tuple[str, Callable[[], object]]
AREAS: dict[str, Callable[[], Iterator[Call]]] = {
    "gdn": gdn.calls,
    "attention": attention.calls,
    "moe": moe.calls,
    "linear": linear.calls,
    "sample": sample.calls,
}


def compile_area(area: str) -> list[CompiledKernel]:
    """Compile what the area's calls launch; print each kernel as soon as it is known."""
    recorder = Recorder()
    num_shown = 0
    for label, call in AREAS[area]():
        with recorder.recording(f"{area}: {label}"):
            call()
        for kernel in recorder.kernels[num_shown:]:
            print(
                f"{kernel.label:44} {kernel.name:28} {kernel.num_warps:2} warps "
                f"{kernel.registers:4} registers {kernel.shared_bytes:7} B shared "
                f"{kernel.spill_bytes:5} B spilled",
                flush=True,
            )
        num_shown = len(recorder.kernels)
    return recorder.kernels
