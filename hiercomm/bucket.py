"""Buckets: gradients of many parameters in one flat buffer. `plan` is pure; Bucket holds the views."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from hiercomm.comm.base import LocalBuffer

# The first bucket is small, so that communication starts soon after backward does, and a small model is cut
# into several all the same, so that it goes on during backward.
_FIRST_BYTES = 1 << 20
_BUCKETS = 8
_ALIGN = 16  # elements


@dataclass(frozen=True)
class Spec:
    """What a gradient looks like on the wire: its dtype, shape and strides (in elements)."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return int(torch.Size(self.shape).numel())

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in a bucket: every gradient starts on a cache line."""
        return -(-self.numel // _ALIGN) * _ALIGN * self.dtype.itemsize

    @staticmethod
    def of(tensor: Tensor) -> Spec:
        """The spec of a dense gradient of `tensor`: its own strides where they leave no holes."""
        shape = tuple(tensor.shape)
        meta = torch.empty_like(tensor, device="meta")  # keeps dense strides such as channels_last
        return Spec(tensor.dtype, shape, tuple(meta.stride()))


def plan(specs: Sequence[Spec], bucket_bytes: int, kinds: Sequence[Hashable] | None = None) -> list[list[int]]:
    """Which gradients share a bucket: indices of `specs`, each exactly once.

    Filled in the order given, one dtype and one of `kinds` (beside `specs`) to a bucket, up to `bucket_bytes` or an
    eighth of all, but at least 1 MB (a larger gradient has a bucket of its own); buckets are in the order in which they
    are full.
    """
    done: list[list[int]] = []
    open_: dict[Hashable, tuple[list[int], int]] = {}
    limit = min(bucket_bytes, _FIRST_BYTES)
    later = min(bucket_bytes, max(_FIRST_BYTES, sum(spec.nbytes for spec in specs) // _BUCKETS))
    for index, spec in enumerate(specs):
        key = (spec.dtype, None if kinds is None else kinds[index])
        members, nbytes = open_.pop(key, ([], 0))
        if members and nbytes + spec.nbytes > limit:
            done.append(members)
            members, nbytes, limit = [], 0, later
        open_[key] = ([*members, index], nbytes + spec.nbytes)
    done += [members for members, _ in open_.values()]
    return sorted(done, key=lambda members: members[-1])


def layout(specs: Sequence[Spec]) -> tuple[list[int], int]:
    """Offset of each gradient in its bucket and the bucket's length, in elements."""
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end += spec.nbytes // spec.dtype.itemsize
    return offsets, end


@final
class Bucket:
    """One buffer, reduced with `op` and divided by `divisor`, and views of it shaped like its gradients.

    `members` are the indices of the gradients; `views` are in the same order.
    """

    def __init__(
        self, index: int, members: Sequence[int], specs: Sequence[Spec], buffer: LocalBuffer, op: str, divisor: int
    ) -> None:
        self.index = index
        self.members = tuple(members)
        self.buffer = buffer
        self.op = op
        self.divisor = divisor
        # The same memory with a version counter of its own: counts what users do to p.grad, and not
        # what communication does to the buffer.
        self.flat = buffer.data.data
        offsets, _ = layout(specs)
        self.views = [
            self.flat.as_strided(spec.shape, spec.stride, offset + self.flat.storage_offset())
            for spec, offset in zip(specs, offsets, strict=True)
        ]
        ends = [*offsets[1:], self.flat.numel()]
        between = [buffer.data[o + s.numel : e] for o, s, e in zip(offsets, specs, ends, strict=True)] if specs else []
        self._gaps = [gap for gap in between if gap.numel()]
        self._version = -1

    def clear_padding(self) -> None:
        """Zero what lies between the gradients: a code must not depend on what earlier sums have left there."""
        for gap in self._gaps:
            gap.zero_()

    def seal(self) -> None:
        """From now on the buffer is under way."""
        self._version = self.flat._version

    def was_touched(self) -> bool:
        """Whether a gradient was changed in place since `seal`."""
        return self.flat._version != self._version
