"""GPU memory through pinned host memory, without blocking: MPI sees host memory only.

Runs on the progress thread, on a stream of its own. CPU tensors pass through untouched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from typing import final

import torch
from torch import Tensor

from hiercomm.comm.base import Done, Work

_streams: dict[torch.device, torch.cuda.Stream] = {}


@final
class _Event(Work):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def __str__(self) -> str:
        return "copy between GPU and host"


def written(tensor: Tensor) -> Work:
    """A Work that completes when what the calling thread has queued for `tensor` so far is done."""
    if tensor.device.type == "cpu":
        return Done()
    return _Event(torch.cuda.current_stream(tensor.device))


def _stream(device: torch.device) -> torch.cuda.Stream:
    return _streams.setdefault(device, torch.cuda.Stream(device))


@contextlib.contextmanager
def on_stream(tensor: Tensor) -> Iterator[None]:
    """Queue what follows on the stream of these copies; whatever wrote the tensor must have completed."""
    if tensor.device.type == "cpu":
        yield
        return
    with torch.cuda.device(tensor.device), torch.cuda.stream(_stream(tensor.device)):
        yield


def to_host(tensor: Tensor) -> Generator[Work, None, Tensor]:
    """Task: the tensor's values in host memory; whatever wrote them must have completed on the GPU."""
    if tensor.device.type == "cpu":
        return tensor
    stream = _stream(tensor.device)
    # This thread's current device would be GPU 0 for every rank of the node.
    with torch.cuda.device(tensor.device), torch.cuda.stream(stream):
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        event = _Event(stream)
    yield event
    return host


def from_host(host: Tensor, tensor: Tensor) -> Generator[Work, None, None]:
    """Task: the values of `to_host`'s result back in `tensor`."""
    if tensor.device.type == "cpu":
        return
    stream = _stream(tensor.device)
    with torch.cuda.device(tensor.device), torch.cuda.stream(stream):
        tensor.copy_(host, non_blocking=True)
        event = _Event(stream)
    yield event
