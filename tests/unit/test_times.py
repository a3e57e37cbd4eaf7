"""The order of the numbers of seconds in elastic_etcd/times.py, and why it is this one."""

import pytest

from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.core.schema import Limits
from elastic_etcd.times import (
    ACK_PATIENCE,
    AGENT_GONE,
    ANSWER,
    ANSWER_TIMEOUT,
    ATTEMPT_TIMEOUT,
    CALL,
    CALL_AGAIN,
    CERTIFICATES,
    CHILD_GONE,
    CONTACT_TIMEOUT,
    COPY_PATIENCE,
    CURRENT_TIMEOUT,
    EMBEDDED_QUIET,
    EMBEDDED_SLOWEST,
    EMBEDDED_START,
    EMBEDDED_STOP,
    ERROR_FILE,
    GOODBYE,
    GRACE_CHANGE,
    GRACE_FAILURE,
    GRACE_LEAVE,
    GRACE_PARK,
    GUARD_GONE,
    GUARD_LATER,
    GUARD_LIFE,
    GUARD_REVOKE,
    GUARDIAN_QUIET,
    GUARDIAN_SLOWEST,
    HANG_ALONE,
    HANG_ANSWER,
    HANG_ASK,
    HANG_AT_LEAST,
    HANG_EVIDENCE,
    HANG_LEARNT,
    HANG_STACKS,
    HEALTH_INTERVAL,
    HEALTH_TIMEOUT,
    HELLO,
    HOLD,
    IMPORTED,
    KILLED,
    LEAD_TURN,
    LEASE_TTL,
    LEAVE_TIMEOUT,
    LEFTOVERS,
    LOGIN_TIMEOUT,
    LONGEST_BACKOFF,
    LOOK_PERIOD,
    LOOK_TTL,
    LOOK_UP,
    NCCL_LOOK,
    NOTHING_FREE,
    OPEN_TIMEOUT,
    OWN_LOOK_UP,
    PARK_LATE,
    PARKED_PATIENCE,
    PASSWORD_FILE,
    PROOF,
    PUBLISH_TIMEOUT,
    REFUSED_PAUSE,
    REVOKE_TIMEOUT,
    SCALE_PATIENCE,
    SIGTERM_TWICE,
    STOP_PATIENCE,
    STUCK,
    SYNC_PATIENCE,
    UNKILLABLE,
)

ATTEMPT = ATTEMPT_TIMEOUT[1]


