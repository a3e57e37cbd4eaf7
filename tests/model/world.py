"""Agents, one etcd and every fault, as a transition system over production's own functions.

What a node can do next depends on the node and the store alone. Both are numbered and their
transitions remembered, so that exploring all interleavings is mostly look-ups.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from elastic_etcd.core import lifecycle, writes
from elastic_etcd.core.events import (
    Action,
    Emptied,
    Event,
    Exit,
    Joined,
    LeaseLost,
    Rejoin,
    Signalled,
    Start,
    Ticked,
    Viewed,
    WorkerEnded,
    Write,
    Wrote,
)
from elastic_etcd.core.lifecycle import State
from elastic_etcd.core.rules import Decision, Limits, Me
from elastic_etcd.core.txn import Delete, Get, Put, Txn
from elastic_etcd.core.values import Failure, Member, Phase
from elastic_etcd.core.view import EVERYTHING, Coverage, View, covered, view_of
from tests.model.invariants import check_alone, check_learned, check_start, checked, round_of
from tests.model.store import KEYS, Store

RUN = "r"
FOREVER = 1e9
INCARNATIONS = 16


@dataclass(frozen=True)
class Node:
    """One machine: its agent's state, its workers and what is on the way to it."""

    number: int
    incarnation: int = 0
    state: State | None = None  # None: the agent is gone
    lease: int = 0  # of this incarnation, while the server has it
    stale: int = 0  # of the incarnation before, while the server has it
    workers: int = 0  # generation of the live workers
    acked: int = 0  # generation that this lease has acked, known or not to the agent
    txn: Txn | None = None
    late: tuple[Txn, int] | None = None  # a copy of one still on its way, and whose lease
    told: bool = True  # whether the agent knows that its lease is gone
    joining: bool = False
    out: bool = False  # left for good

    @property
    def name(self) -> str:
        return f"n{self.number}"


class Faults(NamedTuple):
    """How often each may still happen."""

    crash: int = 0  # a node dies with its workers
    back: int = 0  # a dead node comes back
    fail: int = 0  # a worker exits non-zero
    done: int = 0  # a node's workers finish
    expire: int = 0  # the lease of a live agent ends (frozen, cut off)
    leave: int = 0  # SIGTERM to an agent
    lost: int = 0  # a Txn is applied, its answer is lost and the client tries again
    late: int = 0  # a Txn reaches the server a second time, whenever that may be

    def without(self, index: int) -> "Faults":
        """These, after the fault at `index` has happened once more."""
        name = self._fields[index]
        return self._replace(**{name: self[index] - 1})


class Move(NamedTuple):
    """One transition; `fault` names the budget that it takes from."""

    label: str
    store: Store
    node: Node
    fault: str = ""


def fresh(number: int, incarnation: int = 0, stale: int = 0) -> Node:
    """A node whose agent has just started."""
    return Node(number, incarnation, State(Me(RUN), nproc=1), stale=stale, joining=True)


