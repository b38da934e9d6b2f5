"""Eager operations on real ranks: right results for every dtype and layout, or an error on every rank."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import hiercomm.torch as hvd

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
OPS = {hvd.Sum: torch.sum, hvd.Min: torch.amin, hvd.Max: torch.amax, hvd.Product: torch.prod}


def everyone(make: object) -> list[torch.Tensor]:
    """What each rank contributes."""
    return [make(rank) for rank in range(hvd.size())]  # type: ignore[operator]


def identical(tensor: torch.Tensor) -> bool:
    """Whether all ranks hold the same bits."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return len(set(hvd.allgather_object(data))) == 1


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
@pytest.mark.parametrize("op", list(OPS), ids=lambda op: op.name)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (7,), (3, 5), (2, 0, 3), (70001,)], ids=str)
def test_allreduce(dtype: torch.dtype, op: int, shape: tuple[int, ...]) -> None:
    def make(rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rank)
        return torch.randint(1, 4, shape, generator=generator).to(dtype)

    expected = OPS[op](torch.stack(everyone(make)), dim=0).to(dtype)
    mine = make(hvd.rank())
    result = hvd.allreduce(mine, op=op)
    assert result.dtype == dtype
    assert result.shape == mine.shape
    assert torch.equal(result, expected)
    assert torch.equal(mine, make(hvd.rank())), "the input must not change"
    hvd.allreduce_(mine, op=op)
    assert torch.equal(mine, expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_average_is_the_mean_over_ranks_and_the_same_bits_everywhere(dtype: torch.dtype) -> None:
    def make(rank: int) -> torch.Tensor:
        return torch.randn(1001, generator=torch.Generator().manual_seed(rank)).to(dtype)

    result = hvd.allreduce(make(hvd.rank()))
    expected = torch.stack(everyone(make)).double().mean(0)
    # Halves are rounded once inside a node and once between nodes.
    tolerance = 1e-6 if dtype.itemsize >= 4 else 2 * torch.finfo(dtype).eps
    assert torch.allclose(result.double(), expected, rtol=tolerance, atol=tolerance)
    assert identical(result)


def test_average_of_fp16_does_not_overflow() -> None:
    assert hvd.allreduce(torch.full((5,), 60000.0, dtype=torch.float16)).tolist() == [60000.0] * 5


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.bool], ids=str)
def test_average_of_integers_is_refused_in_a_sentence(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"(would be rounded|is not defined).*Sum"):
        hvd.allreduce(torch.ones(3).to(dtype))
    with pytest.raises(ValueError, match="is not defined" if dtype == torch.bool else "rounded"):
        hvd.allreduce_async_(torch.ones(3).to(dtype))


def test_bool_and_complex() -> None:
    mine = torch.tensor([True, hvd.rank() == 0, False])
    assert hvd.allreduce(mine, op=hvd.Max).tolist() == [True, True, False]
    assert hvd.allreduce(mine, op=hvd.Min).tolist() == [True, hvd.size() == 1, False]
    with pytest.raises(ValueError, match="Sum of bool"):
        hvd.allreduce(mine, op=hvd.Sum)
    value = torch.tensor([1 + 2j, 3j])
    assert torch.equal(hvd.allreduce(value, op=hvd.Sum), value * hvd.size())
    with pytest.raises(ValueError, match="no order"):
        hvd.allreduce(value, op=hvd.Max)


def test_non_contiguous_and_channels_last() -> None:
    base = torch.arange(24.0).reshape(2, 3, 2, 2)
    for tensor in (base.transpose(1, 3), base[:, ::2], base.to(memory_format=torch.channels_last)):
        mine = tensor + hvd.rank()
        expected = tensor + (hvd.size() - 1) / 2
        assert torch.equal(hvd.allreduce(mine), expected)
        strided = mine.clone(memory_format=torch.preserve_format)
        hvd.allreduce_(strided)
        assert torch.equal(strided, expected)
        hvd.broadcast_(mine, hvd.size() - 1)
        assert torch.equal(mine, tensor + hvd.size() - 1)


def test_ranks_of_different_layout_agree() -> None:
    base = torch.arange(24.0).reshape(2, 3, 2, 2)
    mine = base.to(memory_format=torch.channels_last) if hvd.rank() % 2 else base
    assert torch.equal(hvd.allreduce(mine), base)


def test_in_inference_mode() -> None:
    """As in an evaluation loop."""
    mean = (hvd.size() - 1) / 2
    with torch.inference_mode():
        mine = torch.full((3,), float(hvd.rank()))
        assert hvd.allreduce(mine).tolist() == [mean] * 3
        assert hvd.allreduce(mine, prescale_factor=2.0, op=hvd.Max).tolist() == [2.0 * (hvd.size() - 1)] * 3
        assert hvd.allgather(mine[:1]).tolist() == [float(r) for r in range(hvd.size())]
        assert hvd.broadcast(mine, 0).tolist() == [0.0] * 3
        assert hvd.broadcast_object("x", 0) == "x"
        assert hvd.allgather_object(1) == [1] * hvd.size()
        assert hvd.allreduce_(mine).tolist() == [mean] * 3
        assert hvd.broadcast_(mine, 0).tolist() == [mean] * 3
        hvd.barrier()


