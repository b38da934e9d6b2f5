"""`compression="auto"`: measures what codes would do to the job's own gradients, and later what the chosen one did."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, final

import torch

from hiercomm import native, reduction, runtime
from hiercomm.bucket import Bucket, Spec
from hiercomm.coded import CompressorCoding
from hiercomm.compress import Auto
from hiercomm.compress.auto import CANDIDATES, allowed, pick
from hiercomm.exchange import Coding
from hiercomm.torch.compression import NoneCompressor
from hiercomm.torch.exchanges import Exchanges

# A measured exchange has as much of the gradients as this many bytes: the rest takes as long in proportion.
_SAMPLE_BYTES = 4 << 20
# Exchanges one behind the other are measured for so long, or until so many: links that are shaped let the first
# bytes after a rest through at once.
_SECONDS, _MOST = 0.3, 20
_SKIPPED, _COUNTED = 2, 10  # steps, of which the latter are compared with what was expected


@final
class _Trial:
    """Exchanges of a bucket of its own, as in training. Made by all ranks alike; so are all calls."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        context = self._context = runtime.current()
        name = context.unnamed("auto")
        level, (buffer,) = context.allocate([(numel, dtype)], device, name)
        self._bucket = Bucket(0, [], [], buffer, reduction.SUM, 1)
        self._codings: dict[int, Coding] = {}
        self._exchanges = Exchanges(
            context.all_reduce_engine(level, context.topology), 1, 'compression="auto"', self._codings
        )
        random = torch.Generator().manual_seed(context.topology.rank)
        self._values = torch.randn(numel, generator=random).to(dtype)
        self.nbytes = buffer.data.nbytes

    def seconds(self, name: str | None) -> float:
        """Seconds of an exchange through a candidate (None: plain), of the slowest rank."""
        rank = self._context.topology.rank
        self._codings.clear()
        if name is not None:
            self._codings[0] = CompressorCoding(CANDIDATES[name], 0, rank)
        self._run(1)  # memory is touched, kernels are loaded
        one = self._run(1)
        count = min(_MOST, round(_SECONDS / one))
        return self._run(count) / count if count > 1 else one

    def _run(self, count: int) -> float:
        waited = self._context.timing.seconds("wait")
        for _ in range(count):
            self._bucket.flat.copy_(self._values)
            self._exchanges.finish(self._exchanges.start(self._bucket))
        seconds = self._context.timing.seconds("wait") - waited
        return float(max(self._context.all_gather_object(seconds, self._context.unnamed("auto"))))


@final
class Forecast:
    """What was expected of a step, compared with what some of the first steps took."""

    def __init__(self, chosen: str, expected_s: float) -> None:
        self._chosen = chosen
        self._expected_s = expected_s
        self._steps = 0
        self._begin_s = 0.0

    def step(self) -> None:
        """A step has ended; after twelve rank 0 says what they took."""
        self._steps += 1
        if self._steps not in (_SKIPPED, _SKIPPED + _COUNTED):
            return
        context = runtime.current()
        seconds = context.timing.seconds("cross")
        if self._steps == _SKIPPED:
            self._begin_s = seconds
            return
        measured_s = (seconds - self._begin_s) / _COUNTED
        if context.topology.rank == 0:
            _say(f"exchanges between the nodes took {_ms(measured_s)} ms a step, with {self._chosen}; "
                 f"{_ms(self._expected_s)} were expected")  # fmt: skip


def resolve(
    auto: Auto, parameters: Sequence[str], specs: Sequence[Spec], device: torch.device
) -> tuple[Any, Forecast | None]:  # fmt: skip
    """What `auto` stands for, for gradients of `parameters` like `specs`: a PerLayer or NoneCompressor.

    Also a Forecast, None where nothing can be compressed. Collective over all ranks.
    """
    context = runtime.current()
    which = auto.rules(CANDIDATES["int8"])  # the same gradients, whatever the candidate
    coded = [s for n, s in zip(parameters, specs, strict=True) if which.choose(n, s.shape, s.dtype) is not None]
    if len(context.topology.nodes) == 1 or not coded:
        return NoneCompressor, None
    native.backend(device)  # compiles what has to be compiled
    names = context.all_gather_object(allowed(auto), context.unnamed("auto"))[0]
    sizes = Counter[torch.dtype]()
    for spec in coded:
        sizes[spec.dtype] += spec.numel
    dtype, numel = sizes.most_common(1)[0]
    trial = _Trial(min(numel, _SAMPLE_BYTES // dtype.itemsize), dtype, device)
    plain_s, *coded_s = [trial.seconds(name) / trial.nbytes for name in (None, *names)]  # a byte
    total = sum(spec.nbytes for spec in specs)
    rest = total - sum(spec.nbytes for spec in coded)
    expected_s = {n: s * (total - rest) + plain_s * rest for n, s in zip(names, coded_s, strict=True)}
    chosen = pick(plain_s * total, expected_s)
    if context.topology.rank == 0:
        others = "".join(f", {_ms(s)} ms with {name}" for name, s in expected_s.items())
        _say(
            f"{total / 1e6:.3g} MB of gradients should take {_ms(plain_s * total)} ms a step between the nodes as they "
            f"are{others}: {chosen or 'none'} it is"
        )
    if chosen is None:
        return NoneCompressor, Forecast("none", plain_s * total)
    return auto.rules(CANDIDATES[chosen]), Forecast(chosen, expected_s[chosen])


def _say(text: str) -> None:
    print(f"hiercomm: compression=auto: {text}", file=sys.stderr, flush=True)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"
