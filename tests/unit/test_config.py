"""Options: where each may come from, which wins, and that whatever cannot be used is named."""

from __future__ import annotations

import dataclasses
import os

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import hiercomm
from hiercomm import config
from hiercomm.config import Config, options_table, parse_bytes, parse_rate, parse_seconds, variable
from hiercomm.errors import ConfigError

# field: (text in the environment, the value it means, another value as an argument)
VALUES = {
    "mode": ("bsp:a=1", "bsp:a=1", "other"),
    "node": ("left", "left", "right"),
    "ranks_per_node": ("3", 3, 2),
    "local": ("gloo", "gloo", "shm"),
    "compression": ("int8", "int8", "sign"),
    "bucket_bytes": ("2MB", 2 * 2**20, 4096),
    "stall_warn": ("90s", 90.0, 5.0),
    "stall_abort": ("600", 600.0, 5.0),
    "link_timeout": ("30", 30.0, 0.0),
    "cross_rate": ("200mbit", 200e6, 1e9),
    "cross_delay": ("5ms", 0.005, 0.25),
    "placement": ("1", True, False),
    "report": ("yes", True, False),
}
FIELDS = [f.name for f in dataclasses.fields(Config)]


def test_every_field_is_in_the_table_above():
    assert list(VALUES) == FIELDS


@pytest.mark.parametrize("name", FIELDS)
def test_argument_beats_environment_beats_default(name):
    text, meant, argument = VALUES[name]
    default = getattr(Config.from_environment({}), name)
    assert default == getattr(Config(), name)
    assert meant not in (default, argument)
    environ = {variable(name): text}
    assert getattr(Config.from_environment(environ), name) == meant
    assert getattr(Config.from_environment(environ, **{name: argument}), name) == argument


@pytest.mark.parametrize(
    ("horovod", "text", "name", "meant"),
    [
        ("HOROVOD_FUSION_THRESHOLD", "67108864", "bucket_bytes", 2**26),
        ("HOROVOD_FUSION_THRESHOLD", "0", "bucket_bytes", 1),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "30", "stall_warn", 30.0),
        ("HOROVOD_STALL_CHECK_DISABLE", "1", "stall_warn", 0.0),
        ("HOROVOD_STALL_CHECK_DISABLE", "0", "stall_warn", Config().stall_warn),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "60", "stall_abort", 60.0),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "0", "stall_abort", 0.0),  # never, as here
    ],
)
def test_horovods_variable_beats_the_default_only(horovod, text, name, meant):
    assert getattr(Config.from_environment({horovod: text}), name) == meant
    ours, our_value, argument = VALUES[name]
    both = {horovod: text, variable(name): ours}
    assert getattr(Config.from_environment(both), name) == our_value
    assert getattr(Config.from_environment(both, **{name: argument}), name) == argument


def test_other_programs_variables_are_ignored():
    environ = {"HOROVOD_CYCLE_TIME": "x", "PATH": "/bin", "HIERCOMM": "x", "HIERCOMM_TORCH": "2.4"}
    assert Config.from_environment(environ) == Config()


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("HIERCOMM_BUCKET_BYTE", "HIERCOMM_BUCKET_BYTES"),
        ("HIERCOMM_STALL_WARNING", "HIERCOMM_STALL_WARN"),
        ("HIERCOMM_RANKS_PER_HOST", "HIERCOMM_RANKS_PER_NODE"),
        ("HIERCOMM_CROSSRATE", "HIERCOMM_CROSS_RATE"),
    ],
)
def test_unknown_variable_names_itself_and_the_nearest(wrong, nearest):
    with pytest.raises(ConfigError) as caught:
        Config.from_environment({wrong: "1"})
    assert wrong in str(caught.value)
    assert nearest in str(caught.value).replace(wrong, "", 1)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("HIERCOMM_BUCKET_BYTES", "25 apples"),
        ("HIERCOMM_BUCKET_BYTES", "1e400"),
        ("HIERCOMM_STALL_WARN", "soon"),
        ("HIERCOMM_STALL_ABORT", "-1"),
        ("HIERCOMM_STALL_ABORT", "1.2.3"),
        ("HIERCOMM_CROSS_RATE", "fast"),
        ("HIERCOMM_CROSS_RATE", "5ms"),
        ("HIERCOMM_CROSS_DELAY", "200mbit"),
        ("HIERCOMM_CROSS_DELAY", ""),
        ("HIERCOMM_PLACEMENT", "maybe"),
        ("HIERCOMM_REPORT", ""),
        ("HIERCOMM_RANKS_PER_NODE", "two"),
        ("HIERCOMM_RANKS_PER_NODE", "2.0"),
        ("HOROVOD_FUSION_THRESHOLD", "big"),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "never"),
        ("HOROVOD_STALL_CHECK_DISABLE", "perhaps"),
    ],
)
def test_malformed_value_names_variable_and_value(name, text):
    with pytest.raises(ConfigError) as caught:
        Config.from_environment({name: text})
    assert f"{name}={text}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("local", "mpi"),
        ("ranks_per_node", 0),
        ("bucket_bytes", 0),
        ("stall_warn", -1.0),
        ("stall_warn", float("nan")),
        ("stall_abort", float("inf")),
        ("cross_rate", 0.0),
        ("cross_rate", float("inf")),
        ("cross_rate", float("nan")),
        ("cross_delay", -0.001),
        ("cross_delay", 3600.0),
        ("node", ""),
    ],
)
def test_value_out_of_range_names_field_and_value(name, value):
    with pytest.raises(ConfigError) as caught:
        Config(**{name: value})
    assert f"{name}={value!r}" in str(caught.value)
    assert "must be" in str(caught.value)


