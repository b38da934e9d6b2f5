"""The exchange between nodes as products of thin matrices: PowerSGD on a bucket.

A matrix must not be cut, so every rank of a node works on the whole bucket, which the local level has summed, and sends
the thin factors itself: ranks of a node send the same numbers, (n + m) r in place of n m. Knows nothing of MPI.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from hiercomm import reduction
from hiercomm.allreduce import reduce_chunk
from hiercomm.bucket import Bucket
from hiercomm.comm.base import Communicator
from hiercomm.comm.staging import from_host, on_stream, to_host, written
from hiercomm.compress import PowerSGD, Sites
from hiercomm.compress.feedback import RESIDUAL
from hiercomm.compress.merge import MATRICES
from hiercomm.exchange import Chunk, Coding
from hiercomm.progress import Task


def _matrix(tensor: Tensor) -> Tensor:
    rows = tensor.shape[0] if tensor.dim() else 1
    return tensor.reshape(rows, -1).to(torch.float32, copy=True)


@final
class FactoredCoding(Coding):
    """A bucket of matrices (or tensors of more dimensions) through PowerSGD."""

    takes_whole = True
    keeps = MATRICES

    def __init__(self, choice: PowerSGD, bucket: Bucket, rank: int) -> None:
        self._choice = choice
        # With version counters of their own: the bucket counts what users do to gradients.
        self._views = [view.data for view in bucket.views]
        self.sites = Sites(bucket.index, rank)

    def chunks(self, comm: Communicator, part: Tensor, begin: int, divisor: int) -> Iterator[Chunk]:
        """The bucket as one."""
        for place, tensors in (self.sites.inherited or {}).items():
            held = {name: t.to(part.device, copy=True) for name, t in tensors.items()}
            held[RESIDUAL] /= comm.size  # a node's part of what is left out
            self.sites.at(place).state = held
        yield Chunk(slice(None), functools.partial(self._reduce, comm, divisor))

    def _reduce(self, comm: Communicator, divisor: int, tag: int) -> Task:
        flat = self._views[0]
        with on_stream(flat):
            matrices = [_matrix(view).div_(divisor) for view in self._views]
            sums = self._choice.reduce(matrices, [self.sites.at(i) for i in range(len(matrices))])
            factors = next(sums, None)
        while factors is not None:
            host = yield from to_host(factors)
            yield from reduce_chunk(comm, host, reduction.SUM, 1, tag)
            yield from from_host(host, factors)
            with on_stream(flat):
                factors = next(sums, None)
        with on_stream(flat):
            for view, matrix in zip(self._views, matrices, strict=True):
                view.copy_(matrix.view(view.shape))
            done = written(flat)
        yield done

    def describe(self) -> str:
        """As one would write it."""
        return repr(self._choice)
