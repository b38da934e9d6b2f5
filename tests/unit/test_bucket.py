"""Buckets: which gradients share one, where each lies in it, and what counts as touching it."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hiercomm.bucket import Bucket, Spec, layout, plan
from hiercomm.comm.base import LocalBuffer, bounds, pieces

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SPECS = st.lists(
    st.builds(
        lambda dtype, numel: Spec(dtype, (numel,), (1,)),
        st.sampled_from(DTYPES),
        st.integers(0, 10) | st.integers(0, 10**6),
    ),
    max_size=30,
)
FIRST_BYTES = 2**20


def nbytes(specs, members):
    return sum(specs[i].nbytes for i in members)


@given(SPECS, st.sampled_from([1, 100, 2**16, 25 * 2**20]))
def test_plan(specs, bucket_bytes):
    groups = plan(specs, bucket_bytes)
    assert sorted(i for group in groups for i in group) == list(range(len(specs)))
    assert all(group == sorted(group) for group in groups)
    assert all(len({specs[i].dtype for i in group}) == 1 for group in groups)
    assert all(len(group) == 1 or nbytes(specs, group) <= bucket_bytes for group in groups)
    # A bucket is full when its last gradient is there.
    assert [group[-1] for group in groups] == sorted(group[-1] for group in groups)
    if groups:
        assert len(groups[0]) == 1 or nbytes(specs, groups[0]) <= FIRST_BYTES
    for dtype in DTYPES:
        own = [group for group in groups if specs[group[0]].dtype == dtype]
        # Filled in the order given, and none is closed while the next gradient would have fitted.
        assert [i for group in own for i in group] == [i for i, spec in enumerate(specs) if spec.dtype == dtype]
        for group, following in itertools.pairwise(own):
            assert nbytes(specs, [*group, following[0]]) > min(bucket_bytes, FIRST_BYTES)


def test_plan_begins_small_and_cuts_small_models_into_several():
    spec = Spec(torch.float32, (2**16,), (1,))  # 256 KB
    assert [len(group) for group in plan([spec] * 8, 6 * 2**20)] == [4, 4]
    assert [len(group) for group in plan([spec] * 64, 6 * 2**20)] == [4, *[8] * 7, 4]
    assert [len(group) for group in plan([spec] * 400, 6 * 2**20)] == [4, *[24] * 16, 12]


@given(SPECS)
def test_layout_neither_overlaps_nor_wastes(specs):
    offsets, end = layout(specs)
    assert all(offset % 16 == 0 for offset in offsets)
    following = [*offsets, end][1:]
    for spec, offset, after in zip(specs, offsets, following, strict=True):
        assert 0 <= after - offset - spec.numel < 16


@given(st.integers(0, 3000), st.integers(1, 40))
def test_bounds_cover_exactly(numel, parts):
    cut = [bounds(numel, parts, i) for i in range(parts)]
    assert cut[0][0] == 0
    assert cut[-1][1] == numel
    assert all(begin <= end for begin, end in cut)
    assert all(this[1] == after[0] for this, after in itertools.pairwise(cut))
    assert all(begin % 16 == 0 or begin == numel for begin, _ in cut)
    assert all(end - begin < numel / parts + 16 for begin, end in cut if numel)


@given(st.integers(0, 300), st.integers(1, 9))
def test_pieces_are_views_that_together_are_the_whole(numel, parts):
    flat = torch.arange(numel)
    cut = pieces(flat, parts)
    assert len(cut) == parts
    assert torch.equal(torch.cat(cut), flat)
    for piece in cut:
        piece.zero_()
    assert not flat.any()


# ---- views --------------------------------------------------------------------------------------------

PARAMETERS = {
    "plain": torch.zeros(3, 5),
    "channels last": torch.zeros(4, 3, 5, 7).to(memory_format=torch.channels_last),
    "transposed": torch.zeros(6, 2).t(),
    "0-dim": torch.zeros(()),
    "nothing": torch.zeros(0),
    "nothing by 3": torch.zeros(0, 3),
    "every second column": torch.zeros(4, 10)[:, ::2],
    "one row for all": torch.zeros(1, 4).expand(3, 4),
}


def bucket_of(parameters, dtype=torch.float32, lead=0):
    """A bucket of all parameters, in a buffer that begins `lead` elements into its storage."""
    specs = [Spec.of(p.to(dtype)) for p in parameters]
    storage = torch.zeros(lead + layout(specs)[1], dtype=dtype)
    return Bucket(0, range(len(specs)), specs, LocalBuffer(storage[lead:]), "Sum", 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", [0, 64])
def test_views_have_the_gradients_shapes_and_share_no_element(dtype, lead):
    bucket = bucket_of(PARAMETERS.values(), dtype, lead)
    assert bucket.members == tuple(range(len(PARAMETERS)))
    for number, (view, parameter) in enumerate(zip(bucket.views, PARAMETERS.values(), strict=True), start=1):
        assert (view.shape, view.dtype) == (parameter.shape, dtype)
        assert not view.count_nonzero()  # nobody before wrote here
        view.fill_(number)
    for number, view in enumerate(bucket.views, start=1):
        assert (view == number).all()
    for values in (bucket.flat, bucket.buffer.data):
        counts = [int((values == number).sum()) for number in range(1, len(PARAMETERS) + 1)]
        assert counts == [p.numel() for p in PARAMETERS.values()]


def test_views_keep_dense_strides():
    """What autograd would have made: a gradient in its parameter's layout is taken over without a copy."""
    views = dict(zip(PARAMETERS, bucket_of(PARAMETERS.values()).views, strict=True))
    assert views["channels last"].is_contiguous(memory_format=torch.channels_last)
    assert views["transposed"].stride() == (1, 2)
    assert views["every second column"].is_contiguous()
    assert views["one row for all"].is_contiguous()