@pytest.mark.parametrize("name", ["local", "bucket_bytes", "cross_rate", "ranks_per_node", "node"])
def test_value_out_of_range_in_the_environment_names_its_field(name):
    text = {"local": "mpi", "node": ""}.get(name, "0")
    with pytest.raises(ConfigError) as caught:
        Config.from_environment({variable(name): text})
    assert name in str(caught.value)


# ---- units --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_rate, "200mbit", 200e6),
        (parse_rate, "1gbit", 1e9),
        (parse_rate, "1.5 Gbit", 1.5e9),
        (parse_rate, "64kbit", 64e3),
        (parse_rate, "1000", 1000.0),
        (parse_rate, "1e9", 1e9),
        (parse_rate, "8bit", 8.0),
        (parse_seconds, "5ms", 0.005),
        (parse_seconds, " 2s ", 2.0),
        (parse_seconds, "250us", 250e-6),
        (parse_seconds, "1800", 1800.0),
        (parse_bytes, "25MB", 25 * 2**20),
        (parse_bytes, "1kb", 1024),
        (parse_bytes, "0.5GB", 2**29),
        (parse_bytes, "12b", 12),
        (parse_bytes, "12", 12),
    ],
)
def test_units(parse, text, value):
    assert parse(text) == pytest.approx(value, rel=1e-12)


POSITIVE = st.floats(min_value=0, max_value=1e18)


@given(POSITIVE, st.sampled_from([("", 1), ("bit", 1), ("kbit", 1e3), ("mbit", 1e6), ("GBit", 1e9)]))
@example(1e16, ("", 1))
def test_rate_round_trip(number, unit):
    assert parse_rate(f"{number!r}{unit[0]}") == number * unit[1]


@given(POSITIVE, st.sampled_from([("", 1), ("s", 1), (" ms", 1e-3), ("US", 1e-6)]))
@example(1e-5, ("", 1))  # written 1e-05
def test_seconds_round_trip(number, unit):
    assert parse_seconds(f"{number!r}{unit[0]}") == number * unit[1]


@given(st.integers(0, 2**22), st.sampled_from([("", 0), ("B", 0), ("kB", 10), (" mb", 20), ("GB", 30)]))
def test_bytes_round_trip(number, unit):
    assert parse_bytes(f"{number}{unit[0]}") == number << unit[1]


@given(st.text(max_size=12) | st.from_regex(r"[0-9.]{0,4}(e[+-]?[0-9]{0,3})?[a-zA-Z]{0,4}", fullmatch=True))
@example("1e400")
@example("infs")
@example("nan")
def test_text_is_a_quantity_or_a_config_error(text):
    for parse in (parse_rate, parse_seconds, parse_bytes):
        try:
            value = parse(text)
        except ConfigError:
            continue
        assert value >= 0


# ---- the rest -----------------------------------------------------------------------------------------


def test_shared_is_all_but_what_may_differ_between_ranks():
    shared = Config(node="a", ranks_per_node=2).shared()
    assert set(shared) == set(FIELDS) - {"node"}
    assert shared["ranks_per_node"] == 2


def test_options_table_has_a_row_for_each_field():
    rows = options_table().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == [variable(name) for name in FIELDS]
    # A default that is shown can be put into the environment as it is.
    for row, name in zip(rows, FIELDS, strict=True):
        shown = row.split("|")[2].strip().strip("`")
        if shown:
            assert Config.from_environment({variable(name): shown}) == Config()


def test_the_environment_of_this_process_is_the_default_source(monkeypatch):
    for name in [n for n in os.environ if n.startswith(("HIERCOMM_", "HOROVOD_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HIERCOMM_STALL_WARN", "12")
    assert Config.from_environment() == Config(stall_warn=12.0)
    copy = config.process_environment()
    copy["HIERCOMM_STALL_WARN"] = "13"
    assert os.environ["HIERCOMM_STALL_WARN"] == "12"


def test_mpi_defaults_leave_the_users_choice(monkeypatch):
    for name in config.MPI_DEFAULTS:
        monkeypatch.setenv(name, "")  # so that monkeypatch undoes what is set below
        monkeypatch.delenv(name)
    chosen, *others = config.MPI_DEFAULTS
    monkeypatch.setenv(chosen, "mine")
    config.set_mpi_defaults()
    assert os.environ[chosen] == "mine"
    assert all(os.environ[name] == config.MPI_DEFAULTS[name] for name in others)


def test_a_compression_that_nobody_knows_is_named_at_init():
    with pytest.raises(ConfigError, match="HIERCOMM_COMPRESSION=int9: unknown compression 'int9'"):
        hiercomm.init(compression="int9")
