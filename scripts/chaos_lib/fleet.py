"""The job's agents: started, hit and watched; and when the job is whole again."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.harness import Agent, Job
from tests.e2e.processes import Changes, command, send

from .cluster import Undo
from .journal import Journal
from .schedule import MAX_NODES, MIN_NODES, MOST, TTL, Fault, Kind

TRAINER = Path(__file__).with_name("trainer.py")
WORKERS = {"n2": 2}  # on all other nodes one
FLAGS: dict[str, Any] = {
    "nnodes": f"{MIN_NODES}:{MAX_NODES}",
    "lease_ttl": TTL,
    "settle": TTL,
    "max_restarts": 10**6,
    "min_uptime": 0,
}
COMMIT_EVERY = 3


class Fleet:
    """Agents of one job. Raises AssertionError when one ends that should not.

    `seen(journal)` is called again and again while something is waited for.
    """

    def __init__(
        self,
        endpoints: str,
        directory: Path,
        name: str,
        seen: Callable[[Journal], None],
        *,
        plain: bool,
    ) -> None:
        self.job = Job(endpoints, directory, name)
        self.journal = Journal(directory)
        self._changes = Changes(directory)
        self._expected: dict[Agent, int | None] = {}  # exit status of agents; None: it runs
        self._seats: list[str] = []  # the world's nodes when the burst began
        self._seen, self._plain = seen, plain

    @property
    def running(self) -> list[Agent]:
        """Agents that should run."""
        return [agent for agent, code in self._expected.items() if code is None]

    def join(self) -> str:
        """Start an agent under the first name that is free."""
        used = {agent.node for agent in self._expected if agent.running()}
        node = next(n for n in (f"n{i}" for i in range(1, 2 * MOST)) if n not in used)
        directory = self.job.directory
        temporary = directory / f"tmp{len(self.job.agents)}"
        temporary.mkdir()
        script = [str(TRAINER), "--dir", str(directory), f"--commit-every={COMMIT_EVERY}"]
        agent = self.job.start(
            node,
            nproc=WORKERS.get(node, 1),
            script=(*script, *["--plain"][: self._plain]),
            env={"TMPDIR": str(temporary)},
            **FLAGS,
        )
        self._expected[agent] = None
        self._changes.follow(agent.pid)
        return node

    def begin_burst(self) -> None:
        """Targets are places in the world that trains now."""
        self.journal.read()
        self._seats = self.journal.nodes()

    def inject(self, fault: Fault) -> tuple[str, Undo | None]:
        """Whom it has hit, and what ends it."""
        if fault.kind is Kind.JOIN:
            return self.join(), None
        node = self._seats[int(fault.target)]
        agent = next((a for a in self.running if a.node == node), None)
        if agent is None:
            return f"{node}, which is gone", None
        return node, self._hit(agent, fault.kind)

    def _hit(self, agent: Agent, kind: Kind) -> Undo | None:
        match kind:
            case Kind.AGENT_KILL | Kind.NODE_KILL:
                self._expected[agent] = -signal.SIGKILL
                if kind is Kind.NODE_KILL:
                    agent.node_kill()
                else:
                    agent.kill()
            case Kind.LEAVE:
                self._expected[agent] = 0
                agent.terminate()
            case Kind.NODE_FREEZE:
                agent.freeze()
                return agent.thaw
            case Kind.AGENT_STOP:
                return stop([agent.pid])
            case Kind.WORKER_STOP:
                return stop(self.journal.pids(agent.node)[:1])
            case Kind.WORKER_KILL:
                self.journal.read()
                send(signal.SIGKILL, self.journal.pids(agent.node)[-1:])
            case Kind.GUARDIAN_KILL:
                send(signal.SIGKILL, [p for p in agent.others() if "agent/guard.py" in command(p)])
            case Kind.POOL_KILL:
                send(signal.SIGKILL, pool(agent))
        return None

    def wait(self, what: str, until: Callable[[], bool], seconds: float) -> None:
        """Raises AssertionError when it comes too late, or an agent ends meanwhile."""
        if not self._changes.wait(lambda: self._look() and until(), seconds):
            for agent in self.running:
                send(signal.SIGUSR1, workers(agent))
            self._changes.wait(lambda: None, 2)  # until they have said where they are
            raise AssertionError(f"after {seconds} s not yet: {what}\n{self.job.account()}")

    def rest(self, seconds: float, enough: Callable[[], bool]) -> None:
        """Let so much time pass, or less."""
        self._changes.wait(lambda: self._look() and enough(), max(0.0, seconds))

    def _look(self) -> bool:
        self.journal.read()
        self._seen(self.journal)
        for agent, code in self._expected.items():
            status = agent.process.poll()
            assert status in (None, code), (
                f"{agent.node} (pid {agent.pid}) ended with {status}:\n{agent.output[-3000:]}"
            )
        return True

    def whole(self) -> Callable[[], bool]:
        """Whether, after now, all that leave have left, and all others train, but spares."""
        since = time.time()

        def recovered() -> bool:
            leaving = [a for a, code in self._expected.items() if code is not None and a.running()]
            names, trains = {agent.node for agent in self.running}, set(self.journal.nodes())
            # One that has not come to etcd yet would give up if that were to go now.
            spares = [a for a in self.running if a.node not in trains and "spare" in a.output]
            return (
                not leaving
                and trains <= names
                and len(trains) == min(len(names), MAX_NODES)
                and len(trains) + len(spares) == len(names)
                and self.journal.trains(since)
            )

        return recovered

    def finish(self, seconds: float) -> None:
        """End the training: every agent that is there exits 0."""
        self.job.stop()
        for agent in self.running:
            self._expected[agent] = 0
        self.wait("all agents end", lambda: not any(a.running() for a in self._expected), seconds)

    def files(self) -> list[str]:
        """What agents that ended in order have left of temporary files, but torch's cache."""
        ended = [i for i, agent in enumerate(self.job.agents) if self._expected[agent] == 0]
        folders = [self.job.directory / f"tmp{i}" for i in ended]
        found = [path for folder in folders for path in folder.iterdir()]
        return [str(path) for path in found if not path.name.startswith("torchinductor_")]

    def close(self) -> None:
        self.job.close()
        self._changes.close()


def stop(pids: list[int]) -> Undo:
    send(signal.SIGSTOP, pids)
    return lambda: send(signal.SIGCONT, pids)


def pool(agent: Agent) -> list[int]:
    """Workers are forked from it and look like it, but lead sessions of their own."""
    return [pid for pid in forked(agent) if os.getsid(pid) == agent.pid][:1]


def workers(agent: Agent) -> list[int]:
    return [pid for pid in forked(agent) if os.getsid(pid) == pid]


def forked(agent: Agent) -> list[int]:
    return sorted(pid for pid in agent.others() if "train/warm.py" in command(pid))
