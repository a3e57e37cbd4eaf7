"""Agents without processes on a key space in memory, under production's own functions.

Every event goes through core.lifecycle.step, every view is made by core.view.view_of and every
write by core.writes, as agent/agent.py and agent/membership.py do it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from msgspec import UNSET, structs

from elastic_etcd.core import lifecycle, writes
from elastic_etcd.core.lifecycle import (
    Action,
    Ending,
    Event,
    Exit,
    Fatal,
    Joined,
    Left,
    Life,
    Log,
    MarkLeaving,
    Outdated,
    Over,
    Rejoin,
    Relist,
    Relisted,
    ReportEnd,
    SetTimer,
    StartWorkers,
    State,
    StopWorkers,
    ViewChanged,
    WorkersGone,
    Writable,
    Write,
    WriteDone,
)
from elastic_etcd.core.schema import Drain, Keys, Labels, Limits, Master, Member, Spec
from elastic_etcd.core.txn import KeyValue, Txn
from elastic_etcd.core.view import Coverage, Everything, Narrow, View, covered, view_of
from tests.support.keyspace import KeySpace

KEYS = Keys("/elastic_etcd/scenario")
ENDLESS = 200  # moves without coming to rest


@dataclass
class Agent:
    """One node: its agent's state, and what is on its way to and from etcd."""

    name: str
    nproc: int = 1
    label: str = ""
    topology: str = ""
    run: str = "run1"
    rerun: bool = False
    incarnation: int = 0
    state: State | None = None  # None: not there
    member: Member | None = None
    coverage: Coverage = field(default_factory=Narrow)
    copy: dict[str, KeyValue] = field(default_factory=dict)
    txn: Txn | None = None
    joining: bool = False
    relist: Txn | None = None
    workers: int = 0  # generation of its live workers

    @property
    def lease(self) -> int:
        return int(f"{self.name}{self.incarnation}", 16)


