"""The nemesis: what goes wrong and when, in bursts that are a pure function of the seed.

A burst begins some seconds after the job has recovered from the one before, so that the same seed
gives the same faults in the same order on a machine of any speed. In each burst at least one node
of the world stays whole, because the training's state is in the memory of the world's nodes.
"""

import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from tests.support.etcd import EtcdServer
from tests.support.job import GUARDIAN, Agent
from tests.support.processes import send

from .machine import empty, no_descriptor, no_process, remove_memory, reset_links
from .nodes import FEWEST, MAX_NODES, MOST, TTL, Etcd, Nodes, forkserver

Undo = Callable[[], None]


class Kind(StrEnum):
    """What goes wrong. The value is what the user reads."""

    WORKER_KILL = "worker killed"
    WORKER_STOP = "worker stopped for a while"
    AGENT_KILL = "agent killed"
    AGENT_STOP = "agent stopped for a moment"
    AGENT_SLEEP = "agent asleep, for longer than its lease"
    NODE_FREEZE = "node frozen for a while"
    NODE_KILL = "node killed, agent and all"
    CONTAINER_KILL = "container killed, and started again"
    GUARDIAN_KILL = "guardian killed"
    FORKSERVER_KILL = "fork server killed"
    FORKSERVER_STOP = "fork server stopped for a while"
    TMPDIR_EMPTIED = "all in TMPDIR removed, the agent's directory too"
    MEMORY_REMOVED = "directory for memory checkpoints removed"
    LINKS_RESET = "links to other agents reset"
    NO_PROCESS = "no process or thread to be had on a node for a while"
    NO_DESCRIPTOR = "no descriptor to be had by an agent for a while"
    LEAVE = "node leaves on SIGTERM"
    DRAIN = "node drained by command, started again, and undrained"
    JOIN = "node joins"
    TRICKLE = "node joins soon after another"
    SCALE = "job scaled by command to other numbers of nodes, and back"
    STOP = "job stopped by command, and run again"
    DISK_FREEZE = "disk of the log files frozen for a while"
    ETCD_LEAD = "etcd's lead handed to another member"
    ETCD_KILL = "etcd member killed for a while"
    ETCD_STOP = "etcd member stopped for a while"
    ETCD_MAJORITY = "majority of etcd killed for a while"
    ETCD_AWAY = "all of etcd killed for a while"
    PERMISSION_LOST = "etcd's permission taken away for a while"
    COMPACTION = "compaction and defragmentation"


NODE_FAULTS = {  # the node is not there for some time, or for ever
    Kind.AGENT_KILL: 5,
    Kind.AGENT_STOP: 3,
    Kind.AGENT_SLEEP: 3,
    Kind.NODE_FREEZE: 4,
    Kind.NODE_KILL: 3,
    Kind.CONTAINER_KILL: 3,
    Kind.LEAVE: 4,
    Kind.DRAIN: 4,
}
LOST = {Kind.AGENT_KILL, Kind.NODE_KILL, Kind.LEAVE}
JOINS = {Kind.JOIN, Kind.TRICKLE}
PART_FAULTS = {
    Kind.WORKER_KILL: 8,
    Kind.WORKER_STOP: 4,
    Kind.GUARDIAN_KILL: 2,
    Kind.FORKSERVER_KILL: 1,
    Kind.FORKSERVER_STOP: 2,
    Kind.TMPDIR_EMPTIED: 2,
    Kind.MEMORY_REMOVED: 1,
    Kind.LINKS_RESET: 3,
    Kind.NO_PROCESS: 3,
    Kind.NO_DESCRIPTOR: 2,
}
MEMBER_FAULTS = {Kind.ETCD_KILL: 4, Kind.ETCD_STOP: 4}  # etcd goes on without the member
OUTAGES = {Kind.ETCD_MAJORITY: 2, Kind.ETCD_AWAY: 3, Kind.PERMISSION_LOST: 3}
ETCD_GONE = {*MEMBER_FAULTS, *OUTAGES}  # one at a time
OTHERS = {
    Kind.COMPACTION: 3,
    Kind.ETCD_LEAD: 4,
    Kind.JOIN: 4,
    Kind.TRICKLE: 2,
    Kind.DISK_FREEZE: 4,
    Kind.SCALE: 4,
}
ONE_AT_A_TIME = {Kind.DISK_FREEZE, Kind.SCALE, Kind.NO_PROCESS, Kind.NO_DESCRIPTOR}
FREE = {  # the world trains on; a burst of these alone begins no other
    Kind.GUARDIAN_KILL,
    Kind.FORKSERVER_KILL,
    Kind.FORKSERVER_STOP,
    Kind.TMPDIR_EMPTIED,
    Kind.MEMORY_REMOVED,
    Kind.LINKS_RESET,
    Kind.NO_DESCRIPTOR,
    Kind.DISK_FREEZE,
    Kind.ETCD_LEAD,
    Kind.COMPACTION,
}
STOPS = 0.05  # of all bursts; all nodes go, so that nothing else can happen
OTHER_SIZES = ("2:3", "3:4", "2", "3", "2,4")  # all of MIN_NODES to MAX_NODES
WEIGHTS = NODE_FAULTS | PART_FAULTS | MEMBER_FAULTS | OUTAGES | OTHERS