def test_scale_factors() -> None:
    assert (
        hvd.allreduce(torch.ones(3), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0).tolist()
        == [2.0 * hvd.size()] * 3
    )
    assert hvd.allreduce(torch.tensor([7]), op=hvd.Max, prescale_factor=0.5).tolist() == [3]


@pytest.mark.parametrize("compression", [hvd.Compression.fp16, hvd.Compression.bf16], ids=["fp16", "bf16"])
def test_compressed_allreduce_keeps_the_type(compression: type) -> None:
    result = hvd.allreduce(torch.full((9,), 0.5) + hvd.rank(), compression=compression)
    assert result.dtype == torch.float32
    assert result.tolist() == pytest.approx([0.5 + (hvd.size() - 1) / 2] * 9)
    integers = hvd.allreduce(torch.tensor([3]), op=hvd.Sum, compression=compression)
    assert integers.tolist() == [3 * hvd.size()]


def test_order_of_submission_does_not_matter() -> None:
    names = [f"order.{i}" for i in range(20)]
    mine = names if hvd.rank() % 2 == 0 else names[::-1]
    handles = {name: hvd.allreduce_async(torch.tensor([float(name[6:])]), name=name, op=hvd.Sum) for name in mine}
    for name in names:
        assert hvd.synchronize(handles[name]).item() == float(name[6:]) * hvd.size()


def test_calls_from_several_threads() -> None:
    results: dict[int, float] = {}

    def work(i: int) -> None:
        for k in range(10):
            results[i] = hvd.allreduce(torch.tensor([float(i)]), name=f"thread.{i}.{k}").item()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: float(i) for i in range(4)}


def test_handles() -> None:
    handle = hvd.allreduce_async(torch.ones(2), name="handle")
    while not hvd.poll(handle):
        pass
    assert hvd.synchronize(handle).tolist() == [1.0, 1.0]
    assert hvd.synchronize(handle) is None
    with pytest.raises(ValueError, match="was not created or has been cleared"):
        hvd.poll(handle)
    hvd.barrier()


def test_a_large_exchange_moves_while_nobody_calls_hiercomm() -> None:
    """Plain non-blocking MPI would not have moved; computing alone, for longer and longer, must be enough."""
    handle = hvd.allreduce_async(torch.ones(1 << 22), name="moves", op=hvd.Sum)
    a, seconds = torch.ones(64, 64), 0.25
    ended = False
    while not ended and seconds < 40:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            a = torch.tanh(a @ a)
        ended = hvd.poll(handle)  # asks a flag: only another thread can have moved it
        seconds *= 2
    assert ended
    result = hvd.synchronize(handle)
    assert result[0] == result[-1] == hvd.size()


