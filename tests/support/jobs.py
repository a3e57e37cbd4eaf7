"""A job's keys as agents leave them, for what only reads them."""

from collections.abc import Mapping

from elastic_etcd.core.schema import (
    Drain,
    Failure,
    History,
    Keys,
    Ledger,
    Limits,
    Master,
    Member,
    Outcome,
    Page,
    Participant,
    Phase,
    Requests,
    Round,
    Spec,
    Spent,
    encode,
)
from elastic_etcd.core.txn import KeyValue, Snapshot
from elastic_etcd.core.view import Everything, View, view_of

KEYS = Keys("/elastic_etcd/j")
HOSTILE = "<script>\x1b[2J&\"'"  # a node's name, as whoever may write keys can make it
FAILURE = Failure("n2", 1, 0, 4388, 1, 61.5, "RuntimeError: why", "2026-11-21T10:01:05.500+00:00")
SPENT = Spent(
    steps=600,
    commits=60,
    rendezvous=3.0,
    start=1.5,
    first_step=0.5,
    trained=60.0,
    again=0.9,
    detect=0.25,
    stop=0.75,
)
FIRST = History(
    generation=1,
    run="r",
    began="the job begins",
    began_at="2026-11-21T10:00:03.000+00:00",
    coordinator="n1",
    nodes=("n1", "n2"),
    world_size=2,
    restarts=0,
    ended=str(FAILURE),
    ended_at="2026-11-21T10:01:05.510+00:00",
    failures=(FAILURE,),
    spent=SPENT,
)
SECOND = History(
    generation=2,
    run="r",
    began=str(FAILURE),
    began_at="2026-11-21T10:01:06.500+00:00",
    coordinator="n1",
    nodes=("n1", HOSTILE),
    world_size=2,
    restarts=1,
    hangs=("rank 1 on n2 is in step 7 for 62 s",),
    stragglers=("n2 is as fast as the others again",),
    divergences=("replicas differ: rank 2 on n2: model.0.weight; the other 2 ranks agree",),
    spent_before=SPENT,
)
FINAL = Round(
    generation=2,
    phase=Phase.FINAL,
    coordinator=0xA,
    reason=str(FAILURE),
    run="r",
    node="n1",
    nodes=2,
    world_size=2,
    master=Master("10.0.0.1", 4242),
    restarts=1,
)
RUNNING = {
    KEYS.spec: encode(Spec("r", Limits(1, 2))),
    KEYS.round: encode(FINAL),
    KEYS.ledger: encode(Ledger(2, 2, 2, restarts=1)),
    KEYS.page(0): encode(
        Page(2, (Participant(0xA, "n1", 1, 0, 0), Participant(0xB, HOSTILE, 1, 1, 1)))
    ),
    KEYS.member(0xA): encode(Member(0xA, "n1", 1, run="r")),
    KEYS.member(0xB): encode(Member(0xB, HOSTILE, 1, run="r")),
    KEYS.history(1): encode(FIRST),
    KEYS.history(2): encode(SECOND),
    KEYS.wanted: encode(Requests((Drain("n9", by="ann@login", at="2026-11-21T10:01:07+00:00"),))),
}
ENDED = "succeeded: every participant is done"
OUTCOME = Outcome(
    "succeeded", "every participant is done", "r", 2, 0, at="2026-11-21T10:03:06.500+00:00"
)
OVER = {
    KEYS.outcome: encode(OUTCOME),
    KEYS.history(1): encode(FIRST),
    KEYS.history(2): encode(
        History(
            **{f: getattr(SECOND, f) for f in SECOND.__struct_fields__}
            | {
                "ended": ENDED,
                "ended_at": OUTCOME.at,
                "outcome": OUTCOME,
                "spent": Spent(
                    steps=1200,
                    commits=120,
                    rendezvous=0.25,
                    start=0.5,
                    first_step=0.25,
                    trained=119.0,
                    pause=2.0,
                ),
            }
        )
    ),
}


def view(values: Mapping[str, str]) -> View:
    kvs = {key: KeyValue(key, value, 1, 1, 0) for key, value in values.items()}
    return view_of(Snapshot(17, kvs), KEYS, Everything())
