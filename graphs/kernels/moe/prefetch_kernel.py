# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""Bringing weights near before they are needed: the memory idles between dependent launches."""

import triton
import triton.language as tl

GRANULE = tl.constexpr(16)  # bytes: alignment and unit of a bulk prefetch


@triton.jit
def prefetch_slice(
    p_first, num_values, i_slice, NUM_SLICES: tl.constexpr, SIXTEENTHS: tl.constexpr
):
    """Bring the first SIXTEENTHS / 16 of slice i_slice of num_values values to the L2 cache.

    A hint that nothing waits for. It stays within the values, up to the alignment of its start.
    Returns 0, to be used in the mask of a store: torch.compile takes all arguments of a kernel
    with instructions that are not pure for written to (as it does those that make up a store's
    pointer), and pure instructions are dropped unless their result is used.
    """
    NUM_BYTES: tl.constexpr = p_first.dtype.element_ty.primitive_bitwidth // 8
    slice_values = num_values // NUM_SLICES
    num_bytes = slice_values * NUM_BYTES * SIXTEENTHS // 16 // GRANULE * GRANULE
    return tl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        setp.gt.and.s32 first, $2, 0, first;
        @first cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [(p_first + i_slice * slice_values).to(tl.int64) & -16, num_bytes],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