def test_allgather() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.uint8):
        result = hvd.allgather(torch.full((rank, 2), rank).to(dtype))
        assert torch.equal(result, torch.cat([torch.full((r, 2), r).to(dtype) for r in range(size)]))
    assert hvd.allgather(torch.tensor(rank)).tolist() == list(range(size))
    assert hvd.allgather(torch.empty(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("shape", [(), (0,), (5,), (300, 411)], ids=str)
def test_broadcast_from_every_root(shape: tuple[int, ...]) -> None:
    for root in range(hvd.size()):
        mine = torch.full(shape, float(hvd.rank()))
        assert torch.equal(hvd.broadcast(mine, root), torch.full(shape, float(root)))
        hvd.broadcast_(mine, root)
        assert torch.equal(mine, torch.full(shape, float(root)))


def test_objects() -> None:
    mine = {"rank": hvd.rank(), "list": [1, "two", None]}
    assert hvd.allgather_object(mine) == [{"rank": r, "list": [1, "two", None]} for r in range(hvd.size())]
    root = hvd.size() - 1
    assert hvd.broadcast_object(mine if hvd.rank() == root else None, root)["rank"] == root
    with pytest.raises(hvd.HorovodInternalError, match="cannot pickle"):
        hvd.broadcast_object(lambda: 0, 0)
    assert hvd.broadcast_object("still usable", 0) == "still usable"


def test_gradients() -> None:
    rank, size = hvd.rank(), hvd.size()
    weight = float(rank + 1)
    total = size * (size + 1) / 2

    x = torch.ones(3, requires_grad=True)
    (hvd.allreduce(x, op=hvd.Sum) * weight).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [total] * 3

    x = torch.ones(3, requires_grad=True)
    (hvd.allreduce(x) * weight).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == pytest.approx([total / size] * 3)

    x = torch.ones(rank + 1, requires_grad=True)
    (hvd.allgather(x) * weight).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [total] * (rank + 1)

    x = torch.ones(3, requires_grad=True)
    (hvd.broadcast(x, 0) * weight).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [total if rank == 0 else 0.0] * 3


# ---- what does not fit together: an error on every rank, and the job stays usable -----------------------

several = pytest.mark.skipif("hvd.size() == 1", reason="one rank cannot disagree")


@several
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda last: hvd.allreduce(torch.ones(5 if last else 4), name="m"), r"shapes.*\[5\].*\[4\]"),
        (lambda last: hvd.allreduce(torch.ones(4, dtype=torch.float64 if last else torch.float32), name="m"),
         "data types.*float64.*float32"),
        (lambda last: hvd.allreduce(torch.ones(4), name="m", op=hvd.Sum if last else hvd.Max), "operation.*Sum.*Max"),
        (lambda last: hvd.allreduce(torch.ones(4), name="m", prescale_factor=2.0 if last else 1.0), "prescale"),
        (lambda last: hvd.broadcast(torch.ones(4), 1 if last else 0, name="m"), "root ranks.*1.*0"),
        (lambda last: hvd.broadcast(torch.ones(5 if last else 4), 0, name="m"), r"shapes.*\[5\].*\[4\]"),
        (lambda last: hvd.allgather(torch.ones(2, 5 if last else 4), name="m"), r"shapes.*\[5\].*\[4\]"),
        (lambda last: hvd.allgather(torch.ones(2, 1) if last else torch.ones(2), name="m"), "tensor ranks"),
    ],
)  # fmt: skip
def test_mismatch_raises_on_every_rank_with_values_and_ranks(call: object, message: str) -> None:
    last = hvd.rank() == hvd.size() - 1
    with pytest.raises(hvd.HorovodInternalError, match=f"(?s){message}.*'m'") as caught:
        call(last)  # type: ignore[operator]
    assert f"rank {hvd.size() - 1} has" in str(caught.value)
    assert hvd.allreduce(torch.ones(2), name="m").tolist() == [1.0, 1.0]


@several
@pytest.mark.parametrize("kind", ["names", "kinds"])
def test_ranks_in_different_operations_get_an_error_instead_of_a_hang(kind: str) -> None:
    def call() -> None:
        if hvd.rank() == 0:
            hvd.allreduce(torch.ones(4), name="one")
        elif kind == "names":
            hvd.allreduce(torch.ones(5), name="other")
        else:
            hvd.broadcast(torch.ones(5), 0, name="one")

    with pytest.raises(hvd.HorovodInternalError, match=r"no rank can go on.*shape \[4\].*shape \[5\]") as caught:
        call()
    assert all(f"rank {rank} waits in" in str(caught.value) for rank in range(hvd.size()))
    assert hvd.allreduce(torch.ones(2)).tolist() == [1.0, 1.0]


@several
def test_name_in_use() -> None:
    if hvd.rank() == 0:
        held = hvd.allreduce_async(torch.ones(2), name="held")
        with pytest.raises(ValueError, match=r"same name.*'held'"):
            hvd.allreduce_async(torch.ones(2), name="held")
        hvd.broadcast(torch.ones(1), 0, name="gate")
    else:
        hvd.broadcast(torch.ones(1), 0, name="gate")  # until then rank 0 is alone with "held"
        held = hvd.allreduce_async(torch.ones(2), name="held")
    assert hvd.synchronize(held).tolist() == [1.0, 1.0]


def test_bad_arguments() -> None:
    x = torch.ones(2)
    for call, message in [
        (lambda: hvd.broadcast(x, hvd.size()), f"invalid root rank {hvd.size()}"),
        (lambda: hvd.broadcast(x, -1), "invalid root rank -1"),
        (lambda: hvd.allreduce(x, op=17), "op=17"),
        (lambda: hvd.allreduce(x, average=True, op=hvd.Sum), "supersedes"),
        (lambda: hvd.allreduce(x.to_sparse()), "to_dense"),
        (lambda: hvd.broadcast_(x.to("meta"), 0), "tensor on meta is not possible: move it"),
        (lambda: hvd.broadcast_parameters(3, 0), "invalid params of type"),
        (lambda: hvd.broadcast_parameters({"a": 3}, 0), "'a' is a int"),
        (lambda: hvd.broadcast_optimizer_state(torch.nn.Linear(1, 1), 0), "takes an optimizer, not Linear"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="not list"):
        hvd.allreduce([1.0])
    with pytest.raises(DeprecationWarning, match="average"):
        hvd.allreduce(x, average=False)
    for call in (lambda: hvd.alltoall(x), lambda: hvd.allreduce(x, op=hvd.Adasum), lambda: hvd.elastic.run):
        with pytest.raises(RuntimeError, match="not in this version of hiercomm yet"):
            call()
