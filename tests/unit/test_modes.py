"""Modes by name, and what of BSP's contract needs no ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from hiercomm import modes
from hiercomm.allreduce import Exchange
from hiercomm.bucket import Bucket
from hiercomm.comm.base import Done, LocalBuffer
from hiercomm.compress import PowerSGD, Sign
from hiercomm.errors import ConfigError
from hiercomm.modes import ASSGD, BSP, Mode, parse
from hiercomm.modes.base import Context
from hiercomm.replica import Crossing
from hiercomm.rounds import Lag


@dataclasses.dataclass(kw_only=True)
class Late(BSP.__mro__[1]):  # Mode; a mode with options, as later ones have
    """Takes options of every type."""

    max_age: int = 1
    momentum: float = 0.9
    compressor: str = "none"
    drop: bool = False

    def __post_init__(self) -> None:
        if self.max_age < 0:
            raise ConfigError(f"max_age={self.max_age} cannot be used: it must not be negative")

    def attach(self, context): ...
    def on_bucket(self, bucket): ...
    def synchronize(self): ...
    def step(self, apply): ...
    def flush(self): ...
    def retire(self): ...
    def state_dict(self): ...
    def load_state_dict(self, state): ...


@pytest.fixture
def late(monkeypatch):
    monkeypatch.setitem(modes._MODES, "late", Late)


def test_parse_by_name():
    assert parse("bsp") == BSP()
    assert parse("bsp:") == BSP()
    assert isinstance(parse("bsp"), Mode)
    assert parse("bsp") is not parse("bsp")  # one object serves one optimizer


@pytest.mark.usefixtures("late")
def test_parse_options():
    assert parse("late") == Late()
    assert parse("late:max_age=8") == Late(max_age=8)
    assert parse("late:compressor=int8,drop=True,momentum=0.5,") == Late(compressor="int8", drop=True, momentum=0.5)
    assert parse("late:compressor=a=b") == Late(compressor="a=b")


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("async", "'async'"),
        ("", "''"),
        ("BSP", "'BSP'"),
        ("bsp ", "'bsp '"),
        ("bsp:max_age=1", "'max_age=1'"),
        ("bsp:fast", "'fast'"),
        ("late:max_age=1,age=2", "'age=2'"),
        ("late:max_age", "'max_age'"),
        ("late:max_age=-1", "max_age=-1"),
        ("late:=1", "'=1'"),
    ],
)
def test_parse_names_the_bad_part(text, bad):
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert bad in str(caught.value)


@pytest.mark.usefixtures("late")
def test_parse_names_what_there_is():
    with pytest.raises(ConfigError, match="known modes: as_sgd, bsp, late"):
        parse("gssp")
    with pytest.raises(ConfigError, match="its options: compressor, drop, max_age, momentum"):
        parse("late:x=1")
    with pytest.raises(ConfigError, match="its options: none"):
        parse("bsp:x=1")


def test_every_mode_says_what_it_is_and_is_a_value():
    """Its repr is compared between ranks, so it holds every option and nothing else."""
    for name, kind in modes._MODES.items():
        assert kind.__doc__
        assert (
            repr(parse(name))
            == f"{kind.__name__}({', '.join(f'{f.name}={f.default!r}' for f in dataclasses.fields(kind))})"
        )


# ---- BSP ----------------------------------------------------------------------------------------------


def attached(log: list[tuple[str, Any]]) -> BSP:
    mode = BSP()

    def start(bucket: Bucket) -> Exchange:
        log.append(("start", bucket.index))
        return Exchange(bucket.buffer, Done(), None, str(bucket.index))

    mode.attach(Context(start, lambda exchange: log.append(("finish", int(exchange.what)))))
    return mode


def buckets(count: int) -> list[Bucket]:
    return [Bucket(i, [], [], LocalBuffer(torch.zeros(0)), "Sum", 1) for i in range(count)]


def test_bsp_starts_at_once_and_finishes_in_the_order_of_the_start():
    log: list[tuple[str, Any]] = []
    mode = attached(log)
    first, second, third = buckets(3)
    mode.on_bucket(first)
    assert log == [("start", 0)]  # during backward, not at the step
    mode.on_bucket(third)
    mode.on_bucket(second)
    mode.synchronize()
    assert log[1:] == [("start", 2), ("start", 1), ("finish", 0), ("finish", 2), ("finish", 1)]


def test_bsp_synchronize_is_idempotent():
    log: list[tuple[str, Any]] = []
    mode = attached(log)
    mode.synchronize()
    assert log == []
    for _ in range(2):
        mode.on_bucket(buckets(1)[0])
        mode.synchronize()
        mode.synchronize()
        mode.flush()
    assert log == [("start", 0), ("finish", 0)] * 2


def test_bsp_forgets_what_it_could_not_finish():
    """After an error the next step begins afresh."""
    mode = BSP()

    def fail(_: Exchange) -> None:
        raise ConnectionError

    mode.attach(Context(lambda bucket: Exchange(bucket.buffer, Done(), None, ""), fail))
    mode.on_bucket(buckets(1)[0])
    with pytest.raises(ConnectionError):
        mode.synchronize()
    mode.synchronize()


def test_bsp_steps_once_and_returns_what_the_optimizer_returns():
    calls: list[int] = []
    assert attached([]).step(lambda: calls.append(1) or "loss") == "loss"
    assert calls == [1]


def test_bsp_has_no_state():
    mode = attached([])
    mode.load_state_dict(mode.state_dict())
    with pytest.raises(ValueError, match="momentum"):
        mode.load_state_dict({"momentum": 1})


# ---- AS-SGD -------------------------------------------------------------------------------------------


def test_as_sgd_by_name():
    assert parse("as_sgd") == ASSGD()
    assert parse("as_sgd:max_age=2,period=4,compression=topk:0.01,max_lag=None") == ASSGD(
        max_age=2, period=4, compression="topk:0.01"
    )


@pytest.mark.parametrize(
    ("options", "bad"),
    [
        ({"max_age": -1}, "max_age=-1"),
        ({"max_age": 1.5}, r"max_age=1\.5"),
        ({"period": 0}, "period=0"),
        ({"max_lag": -1}, "max_lag=-1"),
        ({"warmup_rounds": True}, "warmup_rounds=True"),
        ({"compression": "int9"}, "int9"),
        ({"compression": 8}, "compression=8"),
        ({"compression": PowerSGD(2)}, "PowerSGD"),
        ({"compression": Sign()}, "ErrorFeedback"),
    ],
)
def test_as_sgd_refuses(options, bad):
    with pytest.raises(ConfigError, match=bad):
        ASSGD(**options)


def test_as_sgd_alone_is_the_plain_optimizer():
    mode = ASSGD()
    assert mode.step(lambda: "loss") == "loss"
    mode.flush()
    mode.retire()
    mode.load_state_dict(mode.state_dict())
    with pytest.raises(ValueError, match="round"):
        mode.load_state_dict({"round": 1})


class Follower:
    """A replica that notes what is asked of it."""

    def __init__(self) -> None:
        self.steps, self.has_begun, self.calls = 0, False, []

    def begin(self) -> None:
        self.has_begun = True
        self.calls.append("begin")

    def exchange(self, max_age: int, period: int) -> None:
        self.calls.append((self.steps, max_age, period))


def test_as_sgd_exchanges_behind_every_period_th_step():
    replica, crossings = Follower(), []
    mode = ASSGD(max_age=5, period=3, compression="none", max_lag=2)
    mode.attach(Context(None, None, lambda crossing: crossings.append(crossing) or replica))
    assert crossings == [Crossing(None, Lag(2))]
    for _ in range(7):
        assert mode.step(lambda: replica.calls.append("apply") or "loss") == "loss"
    assert [call for call in replica.calls if call != "apply"] == ["begin", (3, 5, 3), (6, 5, 3)]
    assert replica.calls.index("begin") == 0
    assert replica.calls.count("apply") == 7


def test_as_sgd_with_age_0_waits_for_every_node():
    crossings = []
    ASSGD(max_age=0, max_lag=7).attach(Context(None, None, lambda crossing: crossings.append(crossing)))
    assert not crossings[0].lag.allows(10**9, 0, idle=True)
