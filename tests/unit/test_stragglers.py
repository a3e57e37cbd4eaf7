"""Which nodes are slow: the coordinator's line, when it is said, and what it needs for that."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from elastic_etcd.core import stragglers, writes
from elastic_etcd.core.rules import Local
from elastic_etcd.core.schema import (
    History,
    Keys,
    Limits,
    Master,
    Participant,
    Phase,
    Round,
    StepTime,
    Stragglers,
    decode,
    encode,
)
from elastic_etcd.core.stragglers import NodeTimes
from elastic_etcd.core.txn import KeyValue, Put, Snapshot
from elastic_etcd.core.view import Everything, Narrow, View, view_of

KEYS = Keys("/elastic_etcd/j")
NOBODY = Stragglers()
FACTOR = 1.5


def nodes(*outside: float, whole: float = 1.0) -> list[NodeTimes]:
    return [NodeTimes(f"n{number}", time, whole) for number, time in enumerate(outside, 1)]


def compared(
    known: Stragglers, generation: int, nodes: list[NodeTimes], factor: float
) -> Stragglers | None:
    """The line as if all that have turned had been so for long."""
    turned = stragglers.turned(known, nodes, factor)
    return stragglers.compared(known, generation, nodes, turned) if turned else None


def test_the_node_that_is_slow_is_named_with_the_figures() -> None:
    found = compared(NOBODY, 3, nodes(*[0.57] * 15, 0.91), FACTOR)
    assert found == Stragglers(
        3,
        1,
        "n16 is slow: 0.91 s a step outside of collectives, 1.6 x the median of 16 nodes "
        "(0.57 s), over the last 50 steps or more",
        ("n16",),
    )


def test_of_two_nodes_the_median_is_the_faster_one() -> None:
    found = compared(NOBODY, 1, nodes(0.02, 0.04, whole=0.05), FACTOR)
    assert found
    assert found.line.startswith("n2 is slow: 40.0 ms a step outside of collectives, 2.0 x the")


@pytest.mark.parametrize(
    "times",
    [
        [0.5, 0.5],
        [0.5, 0.74],
        [0.5, 0.5, 0.75],  # not more than the factor
        [0.04, 0.12],  # 2 s of each step are the network's
        [0.1, 0.25],  # together they take more than a tenth of it
        [0.0, 0.1],
        [0.0, 0.0],
        [0.5, 0.509],
    ],
)
def test_nobody_is_named(times: list[float]) -> None:
    assert compared(NOBODY, 1, nodes(*times, whole=2.0), FACTOR) is None


@pytest.mark.parametrize("times", [(0.003, 0.006), (0.0106, 0.0069), (0.0097, 0.0048)])
def test_n4_a_few_milliseconds_are_a_busy_machines(times: tuple[float, float]) -> None:
    assert compared(NOBODY, 1, nodes(*times, whole=0.012), FACTOR) is None


def test_n4_what_has_not_lasted_is_not_told_with_what_has() -> None:
    both = nodes(0.5, 0.5, 0.5, 0.9, 0.8)
    assert stragglers.turned(NOBODY, both, FACTOR) == {"n4", "n5"}
    found = stragglers.compared(NOBODY, 1, both, ["n5"])
    assert found.line.startswith("n5 is slow: 0.80 s")
    assert found.nodes == ("n5",)
    mended = nodes(0.5, 0.5, 0.5, 0.9, 0.5)
    assert stragglers.turned(found, mended, FACTOR) == {"n4", "n5"}
    assert stragglers.compared(found, 1, mended, ["n4"]).nodes == ("n5", "n4")


def test_what_is_a_tenth_of_a_step_counts() -> None:
    found = compared(NOBODY, 1, nodes(0.0, 0.1), FACTOR)
    assert found
    assert found.nodes == ("n2",)


def test_several_nodes_are_one_line() -> None:
    found = compared(NOBODY, 1, nodes(*[0.5] * 6, 0.9, 0.8), FACTOR)
    assert found
    assert found.line.startswith("n7 and n8 are slow: up to 0.90 s a step")
    assert found.nodes == ("n7", "n8")
    found = compared(NOBODY, 1, nodes(*[0.5] * 6, 0.9, 0.8, 0.9), FACTOR)
    assert found
    assert found.line.startswith("n7, n9 and n8 are slow: up to 0.90 s a step")
    found = compared(NOBODY, 1, nodes(*[0.5] * 2000, *[0.9] * 1500), FACTOR)
    assert found
    assert found.line.startswith("n2001, n2002, n2003 and 1497 more nodes are slow: up to ")
    assert decode(Stragglers, encode(found)) == found


def test_it_is_told_once_and_that_it_is_over() -> None:
    first = compared(NOBODY, 1, nodes(0.5, 0.5, 0.9), FACTOR)
    assert first
    assert compared(first, 1, nodes(0.5, 0.5, 0.9), FACTOR) is None
    assert compared(first, 2, nodes(0.5, 0.5, 2.9), FACTOR) is None
    assert compared(first, 1, nodes(0.5, 0.5, 0.7), FACTOR) is None, "it is at the border"
    over = compared(first, 2, nodes(0.5, 0.5, 0.6), FACTOR)
    assert over == Stragglers(2, 2, "n3 is as fast as the others again", ())
    again = compared(over, 2, nodes(0.5, 0.5, 0.9), FACTOR)
    assert again
    assert (again.number, again.nodes) == (3, ("n3",))


def test_a_node_that_is_gone_is_forgotten_with_the_next_line() -> None:
    known = Stragglers(1, 1, "n9 is slow ...", ("n9",))
    assert compared(known, 2, nodes(0.5, 0.5), FACTOR) is None
    found = compared(known, 2, nodes(0.5, 0.5, 0.9), FACTOR)
    assert found
    assert found.nodes == ("n3",)


times = st.lists(st.floats(0, 1e6), min_size=2, max_size=9)


@given(times, st.floats(1.01, 100))
def test_most_nodes_are_never_slow(outside: list[float], factor: float) -> None:
    found = compared(NOBODY, 1, nodes(*outside), factor)
    if found:
        assert len(found.nodes) <= len(outside) // 2
        assert "\n" not in found.line
        settled = compared(found, 1, nodes(*outside), factor)
        assert settled is None or settled.number == 2


# --- what the coordinator sees and writes

WORLD = tuple(Participant(0xA + n, f"n{n + 1}", 2, n, 2 * n) for n in range(4))
NOW = Round(3, Phase.FINAL, 0xA, "why", "r", "n1", 4, 8, Master("n1", 80))
LOCAL = Local("r", 0xA, 2, 2, acked=3, running=3)


def time(lease: int, outside: float, generation: int = 3) -> StepTime:
    return StepTime(lease, generation, outside, 1.0)


def view(*times: StepTime, **more: Any) -> View:
    found = View(9, Everything(), round=NOW, round_mod=7, world=WORLD, step_times=times)
    return replace(found, **more)


def test_more_than_half_of_the_nodes_have_told() -> None:
    two = time(0xA, 0.5), time(0xB, 0.9)
    assert not stragglers.measured(view(*two))
    older = time(0xC, 0.5, generation=2)
    stranger = time(0xF, 0.5)
    assert not stragglers.measured(view(*two, older, stranger))
    found = compared(NOBODY, 3, stragglers.measured(view(*two, time(0xC, 0.5))), FACTOR)
    assert found
    assert "n2 is slow" in found.line
    assert "the median of 3 nodes" in found.line


def test_nodes_are_compared_where_there_are_some() -> None:
    assert Limits(1, 4).seek_stragglers(2)
    assert not Limits(1, 4, straggler_factor=0.0).seek_stragglers(2)
    assert not Limits(1, 4).seek_stragglers(1)


def test_the_line_is_in_the_history_and_fenced() -> None:
    entry = encode(History(3, "r", "why", stragglers=tuple("12345678")))
    found = Stragglers(3, 2, "n2 is slow ...", ("n2",))
    seen = view(history=((3, entry),), stragglers_mod=5)
    txn = writes.put_stragglers(KEYS, seen, LOCAL, found)
    key, history = (put for put in txn.then if isinstance(put, Put))
    assert (key.key, decode(Stragglers, key.value), key.lease) == (KEYS.stragglers, found, 0)
    assert decode(History, history.value).stragglers == (*"2345678", "n2 is slow ...")
    assert {(c.key, c.value) for c in txn.compare} == {
        (KEYS.round, 7),
        (KEYS.member(0xA), 2),
        (KEYS.stragglers, 5),
    }


def test_everybody_reads_the_line_and_the_coordinator_the_times() -> None:
    found, slow = time(0xB, 0.9), Stragglers(3, 2, "n2 is slow ...", ("n2",))
    txn = writes.put_own(KEYS, replace(LOCAL, lease=0xB), KEYS.step_time(0xB), found)
    (put,) = (put for put in txn.then if isinstance(put, Put))
    assert (put.key, put.lease) == (KEYS.step_time(0xB), 0xB)
    kvs = {put.key: put.value, KEYS.stragglers: encode(slow)}
    seen = Snapshot(9, {key: KeyValue(key, value, 1, 8, 1) for key, value in kvs.items()})
    whole = view_of(seen, KEYS, Everything())
    assert (whole.step_times, whole.stragglers, whole.stragglers_mod) == ((found,), slow, 8)
    narrow = view_of(seen, KEYS, Narrow())
    assert (narrow.step_times, narrow.stragglers) == ((), slow)
