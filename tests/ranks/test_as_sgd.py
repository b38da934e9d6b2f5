"""AS-SGD in training on real ranks: its limits are BSP, replicas agree after a flush, nobody waits for who computes."""

from __future__ import annotations

import dataclasses
import random
import time
from typing import Any

import pytest
import torch
from torch import nn
from training import OPTIMIZERS, assert_identical, assert_same, batch, loss_of, make_model, part, train, weights, wrap

import hiercomm
import hiercomm.torch as hvd
from hiercomm import ASSGD, runtime
from hiercomm.errors import ConfigError, ConfigMismatch, UsageError
from hiercomm.topology import Topology

LINEAR = ("sgd", "momentum", "nesterov")
STEPS = 20


def topology() -> Topology:
    return runtime.current().topology


several_nodes = pytest.mark.skipif("len(__import__('hiercomm').runtime.current().topology.nodes) == 1")


def make(mode: Any, name: str = "momentum", **arguments: Any) -> tuple[nn.Module, Any]:
    model = make_model()
    return model, wrap(model, OPTIMIZERS[name](model.parameters()), mode=mode, **arguments)


def assert_node_agrees(model: nn.Module) -> None:
    everybody = hvd.allgather_object(weights(model).numpy().tobytes())
    assert len({everybody[rank] for rank in topology().local_ranks}) == 1, "replicas of one node differ"


def joint_loss(model: nn.Module) -> float:
    with torch.no_grad():
        return sum(loss_of(model, batch(step)).item() for step in range(3))


# ---- its limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LINEAR)
def test_with_age_0_and_nothing_compressed_it_is_bsp(name: str) -> None:
    model, optimizer = make(ASSGD(max_age=0, compression="none"), name)
    train(model, optimizer, range(STEPS), part)
    reference = make_model()
    train(reference, OPTIMIZERS[name](reference.parameters()), range(STEPS), batch)
    assert_same(model, reference, 1e-5)
    hvd.flush()
    assert_same(model, reference, 1e-5)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_one_node_is_bsp_to_the_bit(name: str) -> None:
    if len(topology().nodes) > 1:
        pytest.skip("several nodes")
    model, optimizer = make(ASSGD(), name)
    train(model, optimizer, range(STEPS), part)
    other, bsp = make(hiercomm.BSP(), name)
    train(other, bsp, range(STEPS), part)
    hvd.flush()
    assert torch.equal(weights(model), weights(other))


def test_one_step_less_is_seen() -> None:
    """So that the comparisons above can fail."""
    model, optimizer = make(ASSGD(max_age=0, compression="none"))
    train(model, optimizer, range(STEPS), part)
    reference = make_model()
    train(reference, OPTIMIZERS["momentum"](reference.parameters()), range(STEPS - 1), batch)
    with pytest.raises(AssertionError, match="relative difference"):
        assert_same(model, reference, 1e-5)


# ---- training -----------------------------------------------------------------------------------------

MODES = {
    "default": ASSGD(),
    "age 1": ASSGD(max_age=1),
    "period 4": ASSGD(period=4),
    "period above age": ASSGD(period=3, max_age=1),
    "int4": ASSGD(compression="int4"),
    "top-k": ASSGD(compression="topk:0.1"),
    "per layer": ASSGD(
        compression=hiercomm.PerLayer(
            hvd.Compression.int8, min_numel=10, rules={"0.*": None, "6.*": hvd.Compression.sign}
        )
    ),
    "lag 0": ASSGD(max_lag=0),
    "warm-up": ASSGD(warmup_rounds=5),
}


@pytest.mark.parametrize("name", MODES)
def test_training(name: str) -> None:
    """Losses on the joint batches come down about as far as with BSP; after a flush replicas are equal to the bit."""
    model, optimizer = make(dataclasses.replace(MODES[name]), "sgd")  # an object serves one optimizer
    begin = joint_loss(model)
    train(model, optimizer, range(60), lambda step: part(step % 3))
    assert_node_agrees(model)
    hvd.flush()
    assert_identical(model)
    reference, plain = make(hiercomm.BSP(), "sgd")
    train(reference, plain, range(60), lambda step: part(step % 3))
    end, wanted = joint_loss(model), joint_loss(reference)
    assert end < begin - 0.5 * (begin - wanted), (begin, end, wanted)


def test_nodes_of_different_speed_and_different_numbers_of_steps() -> None:
    """Random sleeps; replicas of a node are equal at any time, all are after each flush."""
    node, jitter = topology().node, random.Random(topology().node)
    model, optimizer = make(ASSGD(max_age=2))
    begin = 0
    for _ in range(3):
        for step in range(begin, begin + 8 + 6 * node):
            time.sleep(jitter.choice((0, 0, 0.002, 0.004 * node)))
            train(model, optimizer, range(step, step + 1), part)
        begin += 8 + 6 * node
        assert_node_agrees(model)
        hvd.flush()
        assert_identical(model)
    train(model, optimizer, range(2), part)


