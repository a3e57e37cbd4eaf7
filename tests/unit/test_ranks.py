"""Who takes part, and with which group rank."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from elastic_etcd.core.ranks import assign, choose, natural, order, ranked
from elastic_etcd.core.schema import Labels, Member


def member(lease: int, node: str = "", topology: str = "") -> Member:
    return Member(lease, node or f"n{lease}", nproc=1, labels=Labels(topology or UNSET))


def leases(members: object) -> list[int]:
    return [m.lease for m in members]  # type: ignore[attr-defined]


# Leases in any order, so that it is never theirs by chance that counts.
members = st.lists(
    st.builds(
        member,
        st.integers(1, (1 << 62) - 1),
        st.from_regex(r"node-?[0-9]{0,3}(\.rack[0-9]+)?", fullmatch=True),
        st.sampled_from(["", "r1", "r2", "r10"]),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda m: m.lease,
)


def test_natural_order() -> None:
    names = ["node10", "node2", "node1", "node2b", "a", "", "10", "9", "node02"]
    assert sorted(names, key=natural) == [
        *("", "9", "10", "a"),
        *("node1", "node2", "node02", "node2b", "node10"),
    ]


@given(st.lists(st.text(max_size=6), max_size=6))
def test_natural_order_is_total(names: list[str]) -> None:
    up = [natural(name) for name in sorted(names, key=natural)]
    down = [natural(name) for name in sorted(names, key=natural, reverse=True)]
    assert up == down[::-1]


def test_topology_comes_before_the_name() -> None:
    a, b = member(1, "node1", "rack10"), member(2, "node2", "rack2")
    assert order([a, b, member(3, "node3")]) == [member(3, "node3"), b, a]


def test_of_the_same_name_the_older_lease_comes_first() -> None:
    assert leases(order([member(9, "n"), member(4, "n")])) == [4, 9]


def test_of_survivors_without_a_place_none_is_the_coordinator() -> None:
    a, b, c, new = member(1), member(2), member(3), member(4)
    assert leases(choose([new, c, b, a], [1, 2, 3], coordinator=3, most=2)) == [3, 1]
    assert leases(choose([new, c, b, a], [1, 2, 3], coordinator=4, most=2)) == [1, 2]


def test_survivors_keep_their_group_rank() -> None:
    a, c, d = member(1), member(3), member(4)
    assert leases(assign([d, c, a], group_ranks=[1, 2, 3])) == [1, 4, 3]


def test_a_newcomer_takes_the_first_free_group_rank() -> None:
    assert leases(assign([member(1), member(4), member(5)], group_ranks=[1, 2, 3])) == [1, 4, 5]


def test_group_rank_0_is_a_survivor_s() -> None:
    assert leases(assign([member(3), member(4)], group_ranks=[1, 2, 3])) == [3, 4]
    assert leases(assign([member(2), member(3), member(4)], group_ranks=[1, 2, 3])) == [2, 4, 3]
    assert leases(assign([member(7), member(8)], group_ranks=[1, 2, 3])) == [7, 8]


def test_ranks_close_up() -> None:
    assert leases(assign([member(3), member(1)], group_ranks=[1, 2, 3])) == [1, 3]


def test_more_newcomers_than_free_ranks_come_behind() -> None:
    chosen = [member(1), member(3), member(6, "node10"), member(5, "node9"), member(4, "node11")]
    assert leases(assign(chosen, group_ranks=[1, 2, 3])) == [1, 5, 3, 6, 4]


def test_a_node_that_comes_back_is_a_newcomer() -> None:
    assert leases(assign([member(1), member(7, "n2"), member(3)], group_ranks=[1, 2, 3])) == [
        1,
        7,
        3,
    ]
    assert leases(assign([member(2), member(7, "n1")], group_ranks=[1, 2])) == [2, 7]


def test_choose_takes_survivors_first_and_then_the_coordinator() -> None:
    ready = [member(1, "node1"), member(2, "node2"), member(5, "node5"), member(6, "node6")]
    assert leases(choose(ready, group_ranks=[6, 5], coordinator=2, most=3)) == [6, 5, 2]
    assert leases(choose(ready, group_ranks=[], coordinator=6, most=2)) == [6, 1]
    assert leases(choose(ready, group_ranks=[9], coordinator=9, most=2)) == [1, 2]


@given(members, st.data())
def test_a_world_is_a_permutation_in_which_survivors_stay_in_order(
    ready: list[Member], data: st.DataObject
) -> None:
    gone = data.draw(st.lists(st.integers(1 << 62, 1 << 63), max_size=4, unique=True))
    old = data.draw(st.lists(st.sampled_from(leases(ready)), unique=True))
    ranks = data.draw(st.permutations([*gone, *old]))
    most = data.draw(st.integers(1, 10))
    coordinator = data.draw(st.sampled_from(leases(ready)))

    chosen = choose(ready, ranks, coordinator, most)
    world = assign(chosen, ranks)

    assert sorted(leases(world)) == sorted(leases(chosen))
    assert len(world) == min(most, len(ready))
    survivors = [m.lease for m in world if m.lease in ranks]
    assert survivors == [lease for lease in ranks if lease in survivors]
    if len(world) >= len(ranks):  # nobody has to close up
        for lease in survivors[1:]:
            assert leases(world).index(lease) == ranks.index(lease)
    if survivors:
        assert world[0].lease == survivors[0]
    if len(old) < most:
        assert set(old) <= set(survivors)
        assert coordinator in leases(world)
    # Who comes later in `ready` changes nothing: all agents would choose the same.
    assert assign(choose(list(reversed(ready)), ranks, coordinator, most), ranks) == world


def test_nodes_of_different_sizes_have_ranks_one_after_the_other() -> None:
    world = [Member(lease, f"n{lease}", nproc) for lease, nproc in ((3, 4), (1, 2), (2, 3))]
    placed = [(p.lease, p.nproc, p.group_rank, p.first_rank) for p in ranked(world)]
    assert placed == [(3, 4, 0, 0), (1, 2, 1, 4), (2, 3, 2, 6)]


def test_p1_each_role_has_ranks_of_its_own() -> None:
    roles = ((3, 4, "trainer"), (1, 2, ""), (2, 3, "trainer"))
    world = [Member(lease, "n", nproc, labels=Labels(role=role)) for lease, nproc, role in roles]
    assert [(p.role_rank, p.role_size) for p in ranked(world)] == [(0, 7), (0, 2), (4, 7)]
    same = [replace(member, labels=Labels(role="trainer")) for member in world]
    assert {(p.role_rank, p.role_size) for p in ranked(same)} == {(UNSET, UNSET)}