class Simulator:
    """The agents, the key space and the clock; what happens is told line by line."""

    def __init__(self) -> None:
        self.limits = Limits(1, 2)
        self.clock = 0.0
        self.etcd = KeySpace()
        self.saved = KeySpace()  # a backup of it
        self.agents: dict[str, Agent] = {}

    def agent_sees(self, agent: Agent, *keys: str) -> Iterator[str]:
        """All that its mirror covers, or only the named keys: the others are on their way."""
        assert agent.state is not None
        coverage = lifecycle.coverage(agent.state)
        snapshot = self.etcd.read(*covered(KEYS, coverage, agent.lease))
        if keys:
            assert coverage == agent.coverage, "a new mirror begins with a list"
            for key in (f"{KEYS.root}/{key}" for key in keys):
                agent.copy.pop(key, None)
                if key in snapshot.kvs:
                    agent.copy[key] = snapshot.kvs[key]
        else:
            agent.coverage, agent.copy = coverage, dict(snapshot.kvs)
        view = view_of(replace(snapshot, kvs=dict(agent.copy)), KEYS, coverage)
        yield from self.event(agent, ViewChanged(view))

    def agent_writes(self, agent: Agent, how: str = "") -> Iterator[str]:
        """Its write reaches etcd; "unheard": the answer to it does not come back as a yes."""
        assert agent.txn is not None, f"{agent.name} writes nothing"
        ok = self.etcd.txn(agent.txn)
        agent.txn = None
        yield f"{agent.name}: {'written' if ok else 'refused'}"
        yield from self.event(agent, WriteDone(ok and how != "unheard"))

    def agent_empties(self, agent: Agent) -> Iterator[str]:
        generation, agent.workers = agent.workers, 0
        yield from self.event(agent, WorkersGone(generation))

    def go_on(self, names: list[str], phase: str = "") -> Iterator[str]:
        """They see, write, and their stopped workers end, until the round has come to `phase`,
        or until nothing is left to do.
        """
        for _ in range(ENDLESS):
            moved = False
            for name in names:
                for line in self._move(self.agents[name]):
                    moved = True
                    if line:
                        yield line
                now = self.everything().round
                if now and now.phase == phase:
                    return
            if not moved:
                return
        raise AssertionError("they never come to rest")

    def _move(self, agent: Agent) -> Iterator[str]:
        """What it can do now; an empty line for a move without anything to tell."""
        state = agent.state
        if state is None:
            return
        if agent.joining:
            yield from ("", *self.join(agent))
        elif agent.relist:
            yield from ("", *self.relist(agent))
        elif state.local.running and state.local.stopping and not state.local.patient:
            yield from ("", *self.agent_empties(agent))
        elif agent.txn:
            yield from ("", *self.agent_writes(agent))
        elif state.local.lease and state.life is not Life.ENDED:
            coverage = lifecycle.coverage(state)
            new = dict(self.etcd.read(*covered(KEYS, coverage, agent.lease)).kvs)
            if (coverage, new) != (agent.coverage, agent.copy) or state.view is None:
                yield from ("", *self.agent_sees(agent))

    def join(self, agent: Agent) -> Iterator[str]:
        assert agent.state is not None
        again = bool(agent.state.local.run)
        agent.joining, agent.coverage, agent.copy = False, Narrow(), {}
        agent.relist = None
        agent.incarnation += 1
        agent.member = Member(
            agent.lease,
            agent.label or agent.name,
            agent.nproc,
            labels=Labels(agent.topology or UNSET),
        )
        run = agent.state.local.run or agent.run
        spec = Spec(run, agent.state.limits or self.limits)
        seen = self.etcd.read(*writes.look(KEYS))
        last = agent.state.local.ran
        rerun = agent.rerun
        txn = writes.join(KEYS, seen, agent.member, spec, again=again, rerun=rerun, last=last)
        if isinstance(txn, Drain):
            yield f"{agent.name}: waits, it is drained"
            agent.state = None
            return
        if isinstance(txn, Outdated | Over):
            yield f"{agent.name}: cannot join: {txn.reason}"
            agent.state = None
            return
        if isinstance(txn, str):
            yield f"{agent.name}: cannot join: {txn}"
            if again:
                yield from self.event(agent, Fatal(Over(txn)))
            agent.state = None
            return
        assert self.etcd.txn(txn)
        agent.txn = None  # a write of the member before is given up
        spec_kv, key = self.etcd.kvs[KEYS.spec], self.etcd.kvs[KEYS.member(agent.lease)]
        known = self.everything().spec
        assert known is not None
        agent.member = structs.replace(agent.member, run=known.run)
        yield f"{agent.name}: joined as {agent.lease:x}"
        if differing := known.limits.differing(spec.limits):
            yield f"{agent.name}: the job's limits count: {differing}"
        joined = Joined(known.run, spec_kv.create, agent.lease, key.create, known.limits)
        yield from self.event(agent, joined)

    def relist(self, agent: Agent) -> Iterator[str]:
        """Its key is put back; a write from before is given up."""
        assert agent.relist
        ok = self.etcd.txn(agent.relist)
        agent.relist = agent.txn = None
        yield f"{agent.name}: {'is listed again' if ok else 'is not listed again'}"
        key = self.etcd.kvs.get(KEYS.member(agent.lease)) if ok else None
        yield from self.event(agent, Relisted(key.create if key else 0, 10.0))

    def event(self, agent: Agent, event: Event) -> Iterator[str]:
        assert agent.state is not None, f"{agent.name} is not there"
        agent.state, actions = lifecycle.step(agent.state, event, self.clock)
        for action in actions:
            yield from (f"{agent.name}: {line}" for line in self._do(agent, agent.state, action))

    def _do(self, agent: Agent, state: State, action: Action) -> Iterator[str]:
        match action:
            case Log(decision):
                yield f'"{decision.reason}"'
            case Write(what):
                yield f"writes {_what(what)}"
                agent.txn = self._txn(agent, state, action)
            case StartWorkers(now, part):
                assert not agent.workers, "I3: it still has workers"
                agent.workers = now.generation
                yield f"starts generation {now.generation} as {part.group_rank} of {now.nodes}"
            case StopWorkers(grace, by, seconds):
                given = "" if seconds is None else f", {seconds:g} s"
                given += "" if by is None else f", by SIGKILL in {by - self.clock:g} s"
                yield f"stops its workers ({grace.value}{given})"
            case Rejoin():
                agent.joining = True
                yield "joins again"
            case Relist():
                assert state.view and agent.member
                agent.relist = writes.relist(KEYS, state.view, state.local, agent.member)
                yield "puts its key back"
            case Exit(why):
                yield from self._exit(agent, state, why)
            case SetTimer(at):
                if at is not None:
                    yield f"waits until {at:g} s"

    def _txn(self, agent: Agent, state: State, write: Write) -> Txn:
        now = state.view.round if state.view else None
        master = Master(agent.name, 29500) if now else None
        assert agent.member is not None
        return writes.build(KEYS, state, write, agent.member, master, "")

    def _exit(self, agent: Agent, state: State, why: Ending) -> Iterator[str]:
        assert not agent.workers
        yield "exits" if isinstance(why, Left) else f"exits: {why.reason}"
        if isinstance(why, Left) and state.local.lease:
            self.etcd.txn(writes.leave(KEYS, state.local))
            if self.etcd.txn(writes.stop(KEYS, self.everything(), state.local, "")):
                yield "was the last one"
        self.etcd.revoke(agent.lease)
        agent.state = agent.txn = None

    def everything(self) -> View:
        return view_of(self.etcd.read(*covered(KEYS, Everything(), 0)), KEYS, Everything())


def _what(what: Writable) -> str:
    match what:
        case MarkLeaving():
            return "that it is leaving"
        case ReportEnd(failure):
            return f"report: {failure or 'done'}"
    return type(what).__name__.lower()
