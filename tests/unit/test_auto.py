"""Which code `auto` takes, on modelled links."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hiercomm.compress import Auto, parse
from hiercomm.compress.auto import CANDIDATES, allowed, pick, relative_error
from hiercomm.errors import ConfigError

NUMEL = 25_000_000
KERNEL_BYTES_S = 2e9  # of float32 that a core turns into codes, and back


def modelled(names: list[str], link_bytes_s: float) -> tuple[float, dict[str, float]]:
    """Seconds of a plain exchange between two nodes and of coded ones: link, and two codings and decodings."""
    coded = {
        name: CANDIDATES[name].inner.nbytes(NUMEL) / link_bytes_s + 4 * 4 * NUMEL / KERNEL_BYTES_S for name in names
    }
    return 4 * NUMEL / link_bytes_s, coded


@pytest.mark.parametrize(
    ("link_bytes_s", "max_error", "wanted"),
    [(100e9, 0.05, None), (100e9, 1.0, None), (125e6, 0.05, "int8"), (125e6, 0.2, "int4"), (125e6, 1.0, "topk:0.01"),
     (125e6, 0.002, "bf16"), (125e6, 1e-4, None)],
)  # fmt: skip
def test_pick(link_bytes_s, max_error, wanted):
    names = allowed(Auto(max_error=max_error))
    plain, coded = modelled(names, link_bytes_s)
    got = pick(plain, coded)
    # Sign and top-k 1 % are close to each other where both are allowed.
    assert got == wanted or (wanted == "topk:0.01" and got == "sign")


@given(st.floats(1e-6, 1e3), st.dictionaries(st.sampled_from(list(CANDIDATES)), st.floats(1e-6, 1e3)))
def test_a_pick_is_the_fastest_and_worth_it(plain, coded):
    got = pick(plain, coded)
    if got is None:
        assert all(s > 0.9 * plain for s in coded.values())
    else:
        assert coded[got] == min(coded.values()) <= 0.9 * plain


def test_what_a_code_saves_it_loses():
    errors = [relative_error(choice) for choice in CANDIDATES.values()]
    sizes = [choice.inner.nbytes(NUMEL) for choice in CANDIDATES.values()]
    assert errors == sorted(errors)
    assert sizes[:-1] == sorted(sizes[:-1], reverse=True)
    assert allowed(Auto(max_error=1.0)) == list(CANDIDATES)
    assert allowed(Auto()) == ["bf16", "int8"]


def test_names():
    assert parse("auto") == Auto()
    assert parse("auto:0.2") == Auto(max_error=0.2)
    for arguments, complaint in (
        ({"max_error": 0}, "max_error=0 cannot be used"), ({"max_error": "x"}, "max_error='x' cannot be used"),
        ({"max_error": float("nan")}, "max_error=nan"), ({"min_numel": -1}, "min_numel=-1 cannot be used"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=complaint):
            Auto(**arguments)
