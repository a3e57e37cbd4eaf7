"""Agents, one etcd and every fault, as a transition system over production's own functions.

What a node can do next depends on the node and the store alone. Both are numbered and their
transitions remembered, so that exploring all interleavings is mostly look-ups.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from elastic_etcd.core import writes
from elastic_etcd.core.failure_policies import LONGEST
from elastic_etcd.core.lifecycle import (
    Action,
    Answered,
    Event,
    Exit,
    Joined,
    LeaseLost,
    Life,
    Rejoin,
    Relisted,
    Signalled,
    Silent,
    StartWorkers,
    State,
    Tick,
    WorkerEnded,
    WorkersElastic,
    WorkersFinished,
    WorkersGone,
    WriteDone,
    is_past,
)
from elastic_etcd.core.peers import LOST
from elastic_etcd.core.rules import Local
from elastic_etcd.core.schema import (
    Drain,
    Failure,
    Halt,
    Limits,
    Member,
    Phase,
    Requests,
    Scale,
    TrainingPlace,
    encode,
)
from elastic_etcd.core.txn import Put, Txn
from elastic_etcd.core.view import Everything, covered, view_of
from tests.model.agent import RUN, Agent, lasted, leaves_out
from tests.model.invariants import (
    check_alone,
    check_cut_off,
    check_learned,
    check_order,
    check_relisted,
    check_start,
    checked,
    in_endless_step,
    is_drained,
    round_of,
    wanted_of,
)
from tests.model.labels import described, done, instead, relation
from tests.model.node import CALM, FREE, INCARNATIONS, Faults, Move, Node, Numbers, owner
from tests.model.store import EARLY, KEYS, NEWER, Store

FOREVER = 1e9


class System:
    """What nodes can do under `limits`, when of `faults` those above 0 may happen."""

    def __init__(self, limits: Limits, faults: Faults) -> None:
        self.limits = limits
        self.faults = faults
        self._may = {CALM, FREE, *(n for n, often in faults._asdict().items() if often)}
        self.agent = Agent(limits)
        self.stores: Numbers[Store] = Numbers()

    def fresh(self, node: Node) -> Node:
        """That machine with an agent that has just started."""
        return node._replace(state=self.agent.states.of(State(Local(RUN), nproc=1)), joining=True)

    def moves(self, store: int, node: Node) -> Iterator[Move]:
        """All transitions of `node`, those of faults that may never happen aside."""
        for move in self._moves(self.stores[store], node):
            if move.fault in self._may:
                yield move

    def _moves(self, store: Store, node: Node) -> Iterator[Move]:
        if node.stale:
            yield self._ends(store, node.stale, node._replace(stale=0), "old lease ends")
        if node.late:
            txn, lease = node.late
            after, acked, ok = self._commit(store, node._replace(lease=lease), txn)
            again = acked if lease == node.lease else node
            label = f"late copy: {done(ok)}"
            yield Move(label, self.stores.of(after), again._replace(late=None))
        if store.restored:
            yield from self._strange_leases(store, node)
        if node.out or node.hung:
            return
        yield from self._people(store, node)
        if self.faults.restore and not store.restored:
            yield from self._backup(store, node)
        if not node.state:
            if not node.stale and node.lease:
                yield self._ends(store, node.lease, node._replace(lease=0), "lease ends")
            if self.faults.back and not node.stale:  # it may be back before its lease has ended
                again = Node(node.number, node.incarnation + 1, stale=node.lease, late=node.late)
                yield Move("comes back", self.stores.of(store), self.fresh(again), "back")
        elif node.joining:
            yield from self._joining(store, node)
        else:
            state = self.agent.states[node.state]
            yield from self._views(store, node, state)
            yield from self._writes(store, node, state)
            yield from self._agent(store, node, state)
            yield from self._faults(store, node, state)

    def _strange_leases(self, store: Store, node: Node) -> Iterator[Move]:
        """A backup has leases that are over, and has none of those that are newer."""
        known = {lease for _, _, lease in store.kvs if lease and owner(lease) == node.number}
        for lease in sorted(known - {node.lease, node.stale}):
            yield self._ends(store, lease, node, "restored lease ends")
        if node.lease and node.lease not in known:
            gone = node._replace(lease=0, told=False)
            yield Move("its lease was never", self.stores.of(store), gone)

    def _people(self, store: Store, node: Node) -> Iterator[Move]:
        """What somebody wants of the node, or of the job."""
        there = wanted_of(store)
        name, drains = Drain(node.name), there.drains
        if self.faults.drain and name not in drains:
            more = replace(there, drains=tuple(sorted((*drains, name), key=lambda d: d.node)))
            yield Move("is drained", self._want(store, more), node, "drain")
        if name in drains:
            less = replace(there, drains=tuple(d for d in drains if d != name))
            yield Move("is undrained", self._want(store, less), node, FREE)
        if self.faults.halt and not there.stop:
            halted = replace(there, stop=Halt(RUN))
            yield Move("is told to stop the job", self._want(store, halted), node, "halt")
        asked, least, most = self.limits, self.limits.min_nodes, self.limits.max_nodes
        for fault, size in (("fewer", least), ("more", most)):
            if fault in self._may and not there.scale:
                scale = Scale(size, size, run=RUN, instead_of=asked.nnodes)
                scaled = replace(there, scale=scale)
                yield Move(f"is told of {fault} nodes", self._want(store, scaled), node, fault)

    def _backup(self, store: Store, node: Node) -> Iterator[Move]:
        """What etcd holds is saved, and restored when an agent knows of a newer round."""
        if store.backup is None:
            saved = store._replace(backup=store)
            yield Move("saves etcd", self.stores.of(saved), node, FREE)
            return
        newest = self.agent.states[node.state].newest if node.state else None
        if is_past(round_of(store.backup), newest):
            back = store.backup._replace(hung=store.hung, restored=True)
            yield Move("finds an older etcd", self.stores.of(back), node, "restore")

    def _want(self, store: Store, wanted: Requests) -> int:
        return self.stores.of(store.apply(Txn((), (Put(KEYS.wanted, encode(wanted)),)))[0])

    def _views(self, store: Store, node: Node, state: State) -> Iterator[Move]:
        """An agent sees what is there now, unless it was stopped with an older view before it."""
        if node.unread:
            late = node._replace(unread=0)
            yield self._event("goes on with its old view", store, late, node.unread)
            if node.lease:
                gone = node._replace(lease=0, told=False)
                yield self._ends(store, node.lease, gone, "stopped, its lease ends", FREE)
            return
        if not state.local.lease or state.life is Life.ENDED:
            return
        view = self.agent.view(store, node.state)
        if self.agent.views[view] == state.view:
            return
        yield self._event("sees", store, node, view)
        if self.faults.stop:
            label = f"is stopped{relation(store, node)}"
            yield Move(label, self.stores.of(store), node._replace(unread=view), "stop")
        if self.faults.long and lasted(state, self.agent.views[view]):
            half = self.limits.restart_window / 2
            yield self._event("sees, after a long time", store, node, view, half, "long")

    def _writes(self, store: Store, node: Node, state: State) -> Iterator[Move]:
        """A Txn is applied and answered, or one of the two happens twice, late or not at all."""
        if node.answer is not None:
            heard = node._replace(answer=None)
            yield self._event("hears the answer", store, heard, WriteDone(node.answer))
        if not node.txn:
            return
        what = described(state)
        after, written, ok = self._commit(store, node, node.txn)
        sent = written._replace(txn=0)
        label = f"{what}: {done(ok)}{instead(what, store, node) if ok else ''}"
        if node.unread:
            yield Move(label, self.stores.of(after), sent._replace(answer=ok))
            return
        yield self._event(label, after, sent, WriteDone(ok))
        if self.faults.slow:
            late = sent._replace(answer=ok)
            yield Move(f"{what}: {done(ok)}, its answer late", self.stores.of(after), late, "slow")
        if ok:  # the client tries again, and finds its own fence in the way
            yield Move(f"{what}: written, its answer lost", self.stores.of(after), written, "lost")
        if not node.late:
            copied = node._replace(late=(node.txn, node.lease))
            yield Move(f"{what}: sent twice", self.stores.of(store), copied, "late")

    def _agent(self, store: Store, node: Node, state: State) -> Iterator[Move]:
        if state.timer is not None and state.timer < FOREVER:
            fault = "tired" if leaves_out(state, store.hung) else CALM
            label = "has waited, the time of a suspect" if state.timer >= LONGEST else "has waited"
            yield self._event(label, store, node, Tick(), now=state.timer, fault=fault)
        if state.silent_since is not None:
            yield self._event("hears etcd again", store, node, Answered())
        if not node.told:
            yield self._event("learns of it", store, node._replace(told=True), LeaseLost(""))
        if state.life is Life.UNLISTED:
            yield from self._relist(store, node, state)
        ending = state.local.stopping or not state.alive
        if node.workers and ending and not in_endless_step(store, state):
            empty = node._replace(workers=0)
            yield self._event("is empty", store, empty, WorkersGone(node.workers))

    def _relist(self, store: Store, node: Node, state: State) -> Iterator[Move]:
        """Its key is put back, under its lease, or the fence does not hold; a write is given up.

        Where the answer is lost, its key is there as the client tries again.
        """
        assert state.view
        lease = state.local.lease
        own = Member(lease, node.name, 1, run=RUN)
        after, ok = store.apply(writes.relist(KEYS, state.view, state.local, own))
        there = node._replace(txn=0, answer=None)
        if not ok and (node.lease != lease or store.value(KEYS.member(lease)) is None):
            yield self._event("is not listed again", store, there, Relisted(0))
            return
        there = there._replace(lease=lease, told=True)
        if ok:
            check_relisted(node.name, state, store)
            back, again = (tuple(sorted({*known, lease})) for known in (after.back, after.again))
            after = after._replace(back=back, again=again)
            yield Move("is listed again, its answer lost", self.stores.of(after), there, "lost")
        yield self._event("is listed again", after, there, Relisted(2, 1.0))

    def _faults(self, store: Store, node: Node, state: State) -> Iterator[Move]:
        here, may = self.stores.of(store), self.faults
        dead = Node(
            node.number, node.incarnation, lease=node.lease, stale=node.stale, late=node.late
        )
        yield Move(f"dies{relation(store, node)}", here, dead, "crash")
        local = state.local
        if may.elastic and node.workers and not (local.elastic or local.stopping):
            event = WorkersElastic(node.workers, True)
            yield self._event("is elastic", store, node, event, fault="elastic")
        if may.finish and node.workers and state.alive and not local.finished:
            over = WorkersFinished(node.workers, True)
            yield self._event("finishes", store, node, over, fault="finish")
        if node.workers and state.alive and (local.patient or not local.stopping):
            failure = Failure(node.name, 0, 0, 1, 1, 100.0)
            failures = {
                "fail": ("worker fails", WorkerEnded(node.workers, failure)),
                "early": (
                    "worker fails early",
                    WorkerEnded(node.workers, replace(failure, message=EARLY)),
                ),
                "poison": (
                    "worker fails at that place",
                    WorkerEnded(node.workers, replace(failure, place=TrainingPlace(0, 1))),
                ),
                "peer": (
                    "worker loses its peer",
                    WorkerEnded(node.workers, replace(failure, message=LOST), by_peer=True),
                ),
            }
            for fault, (label, failed) in failures.items():
                if getattr(may, fault):
                    yield self._event(label, store, node, failed, fault=fault)
            if may.done or local.finished:
                fault = CALM if local.finished else "done"  # what is over ends sooner or later
                finished = WorkerEnded(node.workers, None)
                yield self._event("worker is done", store, node, finished, fault=fault)
        if may.expire and node.lease:
            gone = node._replace(lease=0, told=False)
            yield self._ends(store, node.lease, gone, "its lease is taken", "expire")
        if may.newer:
            newer = store.apply(Txn((), (Put(KEYS.outcome, NEWER),)))[0]
            yield Move("meets a newer one", self.stores.of(newer), node, "newer")
        now = round_of(store)
        if may.hang and node.lease and not node.txn and not (now and now.coordinator == node.lease):
            after = store._replace(hung=(*store.hung, node.lease))
            hung = node._replace(hung=True)
            yield Move(f"hangs{relation(store, node)}", self.stores.of(after), hung, "hang")
        if may.silent and state.silent_since is None:
            yield self._event("hears nothing of etcd", store, node, Silent(0.0), fault="silent")
        if may.leave and not state.local.leaving:
            yield self._event("gets SIGTERM", store, node, Signalled(), fault="leave")

    def _ends(self, store: Store, lease: int, node: Node, label: str, fault: str = CALM) -> Move:
        """Lease `lease` ends; who coordinated by it is remembered, see Store."""
        now, after = round_of(store), store.revoke(lease)
        if now and now.coordinator == lease:
            label = f"{label}, the coordinator's in {now.phase}"
            if now.phase is not Phase.FINAL and not round_of(after):
                after = after._replace(lost=(owner(lease), str(now.phase)))
        return Move(label, self.stores.of(after), node, fault)

    def _commit(self, store: Store, node: Node, number: int) -> tuple[Store, Node, bool]:
        txn = self.agent.txns[number]
        after, ok = store.apply(txn)
        if not ok:
            return store, node, False
        after = checked(node.name, node.lease, txn, store, after, self.limits)
        now = round_of(store)
        acks = any(isinstance(op, Put) and op.key.startswith(KEYS.acks()) for op in txn.then)
        if acks and now and node.lease:
            node = node._replace(acked=now.generation)
        return after, node, True

    def _joining(self, store: Store, node: Node) -> Iterator[Move]:
        """First its key is written, then it hears of that: its lease may end in between."""
        if not node.told:
            lost = node._replace(told=True, joining=False)
            yield self._event("learns of it while joining", store, lost, LeaseLost(""))
            return
        if not node.lease:
            if store.value(KEYS.outcome):
                yield Move("finds the end", self.stores.of(store), Node(node.number, out=True))
                return
            fresh = self.agent.states[node.state].limits is None
            if fresh and is_drained(store, node.name):
                return
            store, node = self._enter(store, node)
            if self.faults.expire:  # else nothing can come between
                yield Move("enters", self.stores.of(store), node)
                return
        joined = node._replace(joining=False)
        yield self._event("joins", store, joined, Joined(RUN, 1, node.lease, 1, self.limits))
        if self.faults.expire:
            gone = node._replace(lease=0, told=False)
            yield self._ends(store, node.lease, gone, "its lease is taken", "expire")

    def _enter(self, store: Store, node: Node) -> tuple[Store, Node]:
        lease = node.number * INCARNATIONS + node.incarnation + 1
        assert node.incarnation < INCARNATIONS - 1
        member = Put(KEYS.member(lease), encode(Member(lease, node.name, 1, run=RUN)), lease)
        store, _ = store.apply(Txn((), (member,)))
        again = Node(node.number, node.incarnation + 1, node.state, lease, joining=True)
        return store, again._replace(stale=node.stale, late=node.late)

    def _event(
        self,
        label: str,
        store: Store,
        node: Node,
        event: Event | int,
        now: float = 0.0,
        fault: str = CALM,
    ) -> Move:
        number, txn, actions = self.agent.step(node.state, event, now)
        state = self.agent.states[number]
        node = node._replace(state=number, txn=txn or node.txn)
        for action in actions:
            store, node = self._do(store, node, state, action)
        if node.state:
            check_learned(node.name, state)
            check_cut_off(node.name, state, now, self.limits)
            check_order(node.name, state)
        return Move(label, self.stores.of(store), node, fault)

    def _do(self, store: Store, node: Node, state: State, action: Action) -> tuple[Store, Node]:
        match action:
            case StartWorkers(begins, _):
                check_start(node.name, state.local, node.acked, node.workers, action, store)
                return store, node._replace(workers=begins.generation)
            case Rejoin():  # the mirror is closed, and a write is given up
                again = node._replace(joining=True, unread=0, answer=None)
                if node.lease and node.told:  # given up by the agent, not yet by the server
                    if node.stale:
                        store = self.stores[self._ends(store, node.stale, node, "").store]
                    again = again._replace(stale=node.lease, lease=0)
                return store, again
            case Exit():
                assert not node.workers
                return self._exit(store, node, state)
        return store, node

    def _exit(self, store: Store, node: Node, state: State) -> tuple[Store, Node]:
        """The last one to leave stops the job; a lease is revoked on the way out."""
        if state.local.leaving and state.local.lease:
            store, _ = store.apply(writes.leave(KEYS, state.local))
            if all(map(store.holds, writes.nobody(KEYS))):  # else its fence does not hold
                view = view_of(store.read(covered(KEYS, Everything(), 0)), KEYS, Everything())
                after, ok = store.apply(writes.stop(KEYS, view, state.local, ""))
                if ok:
                    check_alone(node.name, state.local.lease, store)
                    store = after
        if node.lease:
            store = self.stores[self._ends(store, node.lease, node, "").store]
        if is_drained(store, node.name):  # another agent may be started there
            return store, Node(node.number, node.incarnation, stale=node.stale, late=node.late)
        return store, Node(node.number, stale=node.stale, late=node.late, out=True)
