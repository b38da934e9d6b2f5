"""Promises of all compressors: sizes, errors, residuals, what is not finite, bytes that are no payload."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from hiercomm.compress import (
    BF16,
    FP8,
    FP16,
    Compressor,
    ErrorFeedback,
    Int4,
    Int8,
    NoCompression,
    PerLayer,
    RandomK,
    Sign,
    Site,
    TopK,
    parse,
    wire,
)
from hiercomm.errors import ConfigError, PayloadError

ALL: list[Compressor] = [
    NoCompression(), FP16(), BF16(), Int8(), Int8("stochastic"), Int4(), Int4("stochastic"), FP8(), FP8("stochastic"),
    Sign(), TopK(0.01), TopK(1.0), RandomK(0.1),
]  # fmt: skip
SIZES = (0, 1, 7, 511, 512, 513, 70_003)
compressors = pytest.mark.parametrize("compressor", ALL, ids=repr)
sizes = pytest.mark.parametrize("numel", SIZES)


def site() -> Site:
    return Site((3, 512), 1)


def data(kind: str, numel: int) -> Tensor:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    if kind == "zeros":
        x.zero_()
    elif kind == "one non-zero":
        x.zero_()
        x[numel // 2 : numel // 2 + 1] = -2.5
    elif kind == "denormal":
        x *= 1e-41
    elif kind == "huge":
        x *= 1e37
    return x


KINDS = ("normal", "zeros", "one non-zero", "denormal", "huge")


def sent(compressor: Compressor | ErrorFeedback, x: Tensor, where: Site) -> Tensor:
    inner = compressor.inner if isinstance(compressor, ErrorFeedback) else compressor
    payload = torch.full((inner.nbytes(x.numel()) + 8,), 0xAB, dtype=torch.uint8)
    compressor.compress(x, payload[:-8], where)
    assert bool((payload[-8:] == 0xAB).all()), "written behind the end"
    return payload[:-8]


def decoded(compressor: Compressor, payload: Tensor, numel: int) -> Tensor:
    out = torch.full((numel,), 7.0)
    compressor.decompress(payload, out, False)
    return out


@compressors
@sizes
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sent_and_what_is_kept_make_up_the_numbers(compressor, numel, kind):
    x = data(kind, numel)
    if isinstance(compressor, FP16):
        x = x.clamp(-60000, 60000)
    before, where = x.clone(), site()
    feedback = ErrorFeedback(compressor)
    arrived, steps = torch.zeros(numel, dtype=torch.float64), 3
    for _ in range(steps):
        arrived += decoded(compressor, sent(feedback, x, where), numel).double()
        where.number += 1
    assert torch.equal(x, before)
    assert list(where.state) == ["residual"]
    residual = where.state["residual"].double()
    total = steps * x.double()
    # Denormals count as zeros, sums with a residual are rounded: nothing else may be lost.
    largest = float(x.double().abs().max()) if numel else 0.0
    assert bool(((arrived + residual - total).abs() <= 1e-37 * steps + 4 * steps**2 * 2.0**-24 * largest).all())


@compressors
@sizes
@pytest.mark.parametrize("kind", KINDS)
def test_accumulate_adds_and_the_same_bytes_come_again(compressor, numel, kind):
    x = data(kind, numel)
    payload = sent(compressor, x, site())
    assert torch.equal(payload, sent(compressor, x, site()))
    out = torch.randn(numel)
    expected = out + decoded(compressor, payload, numel)
    compressor.decompress(payload, out, True)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize(("compressor", "levels"), [(Int8(), 127), (Int4(), 7)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_error_is_half_a_step(compressor, levels, kind):
    x = data(kind, 5120)
    error = (decoded(compressor, sent(compressor, x, site()), 5120) - x).abs().view(-1, 512).amax(1)
    largest = x.abs().view(-1, 512).amax(1)
    # The scale is rounded up to bf16.
    assert bool((error <= largest / levels * (1 + 2**-7) / 2 * 1.0001 + 2.0**-64).all())


@pytest.mark.parametrize("compressor", [Int8("stochastic"), Int4("stochastic"), FP8("stochastic")], ids=repr)
def test_stochastic_rounding_is_unbiased(compressor):
    x = torch.rand(512) - 0.5
    total, rounds = torch.zeros(512), 2000
    where = site()
    for _ in range(rounds):
        compressor.decompress(sent(compressor, x, where), total, True)
        where.number += 1
    step = 0.5 / (7 if compressor.nbytes(512) < 300 else 16)
    assert float((total / rounds - x).abs().max()) < 5 * step / math.sqrt(rounds)


def test_top_k_takes_the_largest_and_of_equal_ones_the_first():
    x = torch.tensor([1.0, -3.0, 2.0, 3.0, -2.0, 2.0])
    assert decoded(TopK(0.5), sent(TopK(0.5), x, site()), 6).tolist() == [0.0, -3.0, 2.0, 3.0, 0.0, 0.0]


def test_random_k_chooses_the_same_places_on_all_ranks_and_others_at_every_step():
    x = torch.arange(1.0, 1001.0)
    places = [
        set(decoded(RandomK(0.1), sent(RandomK(0.1), x, Site((0, 0), rank, number)), 1000).nonzero().flatten().tolist())
        for rank, number in ((0, 0), (1, 0), (0, 1))
    ]
    assert places[0] == places[1] != places[2]
    assert len(places[0]) == 100


@compressors
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen_and_stays_where_it_was(compressor, bad):
    """NaN or inf must reach those who look for it (GradScaler), and no numbers outside of their block."""
    x = torch.randn(2048, generator=torch.Generator().manual_seed(1))
    x[700] = bad
    where = site()
    out = decoded(compressor, sent(ErrorFeedback(compressor), x, where), 2048)
    assert not bool(out.isfinite().all())
    assert bool(where.state["residual"].isfinite().all())
    if not isinstance(compressor, RandomK):
        assert bool(out[:512].isfinite().all())
        assert bool(out[1024:].isfinite().all())


@compressors
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_step_that_is_not_finite_anywhere_is_one_step(compressor, bad):
    """A GradScaler that saw it again and again would halve its scale down to nothing."""
    where, feedback = site(), ErrorFeedback(compressor)
    assert not decoded(compressor, sent(feedback, torch.full((2000,), bad), where), 2000).isfinite().all()
    where.number += 1
    assert decoded(compressor, sent(feedback, torch.randn(2000), where), 2000).isfinite().all()


def test_numbers_that_never_change_from_zero_stay_zero():
    for compressor in ALL:
        where, x = site(), torch.zeros(1000)
        for _ in range(500):
            assert not decoded(compressor, sent(ErrorFeedback(compressor), x, where), 1000).any()
            where.number += 1
        assert not where.state["residual"].any()


# ---- bytes that are no payload -----------------------------------------------------------------------------


@compressors
def test_every_damaged_header_is_named(compressor):
    payload = sent(compressor, torch.randn(1000), site())
    out = torch.zeros(1000)
    for place, text in ((0, "begins with"), (2, "version"), (3, "of code"), (4, "elements where 1000")):
        damaged = payload.clone()
        damaged[place] += 1
        with pytest.raises(PayloadError, match=text):
            compressor.decompress(damaged, out, False)
    for length in (0, 15, payload.numel() - 1):
        with pytest.raises(PayloadError, match="bytes for 1000 elements"):
            compressor.decompress(payload[:length], out, False)
    assert not out.any()


@pytest.mark.parametrize("compressor", [Int8(), Int4(), FP8(), Sign()], ids=repr)
@pytest.mark.parametrize("bits", [0x7F80, 0x7FC1, 0xFFC0, 0x8001, 0xBF80])
def test_a_scale_that_no_sender_makes(compressor, bits):
    payload = sent(compressor, torch.randn(1000), site())
    payload[wire.HEADER_BYTES + 2 : wire.HEADER_BYTES + 4] = torch.tensor([bits & 255, bits >> 8], dtype=torch.uint8)
    with pytest.raises(PayloadError, match=f"block 1 of a payload has the scale {bits:#06x}"):
        compressor.decompress(payload, torch.zeros(1000), False)


@pytest.mark.parametrize(
    "compressor", [NoCompression(), FP16(), BF16(), Int8(), Int4(), FP8(), Sign(), TopK(0.1), RandomK(0.1)], ids=repr
)
def test_a_hundred_thousand_damaged_payloads_are_an_error_or_a_result(compressor):
    """Never more: the numbers around the result stay as they are. (tests/kernels does so under AddressSanitizer.)"""
    rounds, numel = 100_000, 600
    good = sent(compressor, torch.randn(numel, generator=torch.Generator().manual_seed(0)), site())
    around = torch.zeros(numel + 64)
    out, payload = around[32:-32], good.clone()
    begin = np.where(np.arange(rounds) % 4, wire.HEADER_BYTES, 0)
    random_ = np.random.default_rng(0)
    places = torch.from_numpy(random_.integers(begin[:, None], good.numel(), (rounds, 3)))
    values = torch.from_numpy(random_.integers(0, 256, (rounds, 3), dtype=np.uint8))
    errors = 0
    for place, value in zip(places, values, strict=True):
        payload[place] = value
        try:
            compressor.decompress(payload, out, False)
        except PayloadError:
            errors += 1
        payload[place] = good[place]
    assert 0 < errors < rounds
    assert not around[:32].any()
    assert not around[-32:].any()


# ---- choosing --------------------------------------------------------------------------------------------------


def test_small_and_flat_tensors_go_as_they_are():
    layers = PerLayer(ErrorFeedback(Int8()), min_numel=100, rules={"head.*": ErrorFeedback(Sign()), "norm*": None})
    f32 = torch.float32
    assert layers.choose("a", (10, 10), f32) == ErrorFeedback(Int8())
    assert layers.choose("a", (10, 9), f32) is None
    assert layers.choose("a", (1000,), f32) is None
    assert layers.choose("head.bias", (5,), f32) == ErrorFeedback(Sign())
    assert layers.choose("norm1", (10, 10), f32) is None
    assert layers.choose("a", (10, 10), torch.float64) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [("int8", Int8()), ("int8:stochastic", Int8("stochastic")), ("topk:0.05", TopK(0.05)), ("sign", Sign())],
)
def test_names(text, expected):
    assert parse(text) == PerLayer(ErrorFeedback(expected))
    assert parse("none") is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("int9", "unknown compression 'int9'; known: none, auto, bf16"), ("sign:3", "takes no argument '3'"),
        ("topk:2", "ratio=2"), ("topk:x", "ratio='x'"), ("int8:up", "rounding='up'"), ("none:1", "unknown"),
    ],
)  # fmt: skip
def test_bad_names(text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse(text)


def test_what_does_not_converge_is_refused():
    for compressor in (Sign(), TopK(0.01), RandomK(0.01)):
        with pytest.raises(ConfigError, match="without error feedback: ErrorFeedback"):
            PerLayer(compressor)
    with pytest.raises(ConfigError, match="without error feedback"):
        PerLayer(Sign(), rules={"default": None})
    with pytest.raises(
        ConfigError, match=r"the rule 'embed\.\*' of PerLayer matches no parameter: they are 0.weight, 0.bias"
    ):
        PerLayer(Int8(), rules={"0.*": None, "embed.*": None}).require_matches(["0.weight", "0.bias"])
    with pytest.raises(ConfigError, match="min_numel=-1"):
        PerLayer(Int8(), min_numel=-1)
    with pytest.raises(ConfigError, match="it takes a compressor"):
        ErrorFeedback(3)  # type: ignore[arg-type]


def test_seeds_differ_between_steps_places_and_ranks():
    seeds = {
        Site((bucket, begin), rank, number).seed(rank)
        for bucket in range(3) for begin in range(0, 5120, 512) for rank in range(3) for number in range(50)
    }  # fmt: skip
    assert len(seeds) == 3 * 10 * 3 * 50
    bits = np.array([seed >> shift & 1 for seed in seeds for shift in range(64)]).mean()
    assert abs(bits - 0.5) < 0.01
