"""DistributedOptimizer on real ranks: many ranks on parts of a batch equal one process on the whole."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training import (
    OPTIMIZERS,
    assert_identical,
    assert_same,
    batch,
    loss_of,
    make_model,
    part,
    train,
    weights,
    wrap,
)

import hiercomm.torch as hvd
from hiercomm.errors import ConfigMismatch
from hiercomm.modes import BSP

several = pytest.mark.skipif("hvd.size() == 1", reason="one rank exchanges nothing")


def pair(name: str = "momentum", **arguments: Any) -> tuple[nn.Module, Any, nn.Module, torch.optim.Optimizer]:
    """A wrapped optimizer with its model, and the plain reference."""
    model, reference = make_model(), make_model()
    return (
        model,
        wrap(model, OPTIMIZERS[name](model.parameters()), **arguments),
        reference,
        OPTIMIZERS[name](reference.parameters()),
    )


@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_equals_one_process_on_the_joint_batch(name: str, set_to_none: bool) -> None:
    model, optimizer, reference, plain = pair(name)
    for step in range(20):
        for m, o, data in ((model, optimizer, part), (reference, plain, batch)):
            o.zero_grad(set_to_none=set_to_none)
            loss_of(m, data(step)).backward()
            o.step()
    assert_same(model, reference)


def test_small_buckets_change_nothing() -> None:
    model, optimizer, *_ = pair()
    train(model, optimizer, range(10), part)
    hvd.shutdown()
    hvd.init(bucket_bytes=100)
    small, other, *_ = pair()
    train(small, other, range(10), part)
    hvd.shutdown()
    hvd.init()
    assert torch.equal(weights(small), weights(model))


def test_clipping_with_synchronize_reduces_once() -> None:
    for skip in (True, False):
        model, optimizer, reference, plain = pair()
        exchanges = count_exchanges(optimizer)
        for step in range(20):
            optimizer.zero_grad()
            loss_of(model, part(step)).backward()
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if skip:
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
            plain.zero_grad()
            loss_of(reference, batch(step)).backward()
            nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            plain.step()
        assert_same(model, reference)
        # One bucket of gradients and one of presence bytes a step.
        assert len(exchanges) == (40 if hvd.size() > 1 else 0)


def count_exchanges(optimizer: Any) -> list[int]:
    """A list that grows with every bucket that the mode is given."""
    seen: list[int] = []
    if hvd.size() > 1:
        reducer = optimizer._hiercomm._parts[0].reducer
        inner = reducer._on_bucket
        reducer._on_bucket = lambda bucket: (seen.append(bucket.index), inner(bucket))[1]
    return seen


@several
def test_clipping_without_synchronize_is_an_error_and_not_a_wrong_step() -> None:
    model, optimizer, *_ = pair()
    loss_of(model, part(0)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(AssertionError, match=r"optimizer\.synchronize\(\) before gradient clipping"):
        optimizer.step()


@several
@pytest.mark.parametrize("how", ["in place, compressed", "replaced", "replaced, compressed"])
def test_every_change_of_a_gradient_under_way_is_noticed(how: str) -> None:
    compression = hvd.Compression.fp16 if "compressed" in how else hvd.Compression.none
    model, optimizer, *_ = pair(compression=compression)
    before = weights(model).clone()
    loss_of(model, part(0)).backward()
    for p in model.parameters():
        assert p.grad is not None
        if "replaced" in how:
            p.grad = p.grad * 0.5
        else:
            p.grad.mul_(0.5)
    with pytest.raises(AssertionError, match="were changed between backward"):
        optimizer.step()
    assert torch.equal(weights(model), before)


def test_a_gradient_that_is_thrown_away_stays_away() -> None:
    model, optimizer, reference, plain = pair()
    for m, o, data in ((model, optimizer, part), (reference, plain, batch)):
        loss_of(m, data(0)).backward()
        m[4].weight.grad = None
        o.step()
        assert m[4].weight.grad is None
    assert_same(model, reference)


@pytest.mark.parametrize("passes", [2, 3])
def test_accumulation(passes: int) -> None:
    model, optimizer, reference, plain = pair("nesterov", backward_passes_per_step=passes)
    exchanges = count_exchanges(optimizer)
    for step in range(8):
        for m, o, data in ((model, optimizer, part), (reference, plain, batch)):
            o.zero_grad()
            for i in range(passes):
                (loss_of(m, data(step * passes + i)) / passes).backward()
            o.step()
    assert_same(model, reference)
    assert len(exchanges) == (16 if hvd.size() > 1 else 0)
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(1)
    assert optimizer.backward_passes_per_step == 1
    train(model, optimizer, range(3), part)
    train(reference, plain, range(3), batch)
    assert_same(model, reference)


def test_step_before_the_last_pass_uses_what_is_there() -> None:
    model, optimizer, reference, plain = pair("sgd", backward_passes_per_step=3)
    for m, o, data in ((model, optimizer, part), (reference, plain, batch)):
        loss_of(m, data(0)).backward()
        o.step()
    assert_same(model, reference)


@several
def test_one_backward_too_many_is_an_error() -> None:
    model, optimizer, *_ = pair()
    loss_of(model, part(0)).backward()
    with pytest.raises(AssertionError, match="more than backward_passes_per_step"):
        loss_of(model, part(1)).backward()
    optimizer.zero_grad()
    train(model, optimizer, range(2), part)
    assert_identical(model)


# ---- mixed precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize("idiom", ["plain", "unscale"])
def test_grad_scaler_equals_one_process(idiom: str) -> None:
    model, optimizer, reference, plain = pair("nesterov")
    for m, o, data in ((model, optimizer, part), (reference, plain, batch)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(20):
            o.zero_grad()
            scaler.scale(loss_of(m, data(step))).backward()
            if idiom == "unscale":
                if o is optimizer:
                    o.synchronize()
                scaler.unscale_(o)
                nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            scaler.step(o)
            scaler.update()
    assert_same(model, reference)


@pytest.mark.parametrize("idiom", ["plain", "unscale"])
def test_inf_on_one_rank_skips_the_step_everywhere(idiom: str) -> None:
    model, optimizer, *_ = pair("adam")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = weights(model).clone()
    images, labels = part(0)
    if hvd.rank() == hvd.size() - 1:
        images = images * float("inf")
    optimizer.zero_grad()
    scaler.scale(loss_of(model, (images, labels))).backward()
    if idiom == "unscale":
        optimizer.synchronize()
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weights(model), before)
    assert scaler.get_scale() == 512.0
    optimizer.zero_grad()
    scaler.scale(loss_of(model, part(1))).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(weights(model), before)
    assert torch.isfinite(weights(model)).all()
    assert_identical(model)


# ---- parameters of all kinds ----------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.a, self.b, self.never = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
        return getattr(self, branch)(torch.tanh(self.shared(x))).sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("passes", [1, 2])
def test_branches_that_differ_between_ranks(passes: int) -> None:
    torch.manual_seed(0)
    model = Branches()
    reference = copy.deepcopy(model)
    make = OPTIMIZERS["momentum"]  # with weight decay: it must not touch what nobody used
    optimizer, plain = (
        wrap(model, make(model.parameters()), backward_passes_per_step=passes),
        make(reference.parameters()),
    )
    for step in range(6):
        x = [torch.randn(3, 4, generator=torch.Generator().manual_seed(step * 9 + r)) for r in range(hvd.size())]
        optimizer.zero_grad()
        plain.zero_grad()
        for i in range(passes):
            model(x[hvd.rank()], "ab"[(hvd.rank() + step + i) % 2]).backward()
            total = sum(reference(x[r], "ab"[(r + step + i) % 2]) for r in range(hvd.size())) / hvd.size()
            total.backward()  # type: ignore[union-attr]
        optimizer.step()
        plain.step()
    assert_same(model, reference)
    assert model.never.weight.grad is None
    assert torch.equal(model.never.weight, reference.never.weight)


def test_a_rank_without_any_gradient_takes_part() -> None:
    model, optimizer, reference, plain = pair("sgd")
    if hvd.rank() == 0:
        loss_of(model, batch(0)).backward()
    optimizer.step()
    (loss_of(reference, batch(0)) / hvd.size()).backward()
    plain.step()
    assert_same(model, reference)


def test_tied_weights_groups_and_names() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
        model[2].weight = model[0].weight
        groups = [
            {"params": [model[0].weight, model[0].bias], "lr": 0.1},
            {"params": [model[2].bias, *model[4].parameters()], "lr": 0.02, "weight_decay": 0.1},
        ]
        return model, torch.optim.SGD(groups, lr=0.5, momentum=0.5)

    for named in (None, "partial", "all"):
        model, optimizer = make()
        reference, plain = make()
        names = {None: None, "partial": [("first", model[0].weight)], "all": model.named_parameters()}[named]
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=names)
        for step in range(8):
            x = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))
            for m, o, data in ((model, optimizer, x[hvd.rank() :: hvd.size()]), (reference, plain, x)):
                o.zero_grad()
                m(data).square().mean().backward()
                o.step()
        assert_same(model, reference)


def test_order_of_parameters_may_differ_between_ranks() -> None:
    """As where an optimizer is given a set; names tell which is which."""
    model, reference = make_model(), make_model()
    parameters = list(model.parameters())
    order = parameters if hvd.rank() % 2 == 0 else parameters[::-1]
    train(model, optimizer := wrap(model, torch.optim.SGD(order, lr=0.1, momentum=0.9)), range(3), part)
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9), range(3), batch)
    assert_same(model, reference)
    del optimizer


def test_a_recorded_backward() -> None:
    model, optimizer, reference, plain = pair("sgd")
    for m, o, data in ((model, optimizer, part), (reference, plain, batch)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a reference cycle
            loss_of(m, data(0)).backward(create_graph=True)
        o.step()
        o.zero_grad()
    assert_same(model, reference)


@several
def test_a_model_converted_after_the_wrap_is_an_error_that_names_it() -> None:
    model, optimizer, *_ = pair()
    model.double()
    images, labels = part(0)
    with pytest.raises(RuntimeError, match=r"gradient of '6\.bias' is torch\.float64.*convert and"):
        loss_of(model, (images.double(), labels)).backward()
    del optimizer


def test_frozen_unfrozen_and_added_parameters_are_reduced() -> None:
    model, reference = make_model(), make_model()
    extra, reference_extra = (nn.Parameter(torch.ones(5)) for _ in range(2))
    for m in (model, reference):
        m[0].requires_grad_(False)
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)

    def steps(count: range) -> None:
        for step in count:
            for m, o, e, data in ((model, optimizer, extra, part), (reference, plain, reference_extra, batch)):
                o.zero_grad()
                images, labels = data(step)
                nn.functional.cross_entropy(m(images) * e, labels).backward()
                o.step()

    steps(range(3))
    for m in (model, reference):
        m[0].requires_grad_(True)  # unfrozen after the wrap
        m[4].requires_grad_(False)  # and another one frozen
    steps(range(3, 6))
    optimizer.add_param_group({"params": [extra], "lr": 0.05})
    plain.add_param_group({"params": [reference_extra], "lr": 0.05})
    steps(range(6, 9))
    assert_same(model, reference)
    assert torch.allclose(extra, reference_extra, atol=1e-6)


def test_channels_last_half_double_and_empty_parameters() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 3))
        model = model.to(memory_format=torch.channels_last)
        model[3] = model[3].double()
        model.empty = nn.Parameter(torch.empty(0, 4))
        model.scalar = nn.Parameter(torch.tensor(1.0))
        model.bf16 = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        return model

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = model[1](model[0](x)) * model.scalar
        out = model[3](hidden.flatten(1).double()) * model.bf16.double() + model.empty.sum()
        return out.square().mean()  # type: ignore[no-any-return]

    model, reference = make(), make()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.05))
    plain = torch.optim.SGD(reference.parameters(), lr=0.05)
    for step in range(5):
        x = torch.randn(12, 3, 8, 8, generator=torch.Generator().manual_seed(step)).to(
            memory_format=torch.channels_last
        )
        for m, o, data in ((model, optimizer, x[hvd.rank() :: hvd.size()]), (reference, plain, x)):
            o.zero_grad()
            loss(m, data).backward()
            o.step()
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    for mine, expected in zip(model.parameters(), reference.parameters(), strict=True):
        tolerance = 2e-2 if mine.dtype == torch.bfloat16 else 1e-6
        assert torch.allclose(mine, expected, atol=tolerance, rtol=tolerance)
    assert_identical(model)


@pytest.mark.parametrize("compression", ["fp16", "bf16", "own"])
def test_compression(compression: str) -> None:
    class Own(hvd.Compression.none):  # type: ignore[misc, name-defined]
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
            return tensor.double().reshape(-1), tensor.shape

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
            return tensor.float().reshape(ctx)

    chosen = Own if compression == "own" else getattr(hvd.Compression, compression)
    model, optimizer, reference, plain = pair("sgd", compression=chosen)
    for step in range(5):
        for m, o, data in ((model, optimizer, part), (reference, plain, batch)):
            o.zero_grad()
            loss_of(m, data(step)).backward()
            o.step()
    if hvd.size() > 1:
        assert torch.allclose(weights(model), weights(reference), atol=1e-6 if compression == "own" else 1e-2)
    assert_identical(model)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_sparse_gradients() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(8, 2))

    model, reference = make(), make()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), sparse_as_dense=True)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(4):
        x = torch.randint(0, 10, (12, 2), generator=torch.Generator().manual_seed(step))
        for m, o, data in ((model, optimizer, x[hvd.rank() :: hvd.size()]), (reference, plain, x)):
            o.zero_grad()
            m(data).square().mean().backward()
            o.step()
    assert_same(model, reference)
    if hvd.size() > 1:
        refused = wrap(other := make(), torch.optim.SGD(other.parameters(), lr=0.1))
        with pytest.raises(RuntimeError, match=r"'0\.weight' has a sparse gradient: pass sparse_as_dense=True"):
            other(torch.tensor([[1, 2]])).sum().backward()
        del refused


# ---- the object stays what it was -----------------------------------------------------------------------


def test_state_hooks_options_and_class_stay() -> None:
    model = make_model()
    plain = torch.optim.Adam(model.parameters(), lr=0.123, amsgrad=True)
    train(model, plain, range(2), batch)
    state, calls = plain.state, []
    plain.register_step_pre_hook(lambda *_: calls.append("pre"))
    plain.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer = wrap(model, plain)
    assert optimizer is plain
    assert isinstance(optimizer, torch.optim.Adam)
    assert type(optimizer).__name__ == "Adam"
    assert "hiercomm" in str(type(optimizer))
    assert optimizer.state is state
    assert len(state) == 6
    assert optimizer.defaults["lr"] == 0.123
    for _ in range(2):
        calls.clear()
        train(model, optimizer, range(1), part)
        assert calls == ["pre", "post"]
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    copied = pickle.loads(pickle.dumps(optimizer))
    assert type(copied) is torch.optim.Adam
    assert copied.param_groups[0]["lr"] == 0.123
    with pytest.raises(RuntimeError, match="already"):
        hvd.DistributedOptimizer(optimizer)


class Custom(torch.optim.Optimizer):
    """With a required argument that is not among the defaults."""

    def __init__(self, params: Any, required: str, lr: float) -> None:
        self.required = required
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None, scale: float = 1.0) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign(), alpha=group["lr"] * scale)

    def zero_grad(self) -> None:
        super().zero_grad()


def test_custom_optimizer() -> None:
    model, reference = make_model(), make_model()
    optimizer = wrap(model, Custom(model.parameters(), "needed", lr=0.01))
    assert optimizer.required == "needed"
    plain = Custom(reference.parameters(), "needed", lr=0.01)
    train(model, optimizer, range(3), part)
    train(reference, plain, range(3), batch)
    for m, o, data in ((model, optimizer, part), (reference, plain, batch)):
        o.zero_grad()
        loss_of(m, data(3)).backward()
        o.step(scale=0.5)
    assert_same(model, reference)


@pytest.mark.parametrize("when", ["before", "after"])
def test_schedulers_made_before_or_after_the_wrap(when: str) -> None:
    model, reference = make_model(), make_model()
    inner, plain = (OPTIMIZERS["momentum"](m.parameters()) for m in (model, reference))
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 2, 0.5) if when == "before" else None
    optimizer = wrap(model, inner)
    scheduler = scheduler or torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    expected = torch.optim.lr_scheduler.StepLR(plain, 2, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(6):
            train(model, optimizer, range(step, step + 1), part)
            train(reference, plain, range(step, step + 1), batch)
            scheduler.step()
            expected.step()
    assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"] == pytest.approx(0.05 / 8)
    assert_same(model, reference)


@pytest.mark.parametrize("kind", ["tensor", "number"])
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_closures_and_lbfgs(search: str | None, kind: str) -> None:
    # In double precision: a line search turns a difference in rounding into another path.
    model, reference = make_model().double(), make_model().double()
    for m, data, distributed in ((model, part, True), (reference, batch, False)):
        optimizer: Any = torch.optim.LBFGS(m.parameters(), lr=0.3, max_iter=4, line_search_fn=search)
        if distributed:
            optimizer = wrap(m, optimizer)
        for step in range(2):

            def closure(m: Any = m, o: Any = optimizer, data: Any = data, step: int = step) -> Any:
                o.zero_grad()
                images, labels = data(step)
                loss = loss_of(m, (images.double(), labels))
                loss.backward()
                return loss if kind == "tensor" else loss.item()

            optimizer.step(closure)
    assert_same(model, reference)


def test_wrapping_the_same_parameters_again_retires_the_first() -> None:
    """As in training by stages, where the old optimizer may still be held by its scheduler."""
    model, reference = make_model(), make_model()
    first = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(first, 1)
    train(model, first, range(2), part)
    second = wrap(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    train(model, second, range(2, 5), part)
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1), range(2), batch)
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9), range(2, 5), batch)
    assert_same(model, reference)
    if hvd.size() > 1:
        with pytest.raises(RuntimeError, match="were wrapped in another DistributedOptimizer later"):
            first.step()
    del scheduler


def test_two_optimizers_one_backward() -> None:
    """As in a GAN: the generator's backward passes through the discriminator."""
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(4, 4), nn.Linear(4, 1)
    expected = copy.deepcopy((generator, discriminator))
    mine = [wrap(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in (generator, discriminator)]
    plain = [torch.optim.SGD(m.parameters(), lr=0.1) for m in expected]
    for step in range(5):
        x = torch.randn(12, 4, generator=torch.Generator().manual_seed(step))
        for (g, d), (og, od), data in (
            ((generator, discriminator), mine, x[hvd.rank() :: hvd.size()]),
            (expected, plain, x),
        ):
            od.zero_grad()
            (d(g(data).detach()).square().mean() + d(data).mean()).backward()
            od.step()
            og.zero_grad()
            d(g(data)).mean().backward()
            og.step()
    assert_same(generator, expected[0])
    assert_same(discriminator, expected[1])


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product], ids=lambda op: op.name)
def test_ops(op: int) -> None:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), op=op)
    (parameter * float(hvd.rank() + 1)).sum().backward()
    optimizer.synchronize()
    values = torch.arange(1.0, hvd.size() + 1)
    expected = {hvd.Sum: values.sum(), hvd.Average: values.mean(), hvd.Min: values.min(), hvd.Max: values.max(),
                hvd.Product: values.prod()}[op]  # fmt: skip
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [expected] * 3


