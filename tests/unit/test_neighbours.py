"""The judgement of nodes that are checked at the same time."""

import pytest

from elastic_etcd.agent.neighbours import slower, unreached
from elastic_etcd.core.schema import Checked, Measured, PeerCall

CPU = "processor (MB/s of blake2b)"


def node(name: str, speed: float = 0.0, **calls: str | float) -> Checked:
    """A node that has called others, by the numbers of their leases: an error, or a speed."""
    made = [
        PeerCall(int(lease[1:]), told)
        if isinstance(told, str)
        else PeerCall(int(lease[1:]), "", told)
        for lease, told in calls.items()
    ]
    return Checked(name, f"{name}.example", 0, (Measured(CPU, speed),), tuple(made))


def faults(own: int, nodes: dict[int, Checked]) -> list[str]:
    others = {lease: each for lease, each in nodes.items() if lease != own}
    given = (own, nodes[own], others)
    return [*unreached(*given), *slower(*given)]


def bad(nodes: dict[int, Checked]) -> set[int]:
    """The nodes that find themselves unfit."""
    return {lease for lease in nodes if faults(lease, nodes)}


def test_a_node_that_is_slower_than_half_the_median_of_three_others_is_unfit() -> None:
    nodes = {i: node(f"n{i}", speed) for i, speed in enumerate((49, 100, 100, 3000), 1)}
    (why,) = faults(1, nodes)
    assert why.startswith(f"{CPU}: 49, and the median of 3 others is 100, of which 1/2 is asked ")
    assert bad(nodes) == {1}
    assert bad({lease: nodes[lease] for lease in (1, 2, 4)}) == set(), "too few to judge by"
    assert bad(nodes | {1: node("n1", 51)}) == set()


def test_a_disk_may_be_ten_times_slower() -> None:
    def with_disk(speed: float) -> Checked:
        return Checked("n", speeds=(Measured("disk of --log-dir (MB/s)", speed),))

    nodes = {1: with_disk(11), 2: with_disk(100), 3: with_disk(100), 4: with_disk(100)}
    assert bad(nodes) == set()
    assert bad(nodes | {1: with_disk(9)}) == {1}


def test_another_model_is_not_compared() -> None:
    def gpu(model: str, speed: float) -> Checked:
        return Checked("n", speeds=(Measured(f"cuda:0 {model} product (GFLOP/s)", speed),))

    nodes = {lease: gpu("A" if lease < 4 else "H", 1.0 if lease < 4 else 9.0) for lease in range(9)}
    assert bad(nodes) == set()
    assert bad(nodes | {8: gpu("H", 4.0)}) == {8}


def test_who_nobody_reaches_is_unfit_and_said_to_be_so_by_one_who_reaches_others() -> None:
    nodes = {
        1: node("n1", _2="no answer", _3=0.0),
        2: node("n2", _3="no answer", _4="no answer"),
        3: node("n3", _4=0.0, _1=0.0),
        4: node("n4", _1=0.0, _2="no answer"),
    }
    (why,) = faults(2, nodes)
    assert why.startswith("n1 can't connect to n2.example: no answer: ")
    assert bad(nodes) == {2}


@pytest.mark.parametrize("both", [False, True])
def test_of_two_that_do_not_reach_each_other_neither_is_to_blame(both: bool) -> None:
    """But one that can call the other, and can't be called, is."""
    nodes = {1: node("n1", _2="refused"), 2: node("n2", _1="refused" if both else 0.0)}
    assert bad(nodes) == (set() if both else {2})


def test_one_call_that_is_answered_is_enough() -> None:
    nodes = {1: node("n1", _3="refused", _2=0.0), 2: node("n2", _3=0.0), 3: node("n3", _1=0.0)}
    assert bad(nodes) == set()


def test_who_comes_alone_passes() -> None:
    assert bad({1: node("n1", 1.0)}) == set()
    assert bad({1: node("n1", 1.0), 2: node("n2", 100.0, _1="it was gone already")}) == set()


def test_a_slow_way_to_all_is_of_the_node_and_to_some_of_these() -> None:
    """4 and 5 are slow, and 3 calls none but these."""
    nodes = {
        1: node("n1", _2=99.0, _3=101.0),
        2: node("n2", _3=98.0, _4=9.0),
        3: node("n3", _4=8.0, _5=9.0),
        4: node("n4", _5=9.0, _6=8.0),
        5: node("n5", _6=9.0, _7=9.0),
        6: node("n6", _7=105.0, _1=101.0),
        7: node("n7", _1=103.0, _2=100.0),
    }
    assert bad(nodes) == {4, 5}
    (why,) = faults(4, nodes)
    assert why.startswith("network (MB/s): 9, and the median of ")
