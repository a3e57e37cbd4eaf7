"""Production's own functions, remembered: what an agent reads, decides and writes."""

import json
from functools import cache
from typing import Any, NamedTuple

from msgspec import structs

from elastic_etcd.core import invariants, lifecycle, writes
from elastic_etcd.core.failure_policies import LONGEST
from elastic_etcd.core.lifecycle import Action, Event, Lasted, State, ViewChanged, Write
from elastic_etcd.core.rules import Ack, Verdict
from elastic_etcd.core.schema import Ledger, Limits, Master, Member, Phase, Round
from elastic_etcd.core.txn import Delete, Get, Put, Txn
from elastic_etcd.core.view import Coverage, View, covered, view_of
from tests.model.invariants import (
    Violation,
    check_again,
    check_budget,
    check_format,
    check_joins,
    check_leavers,
    check_listing,
    check_size,
)
from tests.model.node import Numbers, owner
from tests.model.store import KEYS, Store

RUN = "r"
BLANK: dict[str, Any] = {
    "reason": "",
    "round": Round(0, Phase.SETUP, 0, "", RUN),
    "generation": 0,
    "ledger": Ledger(),
    "world": (),
    "outcome": Verdict.SUCCEEDED.outcome(RUN, 0, "", None),
}


class Step(NamedTuple):
    """What follows from an event: the new state, the Txn that it sends (0: none), the rest."""

    state: int
    txn: int
    actions: tuple[Action, ...]


class Agent:
    """What any agent thinks under `limits`; values by their numbers, see node.py."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.states: Numbers[State] = Numbers()
        self.views: Numbers[View] = Numbers()
        self.txns: Numbers[Txn] = Numbers()
        self._steps: dict[tuple[int, Event | int, float], Step] = {}
        self._seen: dict[tuple[Store, Coverage, int], int] = {}

    def view(self, store: Store, number: int) -> int:
        """What the agent in state `number` sees of `store`."""
        state = self.states[number]
        coverage = lifecycle.coverage(state)
        key = (store, coverage, state.local.lease)
        if key not in self._seen:
            gets = covered(KEYS, coverage, state.local.lease)
            self._seen[key] = self.views.of(view_of(store.read(gets), KEYS, coverage))
        return self._seen[key]

    def step(self, number: int, event: Event | int, now: float = 0.0) -> Step:
        """The agent in state `number` meets `event`; a number stands for a view."""
        key = (number, event, now)
        known = self._steps.get(key)
        if known is None:
            known = self._steps[key] = self._step(self.states[number], event, now)
        return known

    def _step(self, before: State, event: Event | int, now: float) -> Step:
        happened = ViewChanged(self.views[event]) if isinstance(event, int) else event
        state, actions = lifecycle.step(before, happened, now)
        write = next((a for a in actions if isinstance(a, Write)), None)
        if broken := invariants.violated(state, actions):
            raise Violation(broken)
        check_size(state, self.limits)
        check_format(before, happened, actions)
        check_again(before, actions)
        txn = 0
        if write:
            check_budget(state, write, self.limits)
            check_joins(state, write, self.limits)
            check_leavers(state, write, now, self.limits)
            check_listing(state, write, now)
            txn = self.txns.of(_txn(state, write))
            state = structs.replace(state, pending=_bare_write(write))
        others = tuple(a for a in actions if not isinstance(a, Write))
        return Step(self.states.of(self._bare(before, state, now)), txn, others)

    def _bare(self, before: State, state: State, now: float) -> State:
        """What was said and how long things took is no part of what comes next.

        But for a world that lasted for long, until the next one is final.
        """
        lasted = state.lasted
        final = state.view.ledger.final if state.view else lasted.generation
        if not lasted.seconds or lasted.generation < final:
            state = structs.replace(state, lasted=Lasted())
        if state.timer is not None and state.timer != before.timer:
            state = structs.replace(state, timer=state.timer - now)
        silent = None if state.silent_since is None else 0.0
        since = self._began(before, state, now)
        vacant = None if state.vacant_since is None else 0.0
        still = {"phase_since": since, "join_since": 0.0, "vacant_since": vacant}
        return structs.replace(state, logged="", silent_since=silent, **still)

    def _began(self, before: State, state: State, now: float) -> float:
        """Since when a world is seen: for long, if an agent has waited in it for a suspect."""
        if state.phase_since != before.phase_since:
            return 0.0
        return state.phase_since - now if now >= LONGEST else state.phase_since


def lasted(state: State, view: View) -> bool:
    """Whether with `view` the state learns that a world has ended: it may have lasted long."""
    was, now = state.view.round if state.view else None, view.round
    if was is None or was.phase is not Phase.FINAL:
        return False
    return now is None or (was.generation, was.phase) != (now.generation, now.phase)


def leaves_out(state: State, hung: tuple[int, ...]) -> bool:
    """Whether a coordinator that waits no longer leaves somebody out who would come, or go."""
    view, now = state.view, state.view.round if state.view else None
    if view is None or now is None or now.phase is not Phase.JOINABLE:
        return False
    if now.coordinator != state.local.lease:
        return False
    last = {p.lease for p in view.world}
    live = {m.lease for m in view.members if not m.leaving}
    leavers = {m.lease for m in view.members if m.leaving} & last
    missing = live - {ack.lease for ack in view.acks} - {state.local.lease}
    awaited = leavers if live.isdisjoint(last) else leavers | missing
    return not awaited <= set(hung)


def _bare_write(write: Write) -> Write:
    """What it writes is in the Txn now."""
    blank = {name: BLANK[name] for name in write.what.__struct_fields__ if name in BLANK}
    return structs.replace(write, what=structs.replace(write.what, **blank))


def _txn(state: State, write: Write) -> Txn:
    lease, now = state.local.lease, state.view.round if state.view else None
    name = f"n{owner(lease)}"
    master = Master(name, now.generation) if now else None
    if isinstance(write.what, Ack):
        assert master, "an ack is for a round"
    txn = writes.build(KEYS, state, write, Member(lease, name, 1, run=RUN), master, "")
    return structs.replace(txn, then=tuple(_plain(op) for op in txn.then))


@cache
def _plain(op: Put | Delete | Get) -> Put | Delete | Get:
    """Reasons are for people: states that differ in them only are one."""
    if isinstance(op, Put) and op.key == KEYS.round:
        fields = {**json.loads(op.value), "reason": "for a reason"}
        return structs.replace(op, value=json.dumps(fields, sort_keys=True))
    return op