@dataclass(frozen=True, order=True)
class Fault:
    """`at` seconds after its burst begins, and over `lasts` seconds later, if it ends.

    target: the group rank that a node of the world has when the burst begins; or the role of
    an etcd member ("leader", "follower"); or how many nodes may train. Nothing for what has none.
    """

    at: float
    kind: Kind
    target: str = ""
    lasts: float = 0.0

    def __str__(self) -> str:
        target = f" [{self.target}]" if self.target else ""
        lasts = f" ({self.lasts:.1f} s)" if self.lasts else ""
        return f"{self.kind}{target}{lasts}"


@dataclass(frozen=True)
class Burst:
    """`faults` in the order of time, `pause` seconds after the job is whole; `agents` remain."""

    number: int
    pause: float
    faults: tuple[Fault, ...]
    agents: int

    @property
    def free(self) -> bool:
        """Whether it costs nothing: the same world trains on."""
        return all(fault.kind in FREE for fault in self.faults)


def schedule(seed: int, agents: int) -> Iterator[Burst]:
    """The bursts, without end, against a job that begins with so many agents."""
    chance = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret
    number = 0
    while True:
        number += 1
        burst = _burst(chance, number, agents)
        agents = burst.agents
        yield burst


def _burst(chance: random.Random, number: int, agents: int) -> Burst:
    if chance.random() < STOPS:
        stop = Fault(0.0, Kind.STOP, lasts=round(chance.uniform(0.3, 3), 1))
        return Burst(number, round(chance.uniform(0.5, 4), 1), (stop,), agents)
    victims = chance.sample(range(FEWEST), FEWEST - 1)  # whom node faults may hit, one each
    spread = chance.choice((0.3, 1.5, 4.0))
    faults: list[Fault] = []
    for _ in range(chance.choices((1, 2, 3, 4, 5), (8, 5, 3, 2, 1))[0]):
        at = round(chance.uniform(0, spread), 2) if faults else 0.0
        kind = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if kind in ONE_AT_A_TIME and any(fault.kind is kind for fault in faults):
            continue
        if kind in NODE_FAULTS:
            if victims:
                faults.append(_of_a_node(chance, kind, at, victims.pop()))
        elif kind in PART_FAULTS:
            lasts = _of_a_part(chance, kind)
            faults.append(Fault(at, kind, str(chance.randrange(FEWEST)), lasts))
        elif kind is Kind.JOIN:
            agents += 1
            faults.append(Fault(at, kind))
        elif kind is Kind.TRICKLE:
            coming = _trickle(chance, at, victims, agents)
            agents += sum(fault.kind is kind for fault in coming)
            faults += coming
        elif kind is Kind.DISK_FREEZE or kind is Kind.SCALE:
            sizes = chance.choice(OTHER_SIZES) if kind is Kind.SCALE else ""
            faults.append(Fault(at, kind, sizes, _while(chance)))
        elif kind not in ETCD_GONE or not any(fault.kind in ETCD_GONE for fault in faults):
            faults.append(_of_etcd(chance, kind, at))
    agents -= sum(fault.kind in LOST for fault in faults)
    return _with_enough(chance, number, faults, agents)


def _of_a_node(chance: random.Random, kind: Kind, at: float, victim: int) -> Fault:
    lasts = 0.0
    if kind in (Kind.AGENT_STOP, Kind.CONTAINER_KILL):
        lasts = round(chance.uniform(0.3, 3), 1)
    elif kind is Kind.AGENT_SLEEP:
        lasts = round(chance.uniform(1.2 * TTL, 2.5 * TTL), 1)
    elif kind in (Kind.NODE_FREEZE, Kind.DRAIN):
        lasts = _while(chance)
    return Fault(at, kind, str(victim), lasts)