class System:
    """What nodes can do under `limits`."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._view = cache(self._view_of)
        self._step = cache(self._step_of)

    def moves(self, store: Store, node: Node) -> Iterator[Move]:
        """All transitions of `node`."""
        if node.stale:
            yield Move("old lease ends", store.revoke(node.stale), replace(node, stale=0))
        if node.late:
            after, acked, ok = self._commit(store, replace(node, lease=node.late[1]), node.late[0])
            label = f"late copy: {'written' if ok else 'refused'}"
            again = acked if node.late[1] == node.lease else node
            yield Move(label, after, replace(again, late=None))
        if node.out:
            return
        if node.state is None:
            if not node.stale and node.lease:
                yield Move("lease ends", store.revoke(node.lease), replace(node, lease=0))
            yield self._back(store, node)
        elif node.joining:
            yield self._join(store, node)
        else:
            yield from self._agent(store, node, node.state)
            yield from self._faults(store, node, node.state)

    def _agent(self, store: Store, node: Node, state: State) -> Iterator[Move]:
        if state.me.lease and not state.over:
            view = self._view(store, lifecycle.coverage(state), state.me.lease)
            if view != state.view:
                yield self._event("sees", store, node, Viewed(view))
        if node.txn:
            after, written, ok = self._commit(store, node, node.txn)
            label = f"{_describe(state.writing)}: {'written' if ok else 'refused'}"
            yield self._event(label, after, replace(written, txn=None), Wrote(ok))
        if state.armed is not None and state.armed < FOREVER:
            yield self._event("has waited", store, node, Ticked(), now=state.armed)
        if not node.told:
            yield self._event("learns of it", store, replace(node, told=True), LeaseLost(""))
        if node.workers and (state.me.stopping or not state.alive):
            empty = replace(node, workers=0)
            yield self._event("is empty", store, empty, Emptied(node.workers))

    def _faults(self, store: Store, node: Node, state: State) -> Iterator[Move]:
        dead = Node(
            node.number, node.incarnation, lease=node.lease, stale=node.stale, late=node.late
        )
        yield Move("dies", store, dead, "crash")
        if node.workers and state.alive and not state.me.stopping:
            failure = Failure(node.name, 0, 0, 1, 1, 100.0)
            failed = WorkerEnded(node.workers, failure)
            yield self._event("worker fails", store, node, failed, fault="fail")
            finished = WorkerEnded(node.workers, None)
            yield self._event("worker is done", store, node, finished, fault="done")
        if node.lease:
            gone = replace(node, lease=0, told=False)
            yield Move("lease is taken", store.revoke(node.lease), gone, "expire")
        if not state.me.leaving:
            yield self._event("gets SIGTERM", store, node, Signalled(), fault="leave")
        if node.txn:  # the client tries again, and finds its own fence in the way
            after, written, ok = self._commit(store, node, node.txn)
            if ok:
                label = f"{_describe(state.writing)}: written, its answer lost"
                yield Move(label, after, written, "lost")
            if not node.late:
                copied = replace(node, late=(node.txn, node.lease))
                yield Move(f"{_describe(state.writing)}: sent twice", store, copied, "late")

    def _commit(self, store: Store, node: Node, txn: Txn) -> tuple[Store, Node, bool]:
        after, ok = store.apply(txn)
        if not ok:
            return store, node, False
        after = checked(node.name, node.lease, txn, store, after, self.limits)
        now = round_of(store)
        acks = any(isinstance(op, Put) and op.key.startswith(KEYS.acks()) for op in txn.then)
        if acks and now and node.lease:
            node = replace(node, acked=now.generation)
        return after, node, True

    def _back(self, store: Store, node: Node) -> Move:
        """It may be back before its old lease has ended."""
        again = replace(fresh(node.number, node.incarnation + 1, node.lease), late=node.late)
        return Move("comes back", store, again, "back" if not node.stale else "never")

    def _join(self, store: Store, node: Node) -> Move:
        assert node.state is not None
        if store.value(KEYS.outcome):
            return Move("finds the job ended", store, Node(node.number, out=True))
        lease = node.number * INCARNATIONS + node.incarnation + 1
        assert node.incarnation < INCARNATIONS - 1
        member = Put(KEYS.member(lease), Member(lease, node.name, 1, run=RUN).encode(), lease)
        store, _ = store.apply(Txn((), (member,)))
        now = replace(
            node,
            lease=lease,
            incarnation=node.incarnation + 1,
            joining=False,
            told=True,
            acked=0,
            txn=None,
        )
        return self._event("joins", store, now, Joined(RUN, 1, lease, 1))

    def _event(
        self,
        label: str,
        store: Store,
        node: Node,
        event: Event,
        now: float = 0.0,
        fault: str = "",
    ) -> Move:
        assert node.state is not None
        state, actions = self._step(node.state, event, now)
        node = replace(node, state=state)
        for action in actions:
            store, node = self._do(store, node, state, action)
        if node.state is not None:
            check_learned(node.name, node.state)
        return Move(label, store, node, fault)

    def _do(self, store: Store, node: Node, state: State, action: Action) -> tuple[Store, Node]:
        match action:
            case Write():
                txn = self._txn(state, action, node)
                bare = action.what
                if isinstance(bare, Decision):  # what it writes is in the Txn now
                    bare = Decision(bare.act, "")
                state = replace(state, writing=replace(action, what=bare))
                return store, replace(node, txn=txn, state=state)
            case Start(begins):
                check_start(node.name, state.me, node.acked, node.workers, begins, store)
                return store, replace(node, workers=begins.generation)
            case Rejoin():
                return store, replace(node, joining=True)
            case Exit():
                assert not node.workers
                return self._exit(store, node, state)
        return store, node

    def _exit(self, store: Store, node: Node, state: State) -> tuple[Store, Node]:
        """The last one to leave stops the job; a lease is revoked on the way out."""
        if state.me.leaving and state.me.lease:
            store, _ = store.apply(writes.leave(KEYS, state.me))
            stop = writes.stop(KEYS, self._view(store, EVERYTHING, 0), state.me, "")
            after, ok = store.apply(stop)
            if ok:
                check_alone(node.name, state.me.lease, store)
                store = after
        return store.revoke(node.lease), Node(node.number, stale=node.stale, out=True)

    def _txn(self, state: State, write: Write, node: Node) -> Txn:
        now = state.view.round if state.view else None
        master = (node.name, now.generation) if now else None
        member = Member(node.lease, node.name, 1, run=RUN)
        return _without_reasons(writes.build(KEYS, state, write, member, master, ""))

    def _view_of(self, store: Store, coverage: Coverage, lease: int) -> View:
        return view_of(store.read(covered(KEYS, coverage, lease)), KEYS, coverage)

    def _step_of(self, state: State, event: Event, now: float) -> tuple[State, list[Action]]:
        after, actions = lifecycle.step(state, event, now, self.limits)
        # What is said and how long things took is no part of what comes next.
        after = replace(after, said="", ran=(0, 0.0), phase_since=0.0, join_since=0.0)
        return after, actions

    def good(self, store: Store, nodes: tuple[Node, ...]) -> bool:
        """What liveness must reach: a final world that trains, or the end of the job."""
        if store.value(KEYS.outcome) is not None:
            return True
        now = round_of(store)
        if now is None or now.phase is not Phase.FINAL:
            return False
        reports = (
            (p.lease, store.value(KEYS.report(now.generation, p.lease))) for p in now.participants
        )
        done = {lease for lease, report in reports if report}
        done |= {
            n.lease
            for n in nodes
            if n.state and n.state.finished and n.state.me.ran == now.generation
        }
        up = {n.lease for n in nodes if n.workers == now.generation} | done
        return all(p.lease in up for p in now.participants)

    def able(self, nodes: tuple[Node, ...]) -> bool:
        """Whether min agents are alive, so that liveness asks for a final world."""
        up = [n for n in nodes if n.state and not n.state.me.leaving]
        return len(up) >= self.limits.min_nodes


def _without_reasons(txn: Txn) -> Txn:
    """Reasons are for people: states that differ in them only are one."""
    return replace(txn, then=tuple(_bare(op) for op in txn.then))


def _bare(op: Put | Delete | Get) -> Put | Delete | Get:
    if isinstance(op, Put) and op.key == KEYS.round:
        fields = {**json.loads(op.value), "reason": ""}
        return replace(op, value=json.dumps(fields, sort_keys=True))
    return op


def _describe(write: Write | None) -> str:
    if write is None or write.what is None:
        return "mark of leaving"
    return write.what.act.value if isinstance(write.what, Decision) else "report"
