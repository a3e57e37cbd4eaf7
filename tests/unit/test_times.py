"""The order of the numbers of seconds in elastic_etcd/times.py, and why it is this one."""

import pytest

from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.core.rules import Limits
from elastic_etcd.times import (
    ACK_PATIENCE,
    ANSWER_TIMEOUT,
    ATTEMPT_TIMEOUT,
    CONTACT_TIMEOUT,
    CURRENT_TIMEOUT,
    EMBEDDED_ENDS,
    EMBEDDED_START,
    EMBEDDED_STOP,
    ERROR_FILE,
    GOODBYE,
    GRACE_CHANGE,
    GRACE_FAILURE,
    GRACE_LEAVE,
    GUARD_GONE,
    GUARD_LIFE,
    GUARD_REVOKE,
    GUARDIAN_QUIET,
    GUARDIAN_SLOWEST,
    HOLD,
    LEASE_TTL,
    LEAVE_TIMEOUT,
    LOGIN_TIMEOUT,
    LOOK_UP,
    OPEN_TIMEOUT,
    PARKED_PATIENCE,
    REFUSED_PAUSE,
    REVOKE_TIMEOUT,
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
            ("a first contact has time for several attempts", 2 * ATTEMPT, CONTACT_TIMEOUT),
            ("and for one that logs in", ATTEMPT + LOGIN_TIMEOUT, CONTACT_TIMEOUT),
            ("a name is looked up before the first contact is given up", LOOK_UP, CONTACT_TIMEOUT),
            ("a question about a generation can be asked twice", 2 * ATTEMPT, CURRENT_TIMEOUT),
            ("the agent answers 'unknown' before its worker gives up on it",
             CURRENT_TIMEOUT, ANSWER_TIMEOUT),
            ("nothing is lost by a failure, but a step of work by a change",
             GRACE_FAILURE, GRACE_CHANGE),
            ("a parked worker has nothing to end but itself", GOODBYE, GRACE_LEAVE),
            ("processes are told to be stuck before the node gives up", STUCK, UNKILLABLE),
            ("a failure's cause is read before another one is waited for", ERROR_FILE, HOLD),
            ("a survivor that can't stop has left before it is left out",
             GRACE_LEAVE + UNKILLABLE, Limits(1, 1).patience),
            ("and who has nothing to stop is waited for less long", ACK_PATIENCE, STOP_PATIENCE),
            ("the guardian has time for all it does",
             GUARD_GONE + GUARD_REVOKE, GUARD_LIFE),
            ("no revoke is given up before the lease ends by itself", LEASE_TTL, GUARD_REVOKE),
            ("guardians that die quickly are replaced more and more seldom",
             GUARDIAN_QUIET, GUARDIAN_SLOWEST),
            ("ranks that agree on a step do so before they are killed",
             SYNC_PATIENCE, GRACE_CHANGE),
            ("an etcd that is ending takes less time than one that starts",
             EMBEDDED_STOP, EMBEDDED_START),
            ("an etcd that can't start is given up before its first failure is forgotten",
             3 * EMBEDDED_START, EMBEDDED_ENDS),
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


def test_every_number_of_the_table_is_in_some_order() -> None:
    from elastic_etcd import times

    table = {name for name in vars(times) if name.isupper()}
    assert table == {name for name in globals() if name.isupper()} - {"ATTEMPT"}