@pytest.mark.parametrize(
    ("shorter", "longer"),
    [
        pytest.param(*pair, id=why)
        for why, *pair in (
            ("an attempt's length is drawn from a range", ATTEMPT_TIMEOUT[0], ATTEMPT),
            ("a connection is made before the attempt that needs it is over",
             CERTIFICATES, ATTEMPT_TIMEOUT[0]),
            ("a first contact has time for several attempts", 2 * ATTEMPT, CONTACT_TIMEOUT),
            ("and for one that logs in", ATTEMPT + LOGIN_TIMEOUT, CONTACT_TIMEOUT),
            ("a name is looked up before the first contact is given up", LOOK_UP, CONTACT_TIMEOUT),
            ("a node that looks up its own name is there before the others begin without it",
             OWN_LOOK_UP, Limits(1, 1).settle),
            ("a dead node is found before a failure that it caused is taken for the cause",
             PROOF, HOLD),
            ("a hang's stacks are there before the file with them", HANG_STACKS, HANG_EVIDENCE),
            ("and the file before another hang is looked for", HANG_EVIDENCE, HANG_AT_LEAST),
            ("what was once slow makes a step's time longer", HANG_AT_LEAST, HANG_LEARNT),
            ("what a node publishes is written before the others' answers are given up",
             PUBLISH_TIMEOUT, HANG_STACKS + HANG_EVIDENCE + HANG_ANSWER),
            ("and beyond stacks and files there is time for opening what they are asked through",
             HANG_ASK, HANG_ANSWER),
            ("all are asked before a node tells of its own workers only",
             HANG_STACKS + HANG_EVIDENCE + HANG_ANSWER, HANG_ALONE),
            ("who calls has said who it is before it gives up", HELLO, CALL),
            ("who can't be called is left alone for a while", CALL, CALL_AGAIN),
            ("a question about a generation can be asked twice", 2 * ATTEMPT, CURRENT_TIMEOUT),
            ("the agent answers 'unknown' before its worker gives up on it",
             CURRENT_TIMEOUT, ANSWER_TIMEOUT),
            ("nothing is lost by a failure, but a step of work by a change",
             GRACE_FAILURE, GRACE_CHANGE),
            ("who repeats a signal to hurry is heard", SIGTERM_TWICE, GRACE_FAILURE),
            ("who is to park has NCCL's communicators to abort", GRACE_FAILURE, GRACE_PARK),
            ("but no step to end", GRACE_PARK, GRACE_CHANGE),
            ("it says where it stands before it is killed", PARK_LATE, GRACE_PARK),
            ("and what NCCL has met is known before a parked worker becomes the failure",
             NCCL_LOOK, PARKED_PATIENCE),
            ("a parked worker has nothing to end but itself", GOODBYE, GRACE_LEAVE),
            ("an agent that ends waits for no child that is stuck", CHILD_GONE, STUCK),
            ("nor for what ends by itself as long as for what is stuck", LEFTOVERS, STUCK),
            ("processes are told to be stuck before the node gives up", STUCK, UNKILLABLE),
            ("of 10,000 nodes the last one tries to coordinate before a lease would end",
             6 * LEAD_TURN, LEASE_TTL),
            ("a failure's cause is read before another one is waited for", ERROR_FILE, HOLD),
            ("a survivor that can't stop has left before it is left out",
             GRACE_LEAVE + UNKILLABLE, Limits(1, 1).patience),
            ("a node that leaves has time to say goodbye, to mark itself and to remove its key",
             GOODBYE + 2 * LEAVE_TIMEOUT, STOP_PATIENCE),
            ("a node that can start nothing for a while is waited for",
             NOTHING_FREE, Limits(1, 1).patience),
            ("and who has nothing to stop is waited for less long", ACK_PATIENCE, STOP_PATIENCE),
            ("the guardian has time for all it does",
             GUARD_GONE + GUARD_REVOKE, GUARD_LIFE),
            ("a node does not begin beside what its former agent's guardian still waits for",
             UNKILLABLE, GUARD_LIFE),
            ("no revoke is given up before the lease ends by itself", LEASE_TTL, GUARD_REVOKE),
            ("guardians that die quickly are replaced more and more seldom",
             GUARDIAN_QUIET, GUARDIAN_SLOWEST),
            ("ranks that agree on a step do so before they are killed",
             SYNC_PATIENCE, GRACE_CHANGE),
            ("an etcd that is ending takes less time than one that starts",
             EMBEDDED_STOP, EMBEDDED_START),
            ("an etcd that can't start is tried again more and more seldom",
             EMBEDDED_START + EMBEDDED_SLOWEST, EMBEDDED_QUIET),
            ("a child that does not answer is replaced before anything is told to be stuck",
             ANSWER, STUCK),
            ("a node whose imports take long is there before the others give up on it",
             IMPORTED, Limits(1, 1).join_timeout),
            ("whoever must be gone with the lease has been killed before", KILLED, LEASE_TTL / 3),
            ("who kills its workers itself has done so before its guardian does",
             GUARD_LATER, KILLED),
            ("the agent beside torchrun leaves, as any other, before it is killed",
             GOODBYE + 2 * LEAVE_TIMEOUT + REVOKE_TIMEOUT + CHILD_GONE, AGENT_GONE),
            ("a worker that waits for another one's copy is not killed for it",
             COPY_PATIENCE, GRACE_PARK),
            ("nor at a planned change", COPY_PATIENCE, GRACE_CHANGE),
            ("who has scaled a job waits beyond the longest pause between worlds",
             LONGEST_BACKOFF, SCALE_PATIENCE),
            ("paces come more often than nodes forget that somebody looks",
             LOOK_PERIOD, LOOK_TTL),
            ("a password is read sooner than etcd has looked at it",
             PASSWORD_FILE, LOGIN_TIMEOUT),
            ("who is refused asks more seldom than who is not answered", ATTEMPT, REFUSED_PAUSE),
        )
    ],
)  # fmt: skip
def test_the_one_ends_before_the_other(shorter: float, longer: float) -> None:
    assert 0 < shorter < longer


@pytest.mark.parametrize(
    ("shorter", "longer"),
    [
        pytest.param(*pair, id=why)
        for why, *pair in (
            ("a node that leaves tries each request once at least", ATTEMPT, LEAVE_TIMEOUT),
            ("and so it does with its lease", ATTEMPT, REVOKE_TIMEOUT),
            ("a node that leaves may have to save what nobody else has",
             GRACE_CHANGE, GRACE_LEAVE),
            ("who waits for a cause has it before a parked worker becomes one",
             HOLD, PARKED_PATIENCE),
            ("a watch may take as long as any attempt", ATTEMPT, OPEN_TIMEOUT),
            ("a node that leaves isn't slower than what ends by itself",
             LEAVE_TIMEOUT, LEASE_TTL),
        )
    ],
)  # fmt: skip
def test_the_one_ends_with_the_other_at_the_latest(shorter: float, longer: float) -> None:
    assert 0 < shorter <= longer


def test_the_default_ttl_is_that_of_the_table() -> None:
    assert AgentConfig(None, "j", (), "n", 1, Limits(1, 1)).lease_ttl == LEASE_TTL


def test_a_health_check_is_over_when_the_next_one_begins() -> None:
    assert HEALTH_TIMEOUT <= HEALTH_INTERVAL


def test_every_number_of_the_table_is_in_some_order() -> None:
    from elastic_etcd import times

    table = {name for name in vars(times) if name.isupper()}
    assert table == {name for name in globals() if name.isupper()} - {"ATTEMPT"}
