"""A job's keys in every phase, to be spoilt, and what its coordinator does with them then."""

from elastic_etcd.core import lifecycle, writes
from elastic_etcd.core.lifecycle import Finished, Life, State, ViewChanged, Write
from elastic_etcd.core.rules import Local
from elastic_etcd.core.schema import (
    Drain,
    Failure,
    Halt,
    Hang,
    History,
    Keys,
    Ledger,
    Limits,
    Master,
    Member,
    NodeSteps,
    Page,
    Participant,
    Phase,
    RankDoing,
    RankStep,
    Ready,
    Report,
    Requests,
    Round,
    Scale,
    Spec,
    decode,
    encode,
)
from elastic_etcd.core.txn import KeyValue, Put, Snapshot
from elastic_etcd.core.view import Everything, view_of
from elastic_etcd.etcd import wire

KEYS = Keys("/elastic_etcd/j")
A, B = 0xA, 0xB
WORLD = (Participant(A, "n1", 1, 0, 0), Participant(B, "n2", 1, 1, 1))
MASTER = Master("10.0.0.1", 4242)
FAILURE = Failure("n2", 1, 0, 42, 1, 12.5, "Traceback", "now")
ENTRY = History(3, "r", "why", nodes=("n1",), world_size=1)
MEMBERS = {lease: Member(lease, f"n{lease:x}", 1, "10.0.0.1", run="r") for lease in (A, B)}

SCALE = Scale(1, 4, (1, 4), run="r", instead_of="1:2")
ROUND = Round(4, Phase.FINAL, A, "why", "r", "n1", 2, 2, MASTER)
LEDGER = Ledger(4, 4)
PAGE = Page(4, WORLD)


def job(phase: Phase, failed: bool = False) -> dict[str, str]:
    """The keys of a job of two in generation 4, after a world in generation 3."""
    final = phase is Phase.FINAL
    now = ROUND if final else Round(4, phase, A, "why", "r", "n1")
    last = 4 if final else 3
    report = Report(B, 0, FAILURE if failed else None)
    return {
        KEYS.spec: encode(Spec("r", Limits(1, 2))),
        KEYS.member(A): encode(MEMBERS[A]),
        KEYS.member(B): encode(MEMBERS[B]),
        KEYS.ledger: encode(Ledger(4, last)),
        KEYS.page(0): encode(Page(last, WORLD)),
        KEYS.round: encode(now),
        KEYS.ack(4, A): encode(Ready(A, MASTER)),
        KEYS.ack(4, B): encode(Ready(B, MASTER)),
        KEYS.report(last, B): encode(report),
        KEYS.hang: encode(Hang(last, 2, 60.0)),
        KEYS.wanted: encode(Requests((Drain("n9", 60.0),), Halt("r0"), SCALE)),
        KEYS.step(4, B): encode(
            NodeSteps(B, 2, (RankStep(1, 6, RankDoing.STEP, 61.0, "train.py:9"),))
        ),
        KEYS.history(last): encode(ENTRY),
    }


LOCAL = Local("r", A, 2, 2, acked=4)
JOBS = [job(phase, failed) for phase in Phase for failed in (False, True)]


def snapshot(found: dict[str, str]) -> Snapshot:
    """The keys as they are read."""
    kvs = {k: KeyValue(k, v, 2, 3 + i, 0) for i, (k, v) in enumerate(found.items())}
    return Snapshot(99, kvs)


def acts(found: dict[str, str], local: Local) -> None:
    """What the coordinator writes then: Txns that etcd takes, of values that can be read."""
    view = view_of(snapshot(found), KEYS, Everything())
    assert all(len(line) < 1000 for line in view.malformed)
    state, actions = lifecycle.step(
        State(local, 1, Life.MEMBER, limits=Limits(1, 2, settle=0)), ViewChanged(view), 1000.0
    )
    for action in actions:
        if isinstance(action, Write):
            txn = writes.build(KEYS, state, action, MEMBERS[A], MASTER, "now")
            assert wire.txn_request(txn).ByteSize() < 1 << 20
            written = [put for put in txn.then if isinstance(put, Put)]
            values = {p.key: KeyValue(p.key, p.value, 2, 3, p.lease) for p in written}
            again = view_of(Snapshot(100, values), KEYS, Everything())
            assert not again.malformed
            assert all(decode(History, value) for _, value in again.history)


def step(found: dict[str, str], local: Local, *, finished: bool = False) -> list[Write]:
    """What the agent writes that sees these keys."""
    view = view_of(snapshot(found), KEYS, Everything())
    state = State(
        local, 1, Life.MEMBER, limits=Limits(1, 2), result=Finished() if finished else None
    )
    _, actions = lifecycle.step(state, ViewChanged(view), 0.0)
    return [action for action in actions if isinstance(action, Write)]