def test_synchronize_is_idempotent_and_gradients_are_the_mean() -> None:
    model, optimizer, reference, plain = pair()
    loss_of(model, part(0)).backward()
    optimizer.synchronize()
    first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.synchronize()
    assert all(torch.equal(a, p.grad) for a, p in zip(first, model.parameters(), strict=True) if p.grad is not None)
    loss_of(reference, batch(0)).backward()
    plain.step()
    optimizer.step()
    assert_same(model, reference)


def test_wrapped_optimizers_free_their_memory() -> None:
    """Buckets in shared memory go with the optimizer."""

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("/dev/shm/hiercomm")

    before = mapped()
    for _ in range(3):
        model, optimizer, *_ = pair()
        train(model, optimizer, range(2), part)
        del model, optimizer  # without help of the garbage collector
    hvd.barrier()
    assert mapped() <= before


# ---- what cannot work says so, on every rank --------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backward_passes_per_step": 0}, "backward_passes_per_step must be > 0"),
        ({"op": 9}, "op=9"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "not supported with op != Average"),
        ({"groups": "x"}, "non-negative integer or a list of list"),
        ({"groups": [[3]]}, r"must consist of torch\.Tensor"),
        ({"named_parameters": ["a"]}, "sequence of tuples"),
        ({"named_parameters": [("a", torch.ones(1)), ("a", torch.ones(1))]}, "unique. Found duplicates: a"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hvd.DistributedOptimizer(torch.optim.SGD(make_model().parameters(), lr=0.1), **arguments)


def test_harmless_arguments() -> None:
    model, reference = make_model(), make_model()
    parameters = list(model.parameters())
    optimizer = wrap(model, OPTIMIZERS["sgd"](parameters), gradient_predivide_factor=2.0, groups=[parameters[:2]])
    train(model, optimizer, range(2), part)
    train(reference, OPTIMIZERS["sgd"](reference.parameters()), range(2), batch)
    assert_same(model, reference)
    wrap(model, torch.optim.SGD(parameters, lr=0.1), num_groups=2)
    wrap(model, torch.optim.SGD(parameters, lr=0.1), groups=0, mode=BSP())


@several
def test_parameters_on_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"parameter 'bias' is on meta: move the model to the CPU or a GPU first"):
        wrap(model := nn.Linear(2, 2, device="meta"), torch.optim.SGD(model.parameters(), lr=0.1))
    model = nn.Linear(2, 2)
    model.bias = nn.Parameter(torch.empty(2, device="meta"))
    with pytest.raises(ValueError, match=r"is on (meta|cpu)"):
        wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))


