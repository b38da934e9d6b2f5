"""What a rank is told about its place."""

from __future__ import annotations

import torch

import hiercomm.torch as hvd


def test_device() -> None:
    """The CPU where there is no GPU; else the local rank's, counted round those it sees."""
    count = torch.cuda.device_count()
    assert hvd.device() == (torch.device("cuda", hvd.local_rank() % count) if count else torch.device("cpu"))
    ones = torch.ones(3, device=hvd.device())
    assert hvd.allreduce(ones).tolist() == [1.0] * 3