def _of_a_part(chance: random.Random, kind: Kind) -> float:
    """For how long."""
    if kind in (Kind.WORKER_STOP, Kind.FORKSERVER_STOP):
        return round(chance.uniform(0.3, 8), 1)
    return _while(chance) if kind in (Kind.NO_PROCESS, Kind.NO_DESCRIPTOR) else 0.0


def _while(chance: random.Random) -> float:
    """As often shorter than the TTL as longer."""
    return round(chance.choice((chance.uniform(0.3, 3), chance.uniform(TTL, 2.5 * TTL))), 1)


def _trickle(chance: random.Random, at: float, victims: list[int], agents: int) -> list[Fault]:
    """Some join, with a pause before each; as many leave as there is no room for."""
    joining = chance.choice((2, 3))
    leaving = min(len(victims), max(0, agents + joining - MOST))
    faults = [Fault(at, Kind.LEAVE, str(victims.pop())) for _ in range(leaving)]
    for _ in range(joining):
        at = round(at + chance.uniform(0.2, 2.5), 2)
        faults.append(Fault(at, Kind.TRICKLE))
    return faults


def _of_etcd(chance: random.Random, kind: Kind, at: float) -> Fault:
    if kind not in ETCD_GONE:
        return Fault(at, kind)
    role = chance.choice(("leader", "follower")) if kind in MEMBER_FAULTS else ""
    longest = 1.5 * TTL if kind in MEMBER_FAULTS else 2.5 * TTL
    return Fault(at, kind, role, round(chance.uniform(0.5, longest), 1))


def _with_enough(chance: random.Random, number: int, faults: list[Fault], agents: int) -> Burst:
    """So many nodes as there may be; nobody joins while etcd is away, since they'd give up."""
    while agents > MOST:
        faults.remove(next(f for f in faults if f.kind in JOINS))
        agents -= 1
    while agents < FEWEST or (agents < MAX_NODES and chance.random() < 0.5):
        faults.append(Fault(round(chance.uniform(0, 4), 2), Kind.JOIN))
        agents += 1
    away = [f.at + f.lasts for f in faults if f.kind in OUTAGES]
    if away:
        faults = [_not_before(max(away) + 0.5, fault) for fault in faults]
    if not faults:
        faults = [Fault(0.0, Kind.WORKER_KILL, str(chance.randrange(FEWEST)))]
    return Burst(number, round(chance.uniform(0.5, 4), 1), tuple(sorted(faults)), agents)


def _not_before(at: float, fault: Fault) -> Fault:
    """The fault, with a node that it starts started at that moment at the soonest."""
    if fault.kind in JOINS:
        return replace(fault, at=at + fault.at if fault.kind is Kind.TRICKLE else at)
    if fault.kind in (Kind.CONTAINER_KILL, Kind.DRAIN):
        return replace(fault, lasts=round(max(fault.lasts, at - fault.at), 1))
    return fault