def test_a_bucket_of_nothing():
    bucket = bucket_of([torch.zeros(0), torch.zeros(2, 0)])
    assert [tuple(view.shape) for view in bucket.views] == [(0,), (2, 0)]
    assert bucket_of([]).views == []


def clip(view):
    parameter = torch.nn.Parameter(torch.zeros_like(view))
    parameter.grad = view
    torch.nn.utils.clip_grad_norm_([parameter], 0.1)


@pytest.mark.parametrize(
    "change",
    [
        lambda view: view.mul_(2),
        lambda view: view.zero_(),
        lambda view: view[0].fill_(1),
        lambda view: view.t().add_(1),
        lambda view: view.detach().add_(1),
        lambda view: torch.add(view, 1, out=view),
        lambda view: torch._foreach_mul_([view], 2.0),
        clip,
    ],
    ids=["mul_", "zero_", "slice", "transpose", "detach", "out=", "foreach", "clip_grad_norm_"],
)
def test_a_gradient_changed_in_place_is_noticed(change):
    bucket = bucket_of([torch.zeros(3, 5), torch.zeros(4)])
    bucket.views[0].fill_(1)  # before the seal: what autograd does
    bucket.seal()
    assert not bucket.was_touched()
    change(bucket.views[0])
    assert bucket.was_touched()
    bucket.seal()
    assert not bucket.was_touched()


def test_nothing_else_is_noticed():
    bucket, other = bucket_of([torch.zeros(3, 5)]), bucket_of([torch.zeros(3, 5)])
    bucket.seal()
    bucket.buffer.data.add_(1)  # communication
    pieces(bucket.buffer.data, 2)[0].mul_(1)
    bucket.views[0].sum()
    bucket.views[0].clone().mul_(2)
    (bucket.views[0] * 2).add_(1)
    other.views[0].mul_(3)
    parameter = torch.nn.Parameter(torch.zeros(3, 5))
    parameter.grad = bucket.views[0]
    torch.optim.SGD([parameter], lr=0.1, momentum=0.9).step()
    parameter.grad = None
    assert bucket.views[0].eq(1).all()
    assert not bucket.was_touched()
