"""Times every block size of the matrix-unit kernel on one GPU, to choose `few_rows_config` from.

    python -m bench.sweep_few_rows [--rows 16,64] [--only gate_up,down]

The table shows all of `--rows` side by side; a configuration may depend on their padded number.
Small blocks with few stages leave room for several programs on a multiprocessor, so that none
waits for a last wave of few.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context

import torch
from torch import Tensor

from bench.kernel_timing import MIN_BYTES_PER_REPLAY, measure_ceilings, time_in_graph
from bench.kernels_linear import DENSE, GATED, WEIGHTS, random_bf16
from graphs.kernels.linear.configs import FewRowsConfig, few_rows_config
from graphs.kernels.linear.ops import launch_few_rows

NUM_COMPILERS = 12
NUM_REPLAYS = 8
BYTES_PER_SM = 227 * 2**10
MAX_ROWS = 64
Shape = tuple[int, int]


def candidates() -> Iterator[FewRowsConfig]:
    """Blocks whose stages fit the shared memory of a multiprocessor."""
    for block_n, block_k, num_warps in product((32, 64, 128), (64, 128, 256), (4, 8)):
        stage_bytes = 2 * block_k * (block_n + MAX_ROWS)
        for num_stages in (2, 3, 4, 6, 8):
            if num_stages * stage_bytes <= BYTES_PER_SM and block_n * num_warps <= 1024:
                yield FewRowsConfig(block_n, block_k, num_warps, num_stages)


def multiply(config: FewRowsConfig, x: Tensor, weight: Tensor, *, is_gated: bool) -> Tensor:
    """The product by this configuration."""
    num_outputs = weight.shape[0] // 2 if is_gated else weight.shape[0]
    out = torch.empty(x.shape[0], num_outputs, dtype=x.dtype, device=x.device)
    launch_few_rows(x, weight, out, config, is_gated=is_gated)
    return out


def fault_of(config: FewRowsConfig, shape: Shape, num_rows: int, is_gated: bool) -> str | None:
    """What keeps a configuration from running, if anything; compiles it into Triton's cache."""
    weight, x = random_bf16(*shape), random_bf16(num_rows, shape[1])
    try:
        multiply(config, x, weight, is_gated=is_gated)
        torch.cuda.synchronize()
    except Exception as fault:
        return type(fault).__name__
    return None


def sweep(
    pool: ProcessPoolExecutor, name: str, shape: Shape, row_counts: list[int], *, is_gated: bool
) -> None:
    """Time all candidates that run, and print the best first by their sum over the row counts."""
    configs = list(candidates())
    faults = [
        list(
            pool.map(partial(fault_of, shape=shape, num_rows=num_rows, is_gated=is_gated), configs)
        )
        for num_rows in row_counts
    ]
    num_buffers = max(2, -(-MIN_BYTES_PER_REPLAY // (2 * shape[0] * shape[1])))
    weights = [random_bf16(*shape) for _ in range(num_buffers)]
    inputs = [random_bf16(num_rows, shape[1]) for num_rows in row_counts]
    timed = []
    for index, config in enumerate(configs):
        if any(row_faults[index] for row_faults in faults):
            continue
        times = [
            time_in_graph(
                [partial(multiply, config, x, weight, is_gated=is_gated) for weight in weights],
                num_replays=NUM_REPLAYS,
            )
            for x in inputs
        ]
        timed.append((times, config))
    now = few_rows_config(MAX_ROWS, shape[0], is_gated=is_gated)
    print(f"{name} {shape}: {len(timed)} of {len(configs)} run; now {now}", flush=True)
    for times, config in sorted(timed, key=lambda pair: sum(pair[0])):
        shown = "  ".join(f"{time * 1e6:6.1f}" for time in times)
        print(f"  {shown} us  {config}{'  <- now' if config == now else ''}", flush=True)


def main() -> None:
    """Sweep the dense geometry's weights."""
    parser = argparse.ArgumentParser(description="block sizes of the matrix-unit kernel")
    parser.add_argument("--rows", default="16,64")
    parser.add_argument("--only", default="gate_up,down,gdn_in,gdn_out,qkv")
    flags = parser.parse_args()
    row_counts = [int(count) for count in flags.rows.split(",")]
    wanted = flags.only.split(",")
    print(f"read {measure_ceilings().read / 1e12:.2f} TB/s; us for rows {row_counts}")
    weights = [("gated " + name, name, shape, True) for _, name, shape, _ in GATED[:1]]
    weights += [
        (name, name, shape, False)
        for geometry, name, shape, _ in WEIGHTS
        if geometry == DENSE and name not in ("gate_up", "lm_head")
    ]
    with ProcessPoolExecutor(NUM_COMPILERS, mp_context=get_context("spawn")) as pool:
        for title, name, shape, is_gated in weights:
            if name in wanted:
                sweep(pool, title, shape, row_counts, is_gated=is_gated)


if __name__ == "__main__":
    main()
