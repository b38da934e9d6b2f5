"""The coordinator's decisions: each operation answered once, mismatches named, a stuck job recognised and only that."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hiercomm.negotiate import Blocked, Negotiator, Request, Response, Waiting, mismatch

GRACE_S = 2.0


def request(name: str, kind: str = "allreduce", **fields: object) -> Request:
    return dataclasses.replace(Request(kind, name, "float32", (2, 3), op="Sum"), **fields)


@given(st.integers(1, 4), st.integers(0, 8), st.randoms(use_true_random=False))
def test_every_operation_is_answered_once_whatever_the_order(ranks, count, shuffler):
    """Exactly when its last rank has submitted it; sequence numbers are 1, 2, 3 ..."""
    names = [str(i) for i in range(count)]
    queues = [shuffler.sample(names, count) for _ in range(ranks)]
    turns = [rank for rank in range(ranks) for _ in names]
    shuffler.shuffle(turns)
    negotiator, submitted, responses = Negotiator(ranks), dict.fromkeys(names, 0), []
    for rank in turns:
        name = queues[rank].pop()
        submitted[name] += 1
        response = negotiator.submit(rank, request(name, shape=(rank, 3), kind="allgather"))
        assert (response is not None) == (submitted[name] == ranks)
        if response is not None:
            assert response.key == ("allgather", name)
            assert response.rows == tuple(range(ranks))
            assert not response.error
            responses.append(response)
    assert [response.sequence for response in responses] == list(range(1, count + 1))


def test_a_name_can_be_used_again_and_belongs_to_its_kind():
    negotiator = Negotiator(2)
    for sequence in (1, 2):
        assert negotiator.submit(0, request("x")) is None
        assert negotiator.submit(1, request("x", kind="broadcast", root=0)) is None
        assert negotiator.submit(1, request("x")) == Response(("allreduce", "x"), 2 * sequence - 1, (2, 2))
        assert negotiator.submit(0, request("x", kind="broadcast", root=0)) is not None


def test_a_tensor_without_dimensions_counts_as_one_row():
    negotiator = Negotiator(2)
    negotiator.submit(1, request("x", shape=()))
    response = negotiator.submit(0, request("x", shape=()))
    assert response is not None
    assert response.rows == (1, 1)


# ---- mismatches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "field", "ours", "theirs"),
    [
        *((kind, "dtype", "float32", "int64") for kind in ("allreduce", "allgather", "broadcast")),
        *((kind, "device", "CPU", "GPU") for kind in ("allreduce", "allgather", "broadcast")),
        *((kind, "shape", (2, 3), (3, 2)) for kind in ("allreduce", "allgather", "broadcast")),
        ("allgather", "shape", (2, 3), (2, 3, 1)),
        ("allreduce", "shape", (2, 3), (6,)),
        ("allreduce", "op", "Sum", "Max"),
        ("allreduce", "prescale", 1.0, 0.5),
        ("allreduce", "postscale", 1.0, 2.0),
        ("broadcast", "root", 0, 1),
    ],
)
def test_a_mismatch_names_the_ranks_and_what_they_have(kind, field, ours, theirs):
    negotiator = Negotiator(3)
    for rank in (2, 0):
        assert negotiator.submit(rank, request("loss", kind, **{field: ours})) is None
    response = negotiator.submit(1, request("loss", kind, **{field: theirs}))
    assert response is not None
    shown = {"shape": (list(ours), list(theirs)) if field == "shape" else ()}.get(field, (ours, theirs))
    if kind == "allgather" and field == "shape":
        shown = ([3], [2]) if len(theirs) == 2 else (2, 3)
    for part in ("rank 0", "rank 1", "'loss'", kind, str(shown[0]), str(shown[1])):
        assert part in response.error
    assert "rank 2" not in response.error
    assert not response.peer_lost
    # Answered: the name is free again.
    assert negotiator.submit(1, request("loss", kind)) is None


def test_what_may_differ():
    assert mismatch({r: request("x", "allgather", shape=(r, 3)) for r in range(3)}) is None
    assert mismatch({0: request("x", "barrier"), 1: request("x", "barrier", shape=(5,), dtype="int8")}) is None
    assert mismatch({5: request("x")}) is None


# ---- a job in which nobody can go on --------------------------------------------------------------------


def on(name: str) -> Waiting:
    return Waiting(f"allreduce {name!r}", key=("allreduce", name))


def exchange(number: int, channel: int = 0) -> Waiting:
    return Waiting(f"exchange {number}", channel=channel, number=number)


def two_in_different_operations() -> Negotiator:
    negotiator = Negotiator(2, GRACE_S)
    for rank, name in enumerate(("a", "b")):
        negotiator.submit(rank, request(name))
        negotiator.blocked(rank, Blocked((on(name),), {}))
    return negotiator


def test_stuck_after_the_grace_and_not_before():
    negotiator = two_in_different_operations()
    assert negotiator.stuck(100.0) is None
    assert negotiator.stuck(101.9) is None
    sentence = negotiator.stuck(102.0)
    assert sentence is not None
    for part in ("rank 0", "rank 1", "allreduce 'a'", "allreduce 'b'", "[2, 3]", "float32", "no rank can go on"):
        assert part in sentence


@pytest.mark.parametrize("event", ["running", "blocked", "submit"])
def test_whatever_happens_begins_the_grace_anew(event):
    negotiator = two_in_different_operations()
    assert negotiator.stuck(100.0) is None
    if event == "running":
        negotiator.running(1)
    elif event == "submit":
        negotiator.submit(1, request("c"))
    assert event == "blocked" or negotiator.stuck(200.0) is None  # rank 1 has something else to do
    negotiator.blocked(1, Blocked((on("b"),), {}))
    assert negotiator.stuck(200.0) is None
    assert negotiator.stuck(201.9) is None
    assert negotiator.stuck(202.0) is not None


def test_not_stuck_while_an_answered_operation_is_carried_out():
    negotiator = Negotiator(2, GRACE_S)
    for rank in (0, 1):
        negotiator.submit(rank, request("a"))
    for rank in (0, 1):
        negotiator.blocked(rank, Blocked((on("a"),), {}))
    assert [negotiator.stuck(now) for now in (0.0, 10.0, 1e6)] == [None] * 3


def test_not_stuck_while_one_thread_of_a_rank_can_go_on():
    negotiator = Negotiator(2, GRACE_S)
    negotiator.submit(0, request("a"))
    negotiator.submit(1, request("b"))
    negotiator.blocked(0, Blocked((on("a"), exchange(3)), {0: 3}))
    negotiator.blocked(1, Blocked((on("b"),), {0: 3}))
    assert [negotiator.stuck(now) for now in (0.0, 10.0)] == [None, None]


@pytest.mark.parametrize(("theirs", "is_stuck"), [({}, True), ({0: 2}, True), ({0: 3}, False), ({1: 3}, True)])
def test_an_exchange_can_end_once_all_ranks_have_started_it(theirs, is_stuck):
    negotiator = Negotiator(2, GRACE_S)
    negotiator.submit(1, request("a"))
    negotiator.blocked(0, Blocked((exchange(3),), {0: 3}))
    negotiator.blocked(1, Blocked((on("a"),), theirs))
    assert negotiator.stuck(0.0) is None
    assert (negotiator.stuck(10.0) is not None) == is_stuck


@pytest.mark.parametrize(("ranks", "is_stuck"), [((0, 2), False), ((0, 1), True), (None, True)])
def test_an_exchange_of_some_ranks_needs_those_alone(ranks, is_stuck):
    negotiator = Negotiator(3, GRACE_S)
    negotiator.submit(1, request("a"))
    for rank in (0, 2):
        negotiator.blocked(rank, Blocked((Waiting("exchange 3", channel=0, number=3, ranks=ranks),), {0: 3}))
    negotiator.blocked(1, Blocked((on("a"),), {0: 1}))
    assert negotiator.stuck(0.0) is None
    assert (negotiator.stuck(10.0) is not None) == is_stuck


def test_an_exchange_can_end_though_a_rank_has_left_behind_it():
    """What a rank had started when it left counts, and not what it had when it last waited."""
    negotiator = Negotiator(2, GRACE_S)
    negotiator.blocked(1, Blocked((exchange(3),), {0: 3}))
    negotiator.leave(1, {0: 4})
    negotiator.blocked(0, Blocked((exchange(4),), {0: 4}))
    assert [negotiator.stuck(now) for now in (0.0, 10.0)] == [None, None]


STATES = st.lists(
    st.one_of(
        st.just("running"),
        st.tuples(st.sampled_from(["a", "b"]), st.just(0)),
        st.tuples(st.just(""), st.integers(1, 3)),
    ),
    min_size=2,
    max_size=4,
)


@given(STATES, st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_stuck_exactly_where_no_rank_can_go_on(states, started):
    """Each rank runs, waits in an operation, or waits in an exchange that it has started."""
    counts = [max(started[r], s[1]) if s != "running" else started[r] for r, s in enumerate(states)]
    negotiator = Negotiator(len(states), GRACE_S)
    answered = set()
    for rank, state in enumerate(states):
        if state != "running" and state[0]:
            response = negotiator.submit(rank, request(state[0]))
            answered |= {state[0]} if response is not None else set()
    for rank, state in enumerate(states):
        if state != "running":
            waiting = on(state[0]) if state[0] else exchange(state[1])
            negotiator.blocked(rank, Blocked((waiting,), {0: counts[rank]}))

    def can_go_on(state: object) -> bool:
        if state == "running":
            return True
        name, number = state  # type: ignore[misc]
        return name in answered if name else min(counts) >= number

    right = not any(can_go_on(state) for state in states)
    assert negotiator.stuck(0.0) is None
    assert (negotiator.stuck(GRACE_S) is not None) == right


@given(STATES, st.integers(0, 3))
def test_never_stuck_while_any_rank_runs(states, runner):
    assume(runner < len(states))
    negotiator = Negotiator(len(states), GRACE_S)
    for rank, state in enumerate(states):
        if rank != runner and state != "running":
            waiting = on(state[0]) if state[0] else exchange(state[1])
            if state[0]:
                negotiator.submit(rank, request(state[0]))
            negotiator.blocked(rank, Blocked((waiting,), {}))
        assert negotiator.stuck(float(rank * 100)) is None


# ---- leaving ------------------------------------------------------------------------------------------


def errors(responses: Sequence[Response | None]) -> list[tuple[str, bool]]:
    return [(r.key[1], r.peer_lost and "rank 1 has shut down" in r.error) for r in responses if r is not None]


def test_a_rank_that_leaves_fails_what_waits_for_it_and_what_comes_later():
    negotiator = Negotiator(3, GRACE_S)
    negotiator.submit(0, request("a"))
    negotiator.submit(2, request("b"))
    negotiator.submit(0, request("b"))
    assert sorted(errors(negotiator.leave(1, {}))) == [("a", True), ("b", True)]
    assert errors([negotiator.submit(2, request("a"))]) == [("a", True)]
    assert not negotiator.all_gone
    assert negotiator.leave(0, {}) == []
    assert negotiator.leave(2, {}) == []
    assert negotiator.all_gone


def test_a_job_whose_ranks_have_all_left_is_not_stuck():
    negotiator = two_in_different_operations()
    for rank in (0, 1):
        negotiator.leave(rank, {})
    assert [negotiator.stuck(now) for now in (0.0, 10.0)] == [None, None]


def test_stuck_names_those_that_are_still_there():
    negotiator = Negotiator(3, GRACE_S)
    negotiator.leave(2, {0: 1})
    negotiator.blocked(0, Blocked((exchange(2),), {0: 2}))
    negotiator.blocked(1, Blocked((exchange(2),), {0: 2}))
    assert negotiator.stuck(0.0) is None
    sentence = negotiator.stuck(GRACE_S)
    assert sentence is not None
    assert "rank 0 waits in exchange 2; rank 1 waits in exchange 2" in sentence
    assert "rank 2" not in sentence


@given(st.lists(st.sampled_from("abcdef"), max_size=6, unique=True), st.randoms(use_true_random=False))
def test_abandon_fails_everything_that_is_pending_once(names, shuffler):
    negotiator = Negotiator(2, GRACE_S)
    for name in names:
        negotiator.submit(shuffler.randrange(2), request(name))
    responses = negotiator.abandon("why")
    assert sorted(r.key[1] for r in responses) == sorted(names)
    assert all(r.error == "why" and not r.peer_lost for r in responses)
    assert negotiator.abandon("why") == []
    # All are taken to run again: nothing is stuck before they say so.
    assert [negotiator.stuck(now) for now in (0.0, 10.0)] == [None, None]
    assert negotiator.submit(0, request("a")) is None


def test_numbers_never_repeat():
    """Answers of every kind draw from one sequence: it becomes the tag of the messages."""
    negotiator, seen = Negotiator(2), []
    for step in range(20):
        negotiator.submit(0, request(str(step)))
        if random.Random(step).random() < 0.3:
            seen += [r.sequence for r in negotiator.abandon("x")]
        else:
            response = negotiator.submit(1, request(str(step)))
            assert response is not None
            seen.append(response.sequence)
    assert seen == sorted(set(seen))


def test_what_a_leaver_has_submitted_is_still_carried_out():
    negotiator = Negotiator(2, GRACE_S)
    negotiator.submit(1, request("x"))
    assert negotiator.leave(1, {}) == []
    answer = negotiator.submit(0, request("x"))
    assert answer is not None
    assert not answer.error
    lost = negotiator.submit(0, request("y"))
    assert lost is not None
    assert lost.peer_lost
