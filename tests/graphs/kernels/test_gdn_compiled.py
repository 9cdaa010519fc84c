"""The GDN ops inside torch.compile, whose own allocations must not be poisoned."""

from __future__ import annotations

import pytest
import torch

from graphs.kernels.gdn.commit import gdn_commit
from graphs.kernels.gdn.decode import gdn_decode
from graphs.kernels.gdn.verify import gdn_verify
from tests.graphs.gdn_driver import GdnDriver, Geometry, Setup
from tests.graphs.gdn_verify_checks import check_verify_and_commit

SIZE_27B = Geometry(16, 48, 128, 128, 4)
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
def test_compiled_steps_are_those_of_the_bare_kernels(state_dtype: torch.dtype) -> None:
    """V9, V10: all three through torch.compile. Oracle: the compiled decode row by row."""
    torch._dynamo.reset()
    torch.manual_seed(11)
    setup = Setup(
        SIZE_27B,
        torch.device("cuda"),
        torch.bfloat16,
        state_dtype,
        torch.compile(gdn_decode, fullgraph=True),
        verify=torch.compile(gdn_verify, fullgraph=True),
        commit=torch.compile(gdn_commit, fullgraph=True),
    )
    check_verify_and_commit(GdnDriver(setup), [1, 3, 70], 4)