def test_what_all_nodes_have_done_is_in_the_result() -> None:
    """SGD on constant gradients: the parameters move by the weighted mean of all nodes' steps, exactly known."""
    model = nn.Linear(300, 7)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    begin = weights(model)
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=2.0**-6), mode=ASSGD(max_age=3))
    steps = [10 + 7 * node for node in range(len(topology().nodes))]
    for _ in range(steps[topology().node]):
        optimizer.zero_grad()
        sum((1 + hvd.rank()) * p.sum() for p in model.parameters()).backward()
        optimizer.step()
    hvd.flush()
    assert_identical(model)
    moved = sum(
        2.0**-6 * steps[n] * sum(1 + rank for rank in ranks) / hvd.size() for n, ranks in enumerate(topology().nodes)
    )
    torch.testing.assert_close(begin - weights(model), torch.full_like(begin, moved), rtol=1e-4, atol=1e-4)


@several_nodes
@pytest.mark.parametrize("max_lag", [None, 0])
def test_a_node_that_waits_for_something_else_holds_nobody_up(max_lag: int | None) -> None:
    """The others go on only when node 0 has taken all its steps, each of which is in a round one step later."""
    model, optimizer = make(ASSGD(max_age=1, max_lag=max_lag))
    train(model, optimizer, range(3), part)
    if topology().node == 0:
        train(model, optimizer, range(3, 40), part)
    assert hvd.broadcast(torch.tensor([float(hvd.rank())]), root_rank=0).item() == 0.0
    if topology().node != 0:
        train(model, optimizer, range(3, 10), part)
    hvd.flush()
    assert_identical(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_models_of_other_types(dtype: torch.dtype) -> None:
    model = nn.Linear(64, 32).to(dtype)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.01), mode=ASSGD(max_age=1))
    for step in range(10):
        torch.manual_seed(100 * step + hvd.rank())
        optimizer.zero_grad()
        model(torch.randn(8, 64, dtype=dtype)).float().square().mean().backward()
        optimizer.step()
    hvd.flush()
    assert len(set(hvd.allgather_object(weights(model).view(torch.uint8).numpy().tobytes()))) == 1


def test_several_groups_and_a_part_that_is_unfrozen_later() -> None:
    model = make_model()
    for p in model[4].parameters():
        p.requires_grad_(False)
    groups = [
        {"params": model[0].parameters(), "lr": 0.1},
        {"params": [*model[4].parameters(), *model[6].parameters()]},
    ]
    optimizer = wrap(model, torch.optim.SGD(groups, lr=0.05, momentum=0.9), mode=ASSGD(max_age=1))
    train(model, optimizer, range(5), part)
    frozen = model[4].weight.detach().clone()
    for p in model[4].parameters():
        p.requires_grad_(True)
    train(model, optimizer, range(5, 12), part)
    hvd.flush()
    assert_identical(model)
    assert not torch.equal(frozen, model[4].weight)


def test_wrapped_again_the_parameters_are_the_new_ones_alone() -> None:
    model, optimizer = make(ASSGD(max_age=1))
    train(model, optimizer, range(5), part)
    again = wrap(model, OPTIMIZERS["sgd"](model.parameters()), mode=ASSGD(max_age=1))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    train(model, again, range(5), part)
    hvd.flush()
    assert_identical(model)


# ---- the user's side ----------------------------------------------------------------------------------


def test_by_the_environment_and_shutdown_flushes() -> None:
    hvd.shutdown()
    hvd.init(mode="as_sgd:max_age=2,compression=int4")
    try:
        model = make_model()
        optimizer = wrap(model, OPTIMIZERS["sgd"](model.parameters()))
        assert optimizer._hiercomm.mode == ASSGD(max_age=2, compression="int4")
        train(model, optimizer, range(6 + 3 * topology().node), part)
    finally:
        hvd.shutdown()
        hvd.init()
    assert_identical(model)


@several_nodes
def test_different_models_at_the_first_step_are_an_error() -> None:
    model = make_model(seed=hvd.rank())
    optimizer = wrap(model, OPTIMIZERS["sgd"](model.parameters()), mode=ASSGD())
    loss_of(model, part(0)).backward()
    with pytest.raises(UsageError, match=r"broadcast_parameters"):
        optimizer.step()


def test_what_cannot_be_used_is_an_error() -> None:
    model = make_model()
    plain = OPTIMIZERS["sgd"](model.parameters())
    with pytest.raises(ConfigError, match="op=Sum cannot be used with ASSGD"):
        wrap(model, plain, mode=ASSGD(), op=hvd.Sum)
    with pytest.raises(ConfigError, match=r"say ASSGD\(compression="):
        wrap(model, plain, mode=ASSGD(), compression=hvd.Compression.int8)
    if hvd.size() > 1:
        with pytest.raises(ConfigMismatch, match="mode"):
            wrap(model, plain, mode=ASSGD(max_age=hvd.rank()))
    optimizer = wrap(model, plain, mode=ASSGD())
    with pytest.raises(UsageError, match="closure"):
        optimizer.step(lambda: loss_of(model, part(0)))
