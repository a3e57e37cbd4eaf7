"""Who keeps copies of whose pieces."""

import random
from collections import Counter

import pytest

from elastic_etcd.train.sharded.pieces import Place, partners


def drawn(seed: int) -> tuple[list[Place], int]:
    """A world of nodes with workers, labels and replicas, of which some leave."""
    draws = random.Random(seed)
    nodes, workers = draws.randint(1, 9), draws.randint(1, 3)
    labels = [draws.randrange(3) for _ in range(nodes)]
    leaves = [draws.random() < 0.2 for _ in range(nodes)]
    tables = draws.choice([nodes * workers, max(1, nodes * workers // 2)])  # or two replicas each
    places = [
        Place(rank // workers, labels[rank // workers], rank % tables, leaves[rank // workers])
        for rank in range(nodes * workers)
    ]
    return places, draws.randint(1, 4)


@pytest.mark.parametrize("seed", range(300))
def test_each_piece_is_on_as_many_nodes_as_can_be_and_no_more(seed: int) -> None:
    places, copies = drawn(seed)
    plan = partners(places, copies)
    staying = {place.node for place in places if not place.leaves}
    replicas: dict[int, set[int]] = {}
    having: dict[int, list[int]] = {}
    for place, to in zip(places, plan, strict=True):
        assert place.node not in {places[rank].node for rank in to}
        assert not any(places[rank].leaves for rank in to)
        having.setdefault(place.table, []).extend(places[rank].node for rank in to)
        replicas.setdefault(place.table, set()).update({place.node} & staying)
    for table, copied in having.items():
        assert not replicas[table] & {*copied}
        assert len(copied) == len({*copied})
        wanted = max(len(replicas[table]), min(copies, len(staying)))
        assert len(replicas[table]) + len(copied) == wanted
        label_of = {place.node: place.label for place in places}
        labels = {label_of[node] for node in (*replicas[table], *copied)}
        others = {label_of[node] for node in staying}
        assert not copied or labels == others or len(copied) < copies or len(labels) >= len(copied)


@pytest.mark.parametrize("labels", ["aabb", "abab", "abcabc", "aaab"])
def test_a_copy_is_on_a_node_with_another_label(labels: str) -> None:
    places = [Place(node, ord(label), node, False) for node, label in enumerate(labels)]
    for place, to in zip(places, partners(places, 2), strict=True):
        assert [places[rank].label != place.label for rank in to] == [True]


@pytest.mark.parametrize("nodes", range(2, 10))
@pytest.mark.parametrize("workers", [1, 2, 8])
@pytest.mark.parametrize("copies", [2, 3])
def test_without_labels_nodes_keep_alike_and_one_nodes_pieces_together(
    nodes: int, workers: int, copies: int
) -> None:
    places = [Place(rank // workers, 0, rank, False) for rank in range(nodes * workers)]
    plan = partners(places, copies)
    kept = Counter(rank for to in plan for rank in to)
    assert set(kept.values()) == {min(copies, nodes) - 1}
    keepers = {(place.node, places[to[0]].node) for place, to in zip(places, plan, strict=True)}
    assert len(keepers) == nodes
