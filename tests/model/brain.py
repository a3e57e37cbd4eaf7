"""Production's own functions, remembered: what an agent reads, decides and writes."""

import json
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from elastic_etcd.core import lifecycle, writes
from elastic_etcd.core.events import Action, Event, Viewed, Write
from elastic_etcd.core.lifecycle import State
from elastic_etcd.core.rules import Act, Decision, Limits
from elastic_etcd.core.txn import Delete, Get, Put, Txn
from elastic_etcd.core.values import Member, Phase
from elastic_etcd.core.view import View, covered, view_of
from tests.model.invariants import check_budget
from tests.model.node import Numbers, owner
from tests.model.store import KEYS, Store

RUN = "r"


class Step(NamedTuple):
    """What follows from an event: the new state, the Txn that it sends (0: none), the rest."""

    state: int
    txn: int
    actions: tuple[Action, ...]


class Brain:
    """What any agent thinks under `limits`; values by their numbers, see node.py."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.states: Numbers[State] = Numbers()
        self.views: Numbers[View] = Numbers()
        self.txns: Numbers[Txn] = Numbers()
        self._steps: dict[tuple[int, Event | int, float], Step] = {}
        self._seen: dict[tuple[Store, int, int], int] = {}

    def view(self, store: Store, number: int) -> int:
        """What the agent in state `number` sees of `store`."""
        state = self.states[number]
        coverage = lifecycle.coverage(state)
        key = (store, -2 if coverage is None else coverage, state.me.lease)
        if key not in self._seen:
            gets = covered(KEYS, coverage, state.me.lease)
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
        happened = Viewed(self.views[event]) if isinstance(event, int) else event
        state, actions = lifecycle.step(before, happened, now, self.limits)
        write = next((a for a in actions if isinstance(a, Write)), None)
        txn = 0
        if write:
            check_budget(state, write, self.limits)
            txn = self.txns.of(_txn(state, write))
            if isinstance(write.what, Decision):  # what it writes is in the Txn now
                bare = replace(write, what=Decision(write.what.act, ""))
                state = replace(state, writing=bare)
        others = tuple(a for a in actions if not isinstance(a, Write))
        return Step(self.states.of(self._bare(before, state, now)), txn, others)

    def _bare(self, before: State, state: State, now: float) -> State:
        """What was said and how long things took is no part of what comes next.

        But for a world that lasted for the restart window, until the next one is final.
        """
        generation, seconds = state.ran
        final = state.view.ledger.final if state.view else generation
        if seconds < self.limits.restart_window or generation < final:
            state = replace(state, ran=(0, 0.0))
        if state.armed is not None and state.armed != before.armed:
            state = replace(state, armed=state.armed - now)
        return replace(state, said="", phase_since=0.0, join_since=0.0)


def lasted(state: State, view: View) -> bool:
    """Whether with `view` the state learns that a world has ended: it may have lasted long."""
    was, now = state.view.round if state.view else None, view.round
    if was is None or was.phase is not Phase.FINAL:
        return False
    return now is None or (was.generation, was.phase) != (now.generation, now.phase)


def _txn(state: State, write: Write) -> Txn:
    lease, now = state.me.lease, state.view.round if state.view else None
    name = f"n{owner(lease)}"
    master = (name, now.generation) if now else None
    if isinstance(write.what, Decision) and write.what.act is Act.ACK:
        assert master, "an ack is for a round"
    txn = writes.build(KEYS, state, write, Member(lease, name, 1, run=RUN), master, "")
    return replace(txn, then=tuple(_plain(op) for op in txn.then))


@cache
def _plain(op: Put | Delete | Get) -> Put | Delete | Get:
    """Reasons are for people: states that differ in them only are one."""
    if isinstance(op, Put) and op.key == KEYS.round:
        fields = {**json.loads(op.value), "reason": ""}
        return replace(op, value=json.dumps(fields, sort_keys=True))
    return op
