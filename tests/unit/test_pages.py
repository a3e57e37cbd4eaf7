"""A world of any size on pages: each agent reads one of them, and finds itself there."""

import pytest

from elastic_etcd.core import writes
from elastic_etcd.core.lifecycle import State, Write
from elastic_etcd.core.ranks import ranked
from elastic_etcd.core.rules import Elapsed, Finalise, Local, Run, decide
from elastic_etcd.core.schema import (
    MOST_PAGES,
    ON_A_PAGE,
    Keys,
    Ledger,
    Limits,
    Master,
    Member,
    Phase,
    Ready,
    Round,
    Spec,
    encode,
)
from elastic_etcd.core.txn import Put, Txn
from elastic_etcd.core.view import Everything, Narrow, covered, view_of
from elastic_etcd.etcd import wire
from tests.support.keyspace import KeySpace

KEYS = Keys("/elastic_etcd/j")
FIRST = 0x694D8F5A8F2C1A07
MASTER = Master("10.0.0.1", 4242)
TXN = 1_500_000  # bytes; etcd refuses more than 1.5 MiB
READ = 20_000  # bytes of an agent's keys, at any size


def members(number: int) -> list[Member]:
    return [Member(FIRST + n, f"trainer-{n}.ml.internal", 8, run="r") for n in range(number)]


def final(number: int) -> tuple[KeySpace, Txn]:
    """A job of so many nodes, whose world has just become final; and the Txn that made it so."""
    space, of = KeySpace(revision=1), members(number)
    ready = encode(Ready(FIRST, MASTER))
    space.txn(Txn((), tuple(Put(KEYS.member(m.lease), encode(m), m.lease) for m in of)))
    space.txn(Txn((), tuple(Put(KEYS.ack(1, m.lease), ready, m.lease) for m in of)))
    frozen = Round(1, Phase.FROZEN, FIRST, "why", "r", of[0].node)
    values = {KEYS.spec: Spec("r", Limits(1, number)), KEYS.ledger: Ledger(1), KEYS.round: frozen}
    space.txn(Txn((), tuple(Put(key, encode(value)) for key, value in values.items())))
    view = view_of(space.read(*covered(KEYS, Everything())), KEYS, Everything())
    local = Local("r", FIRST, space.kvs[KEYS.member(FIRST)].create, 1, acked=1)
    decision = decide(view, local, Limits(1, number), Elapsed(0, 0))
    assert isinstance(decision, Finalise)
    state = State(local, 8, view=view, limits=Limits(1, number))
    txn = writes.build(KEYS, state, Write(decision, FIRST), of[0], None, "now")
    assert space.txn(txn)
    return space, txn


@pytest.mark.parametrize("number", [1, 128, 129, 700])
def test_every_agent_finds_itself_on_its_page(number: int) -> None:
    space, _ = final(number)
    pages = Limits(1, number).pages
    world = {p.lease: p for p in ranked(members(number))}
    assert sum(key.startswith(KEYS.world) for key in space.kvs) == pages
    for member in members(number):
        coverage = Narrow(FIRST, member.lease % pages)
        view = view_of(space.read(*covered(KEYS, coverage, member.lease)), KEYS, coverage)
        decision = decide(view, Local("r", member.lease, acked=1), Limits(1, number), Elapsed(0, 0))
        assert isinstance(decision, Run)
        assert decision.part == world[member.lease]
        assert (decision.round.nodes, decision.round.world_size) == (number, 8 * number)


def test_ten_thousand_nodes_fit_and_each_reads_little() -> None:
    space, txn = final(10_000)
    assert wire.txn_request(txn).ByteSize() < TXN
    for lease in range(FIRST, FIRST + MOST_PAGES):
        gets = covered(KEYS, Narrow(FIRST, lease % MOST_PAGES), lease)
        assert sum(len(kv.value) for kv in space.read(*gets).kvs.values()) < READ


def test_who_joins_reads_no_more_of_a_larger_job() -> None:
    few, many = (len(final(number)[0].read(*writes.look(KEYS)).kvs) for number in (200, 1_000))
    assert few == many


def test_a_job_of_many_nodes_has_many_pages_from_the_first_world_on() -> None:
    """Also in a small world: else each node would have to look for its page when it changes."""
    sizes = (1, ON_A_PAGE, ON_A_PAGE + 1, 513, 10_000)
    assert [Limits(1, most).pages for most in sizes] == [1, 1, 2, 9, MOST_PAGES]
    space, _ = final(300)
    view = view_of(space.read(*covered(KEYS, Everything())), KEYS, Everything())
    assert len(view.world) == 300
    assert view.round
    smaller = Finalise("why", view.round, Ledger(2, 2, 1), ranked(members(1)))
    local = Local("r", FIRST, space.kvs[KEYS.member(FIRST)].create, 1)
    state = State(local, 8, view=view, limits=Limits(1, 300))
    before = {key for key in space.kvs if key.startswith(KEYS.world)}
    assert space.txn(writes.build(KEYS, state, Write(smaller, FIRST), members(1)[0], None, "now"))
    assert {key for key in space.kvs if key.startswith(KEYS.world)} == before
    view = view_of(space.read(*covered(KEYS, Everything())), KEYS, Everything())
    assert len(view.world) == 1
