"""The attention kernels: decode and verify over short and long contexts, prefill, preparation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.kernel_timing import MIN_BYTES_PER_REPLAY, Ceiling, KernelCase
from graphs.kernels.attention import ops

PAGE_SIZE = 64
HEAD_DIM = 256
ROTARY_DIM = 64
GEOMETRIES = {"Qwen3.6-27B": (24, 4), "Qwen3.6-35B-A3B": (16, 2)}  # query, key/value heads
DTYPE = torch.bfloat16
DTYPE_BYTES = 2
LONG_CONTEXT = 32768
SHORT_CONTEXT = 1024
STEP_TOKENS = 16384  # room of the page tables of a captured step


@dataclass(frozen=True)
class PagedInputs:
    """Rows and the contexts they attend to, in scattered pages of random tokens."""

    q: Tensor
    qkv: Tensor
    k_pool: Tensor
    v_pool: Tensor
    page_table: Tensor
    context_lens: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """In the order of the ops' arguments."""
        return self.q, self.qkv, self.k_pool, self.v_pool, self.page_table, self.context_lens


def cases() -> Iterator[KernelCase]:
    """What the bars of the kernels are about, and short contexts."""
    for geometry in GEOMETRIES:
        for batch in (1, 16, 64):
            yield decode_case(geometry, batch, SHORT_CONTEXT)
        for batch in (16, 64):
            yield decode_case(geometry, batch, SHORT_CONTEXT, table_tokens=STEP_TOKENS)
        for batch in (1, 16):
            yield decode_case(geometry, batch, LONG_CONTEXT, min_share=0.8)
        yield decode_case(geometry, 16, SHORT_CONTEXT, rows=4)
        yield prefill_case(geometry, 1, 8192)
        yield prefill_case(geometry, 64, SHORT_CONTEXT)
        for num_rows in (1, 64, 8192):
            yield prepare_case(geometry, num_rows)


def num_buffers(num_bytes: int) -> int:
    """How many sets of buffers together are read past the L2 cache."""
    return min(64, -(-MIN_BYTES_PER_REPLAY // num_bytes))


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, device="cuda")


def qkv_columns(num_q_heads: int, num_kv_heads: int) -> int:
    return 2 * (num_q_heads + num_kv_heads) * HEAD_DIM


def paged_inputs(
    geometry: str, batch: int, num_rows: int, context: int, table_tokens: int = 0
) -> PagedInputs:
    """num_rows rows of all requests together; page tables have room for table_tokens or more."""
    num_q_heads, num_kv_heads = GEOMETRIES[geometry]
    num_pages = batch * context // PAGE_SIZE
    shape = (1 + num_pages, PAGE_SIZE, num_kv_heads, HEAD_DIM)
    pages = (1 + torch.randperm(num_pages, device="cuda")).view(batch, -1)
    num_unused = max(table_tokens // PAGE_SIZE - pages.shape[1], 0)
    return PagedInputs(
        q=random(num_rows, num_q_heads, HEAD_DIM),
        qkv=random(num_rows, qkv_columns(num_q_heads, num_kv_heads)),
        k_pool=random(*shape),
        v_pool=random(*shape),
        page_table=torch.nn.functional.pad(pages, (0, num_unused)),
        context_lens=torch.full((batch,), context, device="cuda"),
    )


def decode_case(
    geometry: str,
    batch: int,
    context: int,
    rows: int = 1,
    min_share: float | None = None,
    table_tokens: int = 0,
) -> KernelCase:
    """Decode, or verify of several rows a request; keys and values are read once.

    table_tokens: what the page table has room for, where that is more than the context.
    """
    num_q_heads, num_kv_heads = GEOMETRIES[geometry]
    context_elements = 2 * batch * context * num_kv_heads * HEAD_DIM
    row_elements = 3 * batch * rows * num_q_heads * HEAD_DIM  # queries, gates, outputs
    num_bytes = DTYPE_BYTES * (context_elements + row_elements)

    def run(inputs: PagedInputs) -> Callable[[], Tensor]:
        return lambda: ops.paged_decode_attention(*inputs.tensors(), rows)

    return KernelCase(
        name="decode_attention_wide_table" if table_tokens > context else "decode_attention",
        geometry=geometry,
        dtype="bfloat16",
        batch=batch,
        rows_per_request=rows,
        context=context,
        runs=[
            run(paged_inputs(geometry, batch, batch * rows, context, table_tokens))
            for _ in range(num_buffers(num_bytes))
        ],
        ceiling=Ceiling.READ,
        num_bytes=num_bytes,
        min_share=min_share,
    )


def prefill_case(geometry: str, batch: int, context: int) -> KernelCase:
    """Whole prompts; the products of a causal triangle, and no more."""
    num_q_heads, _ = GEOMETRIES[geometry]
    inputs = paged_inputs(geometry, batch, batch * context, context)
    row_starts = torch.arange(batch + 1, device="cuda") * context
    first_rows = torch.arange(0, batch * context, ops.CHUNK, device="cuda")
    chunks = torch.stack([first_rows // context, first_rows], dim=1)
    num_scores = batch * num_q_heads * context * (context + 1) // 2
    return KernelCase(
        name="prefill_attention",
        geometry=geometry,
        dtype="bfloat16",
        batch=batch,
        rows_per_request=context,
        context=context,
        runs=[lambda: ops.paged_prefill_attention(*inputs.tensors(), row_starts, chunks)],
        ceiling=Ceiling.FLOPS,
        flops=4 * HEAD_DIM * num_scores,
    )


def prepare_case(geometry: str, num_rows: int) -> KernelCase:
    """Every row reads its queries, keys and values and writes them elsewhere."""
    num_q_heads, num_kv_heads = GEOMETRIES[geometry]
    num_bytes = 2 * DTYPE_BYTES * num_rows * (num_q_heads + 2 * num_kv_heads) * HEAD_DIM
    norm = random(HEAD_DIM)
    inv_freq = torch.rand(ROTARY_DIM // 2, device="cuda")
    positions = torch.arange(num_rows, device="cuda")

    def run() -> Callable[[], Tensor]:
        inputs = paged_inputs(geometry, 1, num_rows, max(num_rows, PAGE_SIZE))
        slots = PAGE_SIZE + torch.randperm(num_rows, device="cuda")
        return lambda: ops.prepare_qkv(
            inputs.qkv,
            norm,
            norm,
            inv_freq,
            positions,
            slots,
            inputs.k_pool,
            inputs.v_pool,
            num_q_heads,
            1e-6,
        )

    return KernelCase(
        name="prepare_qkv",
        geometry=geometry,
        dtype="bfloat16",
        batch=num_rows,
        runs=[run() for _ in range(num_buffers(num_bytes))],
        ceiling=Ceiling.COPY,
        num_bytes=num_bytes,
    )