@several
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda last: ({}, nn.Linear(3, 4 if last else 2)), "parameter 'weight'"),
        (lambda last: ({}, nn.Linear(3, 2).double() if last else nn.Linear(3, 2)), r"parameter 'weight'.*float64"),
        (lambda last: ({}, nn.Linear(3, 2, bias=not last)), "number of parameters: 2 on rank 0.*, 1 on rank"),
        (lambda last: ({"backward_passes_per_step": 2 if last else 1}, nn.Linear(3, 2)), "backward_passes_per_step"),
        (lambda last: ({"op": hvd.Sum if last else hvd.Average}, nn.Linear(3, 2)), "in op"),
        (lambda last: ({"compression": hvd.Compression.fp16 if last else hvd.Compression.none}, nn.Linear(3, 2)),
         "compression: 'NoneCompressor' on rank 0.*'FP16Compressor'"),
    ],
)  # fmt: skip
def test_ranks_that_wrap_differently_are_told_how(make: Any, message: str) -> None:
    arguments, model = make(hvd.rank() == hvd.size() - 1)
    with pytest.raises(ConfigMismatch, match=message) as caught:
        wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), **arguments)
    assert f"on rank {hvd.size() - 1}" in str(caught.value)
    assert hvd.allreduce(torch.ones(1)).item() == 1.0


@several
def test_a_step_on_some_ranks_only_is_an_error_instead_of_a_hang() -> None:
    model, optimizer, *_ = pair()
    loss_of(model, part(0)).backward()
    if hvd.rank() == 0:
        with pytest.raises(hvd.HorovodInternalError, match="no rank can go on"):
            hvd.barrier()
    else:
        with pytest.raises(hvd.HorovodInternalError, match="no rank can go on: rank 0 waits in barrier"):
            optimizer.step()
        # Its exchanges are out of step with those of rank 0 from here on.
        with pytest.raises(RuntimeError, match=r"cannot exchange gradients any more.*wrap it again"):
            optimizer.step()


@several
def test_discarding_on_some_ranks_only_is_an_error_on_all() -> None:
    model, optimizer, *_ = pair()
    loss_of(model, part(0)).backward()
    mine = optimizer.zero_grad if hvd.rank() == 0 else optimizer.step
    with pytest.raises(hvd.HorovodInternalError, match="while others discard them"):
        mine()
