"""Each invariant can fail: a deliberate fault in the rules is found by the checker."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from elastic_etcd.core import rules, writes
from elastic_etcd.core.keys import Keys
from elastic_etcd.core.rules import Act, Decision, Elapsed, Limits, Me
from elastic_etcd.core.txn import Compare
from elastic_etcd.core.values import Ack, Member, Phase, Round
from elastic_etcd.core.view import View
from tests.model.explore import Search
from tests.model.test_model import limits
from tests.model.world import Faults, System

Patch = Callable[[pytest.MonkeyPatch], None]


def same_generation_again(patch: pytest.MonkeyPatch) -> None:
    claim = rules._claim

    def mutant(view: View, me: Me, reason: str, **planned: bool) -> Decision:
        decision = claim(view, me, reason, **planned)
        assert decision.round
        again = max(1, decision.round.generation - 1)
        return replace(decision, round=replace(decision.round, generation=again))

    patch.setattr(rules, "_claim", mutant)


def acks_are_not_awaited(patch: pytest.MonkeyPatch) -> None:
    joinable = rules._joinable

    def mutant(view: View, now: Round, me: Me, asked: Limits, elapsed: Elapsed) -> Decision:
        acks = tuple(Ack(m.lease) for m in view.members)
        return joinable(replace(view, acks=acks), now, me, asked, elapsed)

    patch.setattr(rules, "_joinable", mutant)


def old_workers_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    own_part = rules._own_part
    patch.setattr(rules, "_own_part", lambda now, me: own_part(now, replace(me, running=0)))


def everybody_takes_part(patch: pytest.MonkeyPatch) -> None:
    def mutant(ready: list[Member], *_: Any) -> list[Member]:
        return ready

    patch.setattr(rules, "choose", mutant)


def rounds_are_not_fenced(patch: pytest.MonkeyPatch) -> None:
    def mutant(keys: Keys, view: View, me: Me) -> tuple[Compare, ...]:
        del view
        return (Compare(keys.member(me.lease), "create", me.created),)

    patch.setattr(writes, "_fence", mutant)


def a_lost_coordinator_is_not_replaced(patch: pytest.MonkeyPatch) -> None:
    claim = rules._claim

    def mutant(view: View, me: Me, reason: str, **planned: bool) -> Decision:
        if reason.endswith("is lost"):
            return Decision(Act.WAIT, reason)
        return claim(view, me, reason, **planned)

    patch.setattr(rules, "_claim", mutant)


def one_done_is_all_done(patch: pytest.MonkeyPatch) -> None:
    done = rules._done
    patch.setattr(rules, "_done", lambda v: set(v.ledger.places) if done(v) else set())


def workers_start_when_frozen(patch: pytest.MonkeyPatch) -> None:
    own_part = rules._own_part

    def mutant(now: Round, me: Me) -> Decision | None:
        if now.phase is Phase.FROZEN and now.place(me.lease) and not me.running:
            return Decision(Act.RUN, "early", round=now)
        return own_part(now, me)

    patch.setattr(rules, "_own_part", mutant)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("invariant", "mutate", "asked", "faults"),
    [
        ("I1", same_generation_again, limits(1, 2), Faults(fail=1)),
        ("I2", acks_are_not_awaited, limits(1, 2), Faults(fail=1)),
        ("I3", old_workers_are_forgotten, limits(1, 2), Faults(fail=1)),
        ("I4", everybody_takes_part, limits(1, 1), Faults()),
        ("I5", rounds_are_not_fenced, limits(1, 2), Faults()),
        ("I6", a_lost_coordinator_is_not_replaced, limits(1, 2), Faults(crash=1)),
        ("I7", one_done_is_all_done, limits(1, 2), Faults(done=1)),
        ("I8", workers_start_when_frozen, limits(2, 2), Faults()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mutant_is_caught(
    invariant: str,
    mutate: Patch,
    asked: Limits,
    faults: Faults,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutate(monkeypatch)
    result = Search(System(asked), 2, faults).run()
    assert result.violation.startswith(invariant), result
