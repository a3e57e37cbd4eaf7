"""A job's keys in every phase, to be spoilt, and what its coordinator does with them then."""

from elastic_etcd.core import history, lifecycle, writes
from elastic_etcd.core.events import Viewed, Write
from elastic_etcd.core.keys import Keys, encode
from elastic_etcd.core.lifecycle import State
from elastic_etcd.core.rules import Limits, Me
from elastic_etcd.core.txn import KeyValue, Put, Snapshot
from elastic_etcd.core.values import (
    Ack,
    Failure,
    Ledger,
    Member,
    Participant,
    Phase,
    Report,
    Round,
    Spec,
)
from elastic_etcd.core.view import EVERYTHING, view_of
from elastic_etcd.etcd import wire

KEYS = Keys("/elastic_etcd/j")
A, B = 0xA, 0xB
WORLD = (Participant(A, "n1", 1), Participant(B, "n2", 1))
MASTER = ("10.0.0.1", 4242)
FAILURE = Failure("n2", 1, 0, 42, 1, 12.5, "Traceback", "now")
ENTRY = {"generation": 3, "nodes": ["n1"], "world_size": 1, "began": "why", "run": "r"}
MEMBERS = {lease: Member(lease, f"n{lease:x}", 1, "10.0.0.1", run="r") for lease in (A, B)}


def job(phase: Phase, failed: bool = False) -> dict[str, str]:
    """The keys of a job of two in generation 4, after a world in generation 3."""
    world = phase in (Phase.FROZEN, Phase.FINAL)
    final = phase is Phase.FINAL
    now = Round(4, phase, A, "why", "r", WORLD if world else (), MASTER if final else None)
    last = 4 if final else 3
    report = Report(B, 0, FAILURE if failed else None)
    return {
        KEYS.spec: Spec("r", 1, 2).encode(),
        KEYS.member(A): MEMBERS[A].encode(),
        KEYS.member(B): MEMBERS[B].encode(),
        KEYS.generation: Ledger(4, last, (A, B), ("n1", "n2")).encode(),
        KEYS.round: now.encode(),
        KEYS.ack(4, A): Ack(A, MASTER).encode(),
        KEYS.ack(4, B): Ack(B, MASTER).encode(),
        KEYS.report(last, B): report.encode(),
        KEYS.history(last): encode(ENTRY),
    }


ME = Me("r", A, 2, 2, acked=4)
JOBS = [job(phase, failed) for phase in Phase for failed in (False, True)]


def acts(found: dict[str, str], me: Me) -> None:
    """What the coordinator writes then: Txns that etcd takes, of values that can be read."""
    kvs = {k: KeyValue(k, v, 2, 3 + i, 0) for i, (k, v) in enumerate(found.items())}
    view = view_of(Snapshot(99, kvs), KEYS, EVERYTHING)
    assert all(len(line) < 1000 for line in view.malformed)
    state, actions = lifecycle.step(State(me, 1), Viewed(view), 1000.0, Limits(1, 2, settle=0))
    for action in actions:
        if isinstance(action, Write):
            txn = writes.build(KEYS, state, action, MEMBERS[A], MASTER, "now")
            assert wire.txn_request(txn).ByteSize() < 1 << 20
            written = [put for put in txn.then if isinstance(put, Put)]
            values = {p.key: KeyValue(p.key, p.value, 2, 3, p.lease) for p in written}
            again = view_of(Snapshot(100, values), KEYS, EVERYTHING)
            assert not again.malformed
            assert all(history.read(value) for _, value in again.history)


def step(found: dict[str, str], me: Me, *, finished: bool = False) -> list[Write]:
    """What the agent writes that sees these keys."""
    kvs = {k: KeyValue(k, v, 2, 3 + i, 0) for i, (k, v) in enumerate(found.items())}
    view = view_of(Snapshot(99, kvs), KEYS, EVERYTHING)
    state = State(me, 1, finished=finished)
    _, actions = lifecycle.step(state, Viewed(view), 0.0, Limits(1, 2))
    return [action for action in actions if isinstance(action, Write)]
