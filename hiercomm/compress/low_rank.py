"""PowerSGD: gradients of matrices as products of thin ones (Vogels, Karimireddy and Jaggi, 2019, Algorithm 1).

    M <- M_node + e        P = sum M Q        P <- orthonormal columns of P        Q' = sum M^T P
    every node's result: P Q'^T        e = M - P (M^T P)^T        the next step begins with Q'

Sums over nodes are of P and Q', (n + m) r numbers in place of n m. With error feedback always. Differs from the paper:
M is a node's sum, not a worker's gradient. Knows nothing of messages: what is to be summed is yielded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from hiercomm.compress.base import Site
from hiercomm.compress.feedback import RESIDUAL
from hiercomm.errors import ConfigError

_NOTHING = 1e-5  # of a column is rounding
_BASIS = "basis"


@final
@dataclass(frozen=True)
class PowerSGD:
    """Matrices as products of rank `rank`; tensors of more dimensions as matrices of their first by all others."""

    rank: int = 4

    def __post_init__(self) -> None:
        if not (isinstance(self.rank, int) and self.rank >= 1):
            raise ConfigError(f"rank={self.rank!r} cannot be used: a whole number, 1 or more")

    def reduce(self, matrices: Sequence[Tensor], sites: Sequence[Site]) -> Iterator[Tensor]:
        """Replace each matrix (float32, in place) by what all nodes' sum is taken for.

        Yields flat tensors: each must hold the sum over the nodes, the same bits everywhere, before the next is taken.
        A matrix with NaN or inf anywhere becomes NaN everywhere, and its site forgets what it held.
        """
        bases = [self._basis(m, site) for m, site in zip(matrices, sites, strict=True)]
        for matrix, site in zip(matrices, sites, strict=True):
            if RESIDUAL in site.state:
                matrix.add_(site.state[RESIDUAL])
        left = [torch.empty(m.shape[0], q.shape[1], device=m.device) for m, q in zip(matrices, bases, strict=True)]
        right = [torch.empty_like(q) for q in bases]
        joint = _joined(left)
        for p, m, q in zip(left, matrices, bases, strict=True):
            torch.mm(m, q, out=p)
        yield joint
        for p, q, m in zip(left, right, matrices, strict=True):
            _orthonormalize(p)
            torch.mm(m.T, p, out=q)
        own = [q.clone() for q in right]
        joint = _joined(right)
        yield joint
        for p, q, mine, m, basis, site in zip(left, right, own, matrices, bases, sites, strict=True):
            if not bool(q.isfinite().all()):
                site.state.clear()
                m.fill_(torch.nan)
                continue
            site.state[RESIDUAL] = m - p @ mine.T
            site.state[_BASIS] = torch.where(q.any(0), q, basis)  # a direction that gave nothing is tried again
            torch.mm(p, q.T, out=m)

    def _basis(self, matrix: Tensor, site: Site) -> Tensor:
        if _BASIS not in site.state:
            shape = matrix.shape[1], min(self.rank, *matrix.shape)
            random = torch.Generator().manual_seed(site.seed() >> 1)
            site.state[_BASIS] = torch.randn(shape, generator=random).to(matrix.device)
        return site.state[_BASIS]


def _joined(parts: list[Tensor]) -> Tensor:
    """One flat tensor; the parts become views of it."""
    flat = torch.cat([part.reshape(-1) for part in parts])
    begin = 0
    for index, part in enumerate(parts):
        parts[index] = flat[begin : begin + part.numel()].view(part.shape)
        begin += part.numel()
    return flat


def _orthonormalize(p: Tensor) -> None:
    """Gram and Schmidt's, twice, in place: columns of length 1 at right angles, 0 where one adds nothing."""
    for i in range(p.shape[1]):
        column, done = p[:, i], p[:, :i]
        before = column.norm()
        for _ in range(2):
            column.sub_(done @ (done.T @ column))
        after = column.norm()
        column.mul_(torch.where(after > _NOTHING * before, 1.0 / after, 0.0))