class Nemesis:
    """Injects a burst's faults at their times, and ends those that end.

    `asked()` says that the user wants to stop: then nothing more is injected.
    """

    def __init__(self, etcd: Etcd, nodes: Nodes, asked: Callable[[], bool]) -> None:
        self._etcd, self._nodes, self._asked = etcd, nodes, asked
        self._targets: list[str] = []  # the world's nodes when the burst began

    def burst(self, burst: Burst, tell: Callable[[Fault, str, float], None]) -> None:
        """`tell` is told each fault, whom it has hit, and after how many seconds."""
        began = time.monotonic()
        self._nodes.logs.read()
        self._targets = self._nodes.logs.nodes()
        faults = list(burst.faults)
        ends: list[tuple[float, Undo]] = []
        while faults or ends:
            ends.sort(key=lambda end: end[0])
            fault = faults[0] if faults and (not ends or faults[0].at <= ends[0][0]) else None
            at = fault.at if fault else ends[0][0]
            self._nodes.rest(began + at - time.monotonic(), self._asked)
            if fault is None:
                ends.pop(0)[1]()
            elif self._asked():
                faults.clear()
            else:
                faults.pop(0)
                whom, undo = self._inject(fault)
                tell(fault, whom, time.monotonic() - began)
                if undo:
                    ends.append((time.monotonic() - began + fault.lasts, undo))

    def _inject(self, fault: Fault) -> tuple[str, Undo | None]:
        """Whom it has hit, and what ends it."""
        if fault.kind in JOINS:
            return self._nodes.join(), None
        if fault.kind is Kind.DISK_FREEZE:
            return self._nodes.disk.freeze(), self._nodes.disk.thaw
        if fault.kind is Kind.COMPACTION:
            return self._etcd.compact(), None
        if fault.kind is Kind.ETCD_LEAD:
            return self._etcd.hand_over(), None
        if fault.kind is Kind.SCALE:
            return self._nodes.scale(fault.target, fault.lasts), _nothing
        if fault.kind is Kind.STOP:
            return self._nodes.stop_job()
        if fault.kind in ETCD_GONE:
            return self._hit_etcd(fault)
        node = self._targets[int(fault.target)]
        agent = next((a for a in self._nodes.running if a.node == node), None)
        if agent is None:
            return f"{node}, which is gone", None
        if fault.kind in PART_FAULTS:
            return self._hit_part(agent, fault)
        return node, self._hit_node(agent, fault)

    def _hit_node(self, agent: Agent, fault: Fault) -> Undo | None:
        match fault.kind:
            case Kind.DRAIN:
                return self._nodes.drain(agent, fault.lasts)
            case Kind.AGENT_KILL:
                self._nodes.expect(agent, -signal.SIGKILL)
                agent.kill()
            case Kind.NODE_KILL:
                self._nodes.expect(agent, -signal.SIGKILL)
                agent.begin_node_kill()
            case Kind.CONTAINER_KILL:
                self._nodes.expect(agent, -signal.SIGKILL)
                agent.begin_node_kill()
                return self._nodes.await_again(agent)
            case Kind.LEAVE:
                self._nodes.expect(agent, 128 + signal.SIGTERM)
                agent.terminate()
            case Kind.NODE_FREEZE:
                agent.freeze()
                return agent.thaw
            case Kind.AGENT_STOP | Kind.AGENT_SLEEP:
                return _stop([agent.pid])
        return None

    def _hit_part(self, agent: Agent, fault: Fault) -> tuple[str, Undo | None]:
        """What was hit, in words, and what ends it."""
        node, logs = agent.node, self._nodes.logs
        match fault.kind:
            case Kind.WORKER_KILL:
                logs.read()
                send(signal.SIGKILL, logs.pids(node)[-1:])
            case Kind.WORKER_STOP:
                return node, _stop(logs.pids(node)[:1])
            case Kind.GUARDIAN_KILL:
                send(signal.SIGKILL, agent.programs(GUARDIAN))
            case Kind.FORKSERVER_KILL:
                send(signal.SIGKILL, forkserver(agent))
            case Kind.FORKSERVER_STOP:
                return node, _stop(forkserver(agent))
            case Kind.TMPDIR_EMPTIED:
                empty(self._nodes.temporary(agent))
            case Kind.MEMORY_REMOVED:
                remove_memory(agent.pid)
            case Kind.LINKS_RESET:
                others = [other.pid for other in self._nodes.running]
                return f"{node}, {reset_links(agent.pid, others)}", None
            case Kind.NO_PROCESS:
                what, undo = no_process(agent.mark)
                return f"{node}{what}", undo
            case Kind.NO_DESCRIPTOR:
                return node, no_descriptor(agent.pid)
        return node, None

    def _hit_etcd(self, fault: Fault) -> tuple[str, Undo]:
        match fault.kind:
            case Kind.PERMISSION_LOST:
                return self._etcd.forbid(), self._etcd.allow
            case Kind.ETCD_STOP:
                member = self._etcd.member(fault.target)
                member.freeze()
                return member.name, member.thaw
            case Kind.ETCD_KILL:
                victims: Sequence[EtcdServer] = [self._etcd.member(fault.target)]
            case Kind.ETCD_MAJORITY:
                victims = self._etcd.members[:2]
            case _:
                victims = self._etcd.members
        for member in victims:
            member.kill()
        return " ".join(m.name for m in victims), lambda: _start(victims)


def _nothing() -> None:
    """Of a fault that ends by itself."""


def _stop(pids: list[int]) -> Undo:
    send(signal.SIGSTOP, pids)
    return lambda: send(signal.SIGCONT, pids)


def _start(members: Sequence[EtcdServer]) -> None:
    """Without waiting until they serve, which they may not do without the others."""
    for member in members:
        with member.launch():
            pass
