"""The exchange between nodes in fewer bytes: all-reduce of a chunk through a compressor.

Where sums may be compressed again and there are N > 2 nodes, in two phases, with C the compressor:
    piece q of every node's chunk    C    to the node that owns it, which adds what is decoded to its own piece
    the owner's sum                  C    to all nodes; the owner, too, takes what is decoded
else every node sends C(chunk) to all, and all add what is decoded in node order. Either way all replicas hold the
same bits. Pieces are cut by the compressor alone, whatever the link: a resumed run compresses the same numbers.
Knows nothing of MPI.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor

from hiercomm.comm.base import Communicator, bounds, pieces
from hiercomm.comm.staging import from_host, on_stream, to_host, written
from hiercomm.compress import Compressor, ErrorFeedback, Sites
from hiercomm.compress.feedback import RESIDUAL
from hiercomm.compress.merge import ELEMENTS
from hiercomm.errors import CommError, PayloadError
from hiercomm.exchange import Chunk, Coding, all_to_all, cuts
from hiercomm.progress import Task

# Elements that are compressed at a time, multiples of the codes' blocks: the most whose payload is not too large, nor
# ends just behind a multiple of 64 KB (see allreduce.py).
_ELEMENTS = (327680, 163840, 81920, 40960, 20480)
_PAYLOAD_BYTES = 100_000


def _travels_well(nbytes: int) -> bool:
    return nbytes < 60_000 or (nbytes <= _PAYLOAD_BYTES and 8_000 < nbytes % 65_536 < 60_000)


@final
class CompressorCoding(Coding):
    """A bucket through a compressor."""

    takes_whole = False

    def __init__(self, choice: Compressor | ErrorFeedback, bucket: int, rank: int) -> None:
        self.choice = choice
        self.compressor: Compressor = choice.inner if isinstance(choice, ErrorFeedback) else choice
        self.keeps = ELEMENTS if isinstance(choice, ErrorFeedback) else ""
        self.sites = Sites(bucket, rank)

    def chunks(self, comm: Communicator, part: Tensor, begin: int, divisor: int) -> Iterator[Chunk]:
        """As many elements at a time as travel well."""
        for cut in cuts(part.numel(), self.chunk_elements(comm.size)):
            self._share_out(begin + cut.start, part[cut], comm.size)
            yield Chunk(cut, functools.partial(coded_chunk, comm, part[cut], begin + cut.start, divisor, self))

    def describe(self) -> str:
        """As one would write it, without the address of an object that has no repr of its own."""
        return re.sub(" at 0x[0-9a-f]+", "", repr(self.choice))

    def chunk_elements(self, nodes: int) -> int:
        """Elements that are exchanged at a time."""
        fitting = (n for n in _ELEMENTS if _travels_well(self.compressor.nbytes(n)))
        each = next(fitting, _ELEMENTS[-1])
        return each * nodes if self.in_two_phases(nodes) else each

    def in_two_phases(self, nodes: int) -> bool:
        """Whether sums are compressed again. Between two nodes that would save no byte, and round twice."""
        return self.compressor.recompressible and nodes > 2

    def _share_out(self, begin: int, chunk: Tensor, nodes: int) -> None:
        """As many ranks as there are nodes compress each element: this one begins with its part of what is left out."""
        if not self.sites.inherited:
            return
        whole = self.sites.inherited[0][RESIDUAL]
        numel, parts = chunk.numel(), nodes if self.in_two_phases(nodes) else 1
        for low, high in (bounds(numel, parts, q) for q in range(parts)):
            if low < high:
                left = whole[begin + low : begin + high].to(chunk.device, torch.float32)
                self.sites.at(begin + low).state[RESIDUAL] = left / nodes

    def compress(self, x: Tensor, begin: int) -> Tensor:
        """The payload of the piece that begins with element `begin` of the bucket."""
        site = self.sites.at(begin)
        payload = torch.empty(self.compressor.nbytes(x.numel()), dtype=torch.uint8, device=x.device)
        self.choice.compress(x, payload, site)
        return payload

    def take_residuals(self) -> list[tuple[int, Tensor]]:
        """What error feedback has kept back: pieces with the elements of the bucket where they begin; then it is 0."""
        found = [(begin, site.state[RESIDUAL]) for begin, site in self.sites.items() if RESIDUAL in site.state]
        self.sites.forget()
        return found


def coded_chunk(
    comm: Communicator, chunk: Tensor, begin: int, divisor: int, coding: CompressorCoding, tag: int
) -> Task:
    """Task: the mean of a chunk (divisor 1: the sum) over the nodes, the same bits on every rank.

    The chunk, of float32, fp16 or bf16, begins with element `begin` of its bucket. Raises CommError naming the rank
    (of the group) whose payload is none.
    """
    with on_stream(chunk):
        values = chunk.to(torch.float32)
        values = values.div(divisor) if divisor != 1 else values
    if coding.in_two_phases(comm.size):
        yield from _two_phases(comm, values, begin, coding, tag)
    else:
        yield from _one_phase(comm, values, begin, coding, tag)
    with on_stream(chunk):
        chunk.copy_(values)
        done = written(chunk)
    yield done


def _two_phases(comm: Communicator, values: Tensor, begin: int, coding: CompressorCoding, tag: int) -> Task:
    parts, me = pieces(values, comm.size), comm.rank
    own = parts[me]
    begins = [begin + int(part.storage_offset() - values.storage_offset()) for part in parts]
    sent = [_nothing(values)] * comm.size
    with on_stream(values):
        for q, part in enumerate(parts):
            if q != me and part.numel():
                sent[q] = coding.compress(part, begins[q])
    size = coding.compressor.nbytes(own.numel()) if own.numel() else 0
    received = yield from all_to_all_payloads(comm, sent, [size] * comm.size, tag)
    with on_stream(values):
        for q in range(comm.size):
            if q != me and own.numel():
                decode(coding, received[q], own, True, q)
        total = _nothing(values)
        if own.numel():
            total = coding.compress(own, begins[me])
            decode(coding, total, own, False, me)
    sizes = [coding.compressor.nbytes(part.numel()) if part.numel() else 0 for part in parts]
    received = yield from all_to_all_payloads(comm, [total] * comm.size, sizes, tag)
    with on_stream(values):
        for q, part in enumerate(parts):
            if q != me and part.numel():
                decode(coding, received[q], part, False, q)


def _one_phase(comm: Communicator, values: Tensor, begin: int, coding: CompressorCoding, tag: int) -> Task:
    with on_stream(values):
        payload = coding.compress(values, begin)
    received = yield from all_to_all_payloads(comm, [payload] * comm.size, [payload.numel()] * comm.size, tag)
    received[comm.rank] = payload
    with on_stream(values):
        for q, each in enumerate(received):
            decode(coding, each, values, q > 0, q)


def _nothing(like: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=like.device)


def decode(coding: CompressorCoding, payload: Tensor, out: Tensor, accumulate: bool, source: int) -> None:
    """Write or add what a payload from rank `source` stands for. Raises CommError naming it where it is none."""
    try:
        coding.compressor.decompress(payload, out, accumulate)
    except PayloadError as error:
        raise CommError(f"what rank {source} of the group sent cannot be decoded: {error}") from error


def all_to_all_payloads(comm: Communicator, sent: list[Tensor], sizes: list[int], tag: int) -> Any:
    """Task: `sent[q]` goes to rank q; returns what has come from each, on the device of what was sent."""
    hosts: dict[int, Tensor] = {}
    for each in sent:
        if id(each) not in hosts:
            hosts[id(each)] = yield from to_host(each)
    received = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    yield from all_to_all(comm, received, [hosts[id(each)] for each in sent], tag)
    if sent[0].device.type == "cpu":
        return received
    with on_stream(sent[0]):  # whose memory pool it is
        found = [torch.empty_like(each, device=sent[0].device) for each in received]
    for host, each in zip(received, found, strict=True):
        yield from from_host(host, each)
    return found
