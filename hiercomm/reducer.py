"""From autograd to buckets: gradients become views of flat buffers, full buckets go out in index order.

A parameter is ready when its hook has fired `passes` times; a bucket is full when all its members are
ready; it is handed over when all buckets before it have been. The last bucket holds one byte for each
parameter, whether it has a gradient, and two that say what this rank is about to do with the gradients.
Knows nothing of communication: `on_bucket` takes the buckets.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hiercomm import reduction
from hiercomm.bucket import Bucket, Spec
from hiercomm.errors import GradientOrderError, RankMismatch, UsageError


class Compression(Protocol):
    """Horovod's Compressor: static `compress` and `decompress`."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor to send, and what `decompress` needs."""

    def decompress(self, tensor: Tensor, context: Any) -> Tensor:
        """The tensor that `tensor` stands for."""


_USE, _DISCARD = -2, -1  # places of the two bytes in the last bucket


@final
class Reducer:
    """Gradients of `parameters` (names beside them). `buckets` are planned over the parameters in reverse
    order, `presence` is the last bucket (uint8, one element a parameter and two more).

    `compression` None means that gradients are views of the buckets; else they are copied in and out.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        buckets: Sequence[Bucket],
        presence: Bucket,
        on_bucket: Callable[[Bucket], None],
        passes: int,
        compression: Compression | None,
        sparse_as_dense: bool,
    ) -> None:
        self._parameters = list(parameters)
        self._names = list(names)
        self._buckets = list(buckets)
        self._presence = presence
        self._on_bucket = on_bucket
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        self._bucket_of = {i: b for b in self._buckets for i in b.members}
        self._view_of = {i: view for b in self._buckets for i, view in zip(b.members, b.views, strict=True)}
        self._contexts: dict[int, Any] = {}
        self._sparse: dict[int, int] = {}
        self.passes = passes
        self._reset()
        # Through a weak reference: a parameter holds its hooks where the garbage collector does not look.
        this = weakref.ref(self)
        hooks = [p.register_post_accumulate_grad_hook(_hook(this, i)) for i, p in enumerate(self._parameters)]
        self.close = weakref.finalize(self, _remove, hooks)

    def _reset(self) -> None:
        self.has_fired = False
        self._passes_left = [self.passes] * len(self._parameters)
        self._missing = {b.index: len(b.members) for b in self._buckets}
        self._next = 0
        # What was handed over, to notice when it is changed before its exchange has ended.
        self._sent: dict[int, tuple[Tensor | None, int]] = {}

    def set_passes(self, passes: int) -> None:
        """Backward passes per step from now on."""
        if self.has_fired:
            raise GradientOrderError("backward_passes_per_step cannot change between backward() and step()")
        self.passes = passes
        self._reset()

    def fire(self, index: int, parameter: Tensor) -> None:
        """Autograd has accumulated into the gradient of a parameter."""
        left = self._passes_left[index] - 1
        if left < 0:
            raise GradientOrderError(
                f"Gradients were computed more than backward_passes_per_step ({self.passes}) times before call to "
                f"step(), for {self._names[index]!r}. Increase backward_passes_per_step to accumulate gradients "
                "locally."
            )
        self.has_fired = True
        self._passes_left[index] = left
        with torch.no_grad():  # autograd may be recording (create_graph=True)
            if self._compression is None:
                self._adopt(index, parameter)
            if left == 0:
                self._make_ready(index)

    def _adopt(self, index: int, parameter: Tensor) -> None:
        """Have the gradient live in its bucket."""
        view, grad = self._view_of[index], parameter.grad
        if grad is view or grad is None:
            return
        if grad.layout != torch.strided:
            grad = self._dense(index, grad)
        if grad.dtype != view.dtype or grad.device != view.device or grad.shape != view.shape:
            raise UsageError(
                f"the gradient of {self._names[index]!r} is {grad.dtype}, {list(grad.shape)}, on {grad.device}, but "
                f"was {view.dtype}, {list(view.shape)}, on {view.device} when the optimizer was wrapped: convert and "
                "move the model before"
            )
        view.copy_(grad)
        parameter.grad = view

    def _dense(self, index: int, grad: Tensor) -> Tensor:
        if not self._sparse_as_dense:
            raise UsageError(
                f"parameter {self._names[index]!r} has a sparse gradient: pass sparse_as_dense=True (sparse exchange "
                "is not in this version of hiercomm yet)"
            )
        self._sparse[index] = grad.sparse_dim()
        return grad.to_dense()

    def _make_ready(self, index: int) -> None:
        if self._compression is not None:
            self._compress(index)
        grad = self._parameters[index].grad
        self._sent[index] = (grad, -1 if grad is None else grad._version)
        bucket = self._bucket_of[index]
        self._missing[bucket.index] -= 1
        while self._next < len(self._buckets) and not self._missing[self._buckets[self._next].index]:
            self._hand_over(self._buckets[self._next])
            self._next += 1

    def _compress(self, index: int) -> None:
        assert self._compression is not None
        grad = self._parameters[index].grad
        assert grad is not None
        dense = grad if grad.layout == torch.strided else self._dense(index, grad)
        code, self._contexts[index] = self._compression.compress(dense)
        view = self._view_of[index]
        if code.shape != view.shape or code.dtype != view.dtype:
            raise UsageError(
                f"the compressed gradient of {self._names[index]!r} has shape {list(code.shape)} and type "
                f"{code.dtype}, but had shape {list(view.shape)} and type {view.dtype} when the optimizer was wrapped"
            )
        view.copy_(code)

    def _hand_over(self, bucket: Bucket) -> None:
        bucket.seal()
        self._on_bucket(bucket)

    def finish(self, *, discard: bool) -> None:
        """Backward is over: hand over what is left. Parameters without a gradient count as zeros.

        `discard`: this rank will not use the result.
        """
        flags = self._presence.flat
        flags.fill_(1)
        for index, left in enumerate(self._passes_left):
            if left == 0:
                continue
            parameter = self._parameters[index]
            if parameter.grad is None:
                flags[index] = 0
                self._view_of[index].zero_()
            elif self._compression is not None:
                self._compress(index)
            else:
                self._adopt(index, parameter)
        flags[_USE], flags[_DISCARD] = int(not discard), int(discard)
        for bucket in self._buckets[self._next :]:
            self._hand_over(bucket)
        self._hand_over(self._presence)

    def publish(self, *, discard: bool) -> None:
        """The exchange is over: give every parameter its gradient, None where no rank had one.

        Raises GradientOrderError where gradients were changed while under way, RankMismatch where some ranks
        use them and others do not.
        """
        flags = self._presence.flat
        touched = [self._names[i] for i in self._sent if self._was_touched(i)]
        dropped = {i for i in self._sent if self._parameters[i].grad is None}  # by the user, since
        self._reset()
        if flags[_USE] and flags[_DISCARD]:
            raise RankMismatch(
                "some ranks take a step with these gradients while others discard them with zero_grad(): a GradScaler "
                "found inf on some ranks only, or a rank skipped its step. Call optimizer.synchronize() before "
                "scaler.unscale_(optimizer), and skip steps on all ranks or on none."
            )
        if touched and not discard:
            raise GradientOrderError(
                f"gradients (of {touched[0]!r}, for one) were changed between backward() and the end of their "
                "exchange: call optimizer.synchronize() before gradient clipping or scaler.unscale_()"
            )
        everywhere = bool(flags[:_USE].all())
        for index, parameter in enumerate(self._parameters):
            if (everywhere or flags[index]) and index not in dropped:
                parameter.grad = self._result(index, parameter)
            else:
                parameter.grad = None

    def _was_touched(self, index: int) -> bool:
        sent, version = self._sent[index]
        grad = self._parameters[index].grad
        if grad is None or sent is None:  # the user has thrown it away: nothing wrong is used
            return False
        if grad is not sent:
            return True
        return self._bucket_of[index].was_touched() if self._compression is None else grad._version != version

    def _result(self, index: int, parameter: Tensor) -> Tensor:
        result = self._view_of[index]
        if self._compression is not None:
            context = self._contexts.get(index)
            if context is None:  # this rank had no gradient to compress
                _, context = self._compression.compress(torch.zeros_like(parameter))
            decompressed = self._compression.decompress(result, context)
            result = decompressed.clone() if decompressed.data_ptr() == result.data_ptr() else decompressed
        if index in self._sparse:
            return result.to_sparse(self._sparse[index])
        return result


def _hook(reducer: weakref.ref[Reducer], index: int) -> Callable[[Tensor], None]:
    def fire(parameter: Tensor) -> None:
        alive = reducer()
        if alive is not None:
            alive.fire(index, parameter)

    return fire


def _remove(hooks: Sequence[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def presence_spec(parameters: int) -> Spec:
    """The spec of the last bucket."""
    return Spec(torch.uint8, (parameters + 2,), (1,))


PRESENCE_OP = reduction.MAX
