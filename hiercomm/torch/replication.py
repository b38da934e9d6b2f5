"""The replica of a set of parameters, from what the Runtime has: buffers, rounds, waits that are counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from hiercomm import native, reduction, runtime
from hiercomm.bucket import Bucket, Spec, layout, plan
from hiercomm.coded import CompressorCoding
from hiercomm.comm.base import LocalBuffer, Work
from hiercomm.compress import Choice, PerLayer, PowerSGD
from hiercomm.compress.rules import kind
from hiercomm.errors import ConfigMismatch, UsageError
from hiercomm.replica import Crossing, Replica, Waits, shard
from hiercomm.shard import Shard


@final
class _Waits(Waits):
    """Waits of one replica, so that a job in which nobody can go on is noticed, and who is late is known."""

    def __init__(self) -> None:
        self._runtime = runtime.current()
        self._locals, self._rounds, self._flushes = (self._runtime.new_channel() for _ in range(3))

    def local(self, work: Work, what: str) -> None:
        number = self._runtime.count(self._locals)
        self._wait(work, self._locals, number, what, self._runtime.topology.local_ranks)

    def rounds(self, work: Work, what: str) -> None:
        self._wait(work, self._rounds, 0, what, None)

    def flush(self, work: Work, what: str) -> None:
        self._wait(work, self._flushes, self._runtime.count(self._flushes), what, None)

    def _wait(self, work: Work, channel: int, number: int, what: str, ranks: tuple[int, ...] | None) -> None:
        with self._runtime.timing.span("wait"):
            self._runtime.wait_counted(work, channel, number, what, ranks)


def replicate(parameters: Sequence[Tensor], names: Sequence[str], name: str, crossing: Crossing) -> Replica | None:
    """This node's replica of `parameters`, all on one device; None where there is one node. Collective over all ranks.

    `names` are the parameters', `name` is the replica's own.
    """
    context = runtime.current()
    topology = context.topology
    if len(topology.nodes) == 1 or not parameters:
        return None
    specs = [Spec.of(p) for p in parameters]
    choices = _choices(crossing.compression, names, specs)
    groups = plan(specs, context.config.bucket_bytes, [kind(choice) for choice in choices])
    sizes = [(layout([specs[i] for i in group])[1], specs[group[0]].dtype) for group in groups]
    device = parameters[0].device
    level, buffers = context.allocate([*sizes, (1, torch.uint8)], device, f"{name}.replica")
    buckets = [
        Bucket(i, group, [specs[k] for k in group], buffer, reduction.SUM, 1)
        for i, (group, buffer) in enumerate(zip(groups, buffers, strict=False))
    ]
    if any(choice is not None for choice in choices):
        native.backend(device)  # compiles what has to be compiled
    shards = [_shard(bucket.index, bucket.buffer, choices[bucket.members[0]]) for bucket in buckets]
    rounds = context.rounds(shards, topology.local_size / topology.size, crossing.lag)
    ordered = [parameters[i] for bucket in buckets for i in bucket.members]
    local = level if topology.local_size > 1 else None
    replica = Replica(topology, ordered, buckets, buffers[-1], local, rounds, _Waits(), _agree)
    context.replicas.append(replica)
    return replica


def _choices(rules: PerLayer | None, names: Sequence[str], specs: Sequence[Spec]) -> list[Choice | None]:
    if rules is None:
        return [None] * len(specs)
    rules.require_matches(names)
    return [rules.choose(name, spec.shape, spec.dtype) for name, spec in zip(names, specs, strict=True)]


def _shard(bucket: int, buffer: LocalBuffer, choice: Choice | None) -> Shard:
    topology = runtime.current().topology
    own = shard(topology, buffer.data)
    assert not isinstance(choice, PowerSGD)  # no mode lets one through
    coding = None if choice is None else CompressorCoding(choice, bucket, topology.rank)
    begin = int(own.storage_offset() - buffer.data.storage_offset())
    return Shard(own.numel(), begin, own.dtype, own.device, coding)


def _agree(digest: int) -> None:
    context = runtime.current()
    try:
        context.agree({"parameters": digest}, context.unnamed("replica"), "the model at its first step")
    except ConfigMismatch as error:
        raise UsageError(
            "ranks begin with different parameters: call hvd.broadcast_parameters(model.state_dict(), root_rank=0) "
            "before the first step"
        ) from error
