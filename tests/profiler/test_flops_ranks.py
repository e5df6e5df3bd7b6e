"""FLOPs of real jobs of two ranks: DDP and FSDP of both kinds count what the plain model costs, and train the same."""

from pathlib import Path

import msgspec
import pytest

from tests.kit.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

FLOPS = 32 * 2 * 64 * 64 * (3 * 3 - 1)
"""32 samples in two micro-batches, three layers, forward and twice that, less the first input's gradient."""


@pytest.mark.parametrize("how", ["ddp", "fsdp1", "fsdp2"])
def test_each_rank_counts_its_own_share_of_the_batch_and_trains_to_the_same_bit(tmp_path, how):
    run_ranks([Path(__file__).parent / "flops_job.py", tmp_path, how])
    for rank in range(2):
        result = msgspec.msgpack.decode((tmp_path / f"result{rank}").read_bytes())
        assert result == {"same": True, "step_flops": FLOPS, "flops_steps": 10, "flops_reason": None}
