"""A job of real agents and real workers on a real etcd, and what its workers' logs must show."""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tests.support.invariants import Event, check
from tests.support.processes import MARK, Changes, command, marked, send

ROOT = Path(__file__).parents[2]
TRAINERS = Path(__file__).with_name("trainers")
DDP, ELASTIC, DIGITS, TICKER, DEVICE = (
    str(TRAINERS / f"{name}.py") for name in ("ddp", "elastic", "digits", "ticker", "device")
)
# Programs that run on a node, by the ends of their paths.
GUARDIAN, FORKSERVER = "children/guardian_process.py", "children/forkserver.py"
TTL = 2
PATIENCE = 90.0  # seconds, on a machine that does much else

T = TypeVar("T")


class Agent:
    """One node: the agent's process and all that descends from it."""

    def __init__(
        self, node: str, mark: str, output: Path, process: "subprocess.Popen[bytes]"
    ) -> None:
        self.node, self.mark, self.process = node, mark, process
        self._output = output

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def others(self) -> list[int]:
        """Everything on this node but the agent."""
        return [pid for pid in marked(self.mark) if pid != self.pid]

    def programs(self, path: str) -> list[int]:
        """What runs this program, and its forks."""
        return sorted(pid for pid in self.others() if path in command(pid))

    def kill(self) -> None:
        """SIGKILL the agent, and nothing else."""
        send(signal.SIGKILL, [self.pid])

    def freeze(self) -> None:
        """The whole node stops: first the agent, which could otherwise still see the others."""
        send(signal.SIGSTOP, [self.pid])
        send(signal.SIGSTOP, self.others())

    def thaw(self) -> None:
        send(signal.SIGCONT, [self.pid, *self.others()])

    def node_kill(self) -> None:
        """The whole node dies, and nothing on it can react to the death of another part."""
        self.begin_node_kill()
        self.process.wait(PATIENCE)

    def begin_node_kill(self) -> None:
        """The same; a process that waits for a disk ends only when that answers."""
        self.freeze()
        send(signal.SIGKILL, [self.pid, *self.others()])

    def terminate(self, number: signal.Signals = signal.SIGTERM) -> None:
        send(number, [self.pid])

    def running(self) -> bool:
        return self.process.poll() is None


class Job:
    """The agents of one job id, one after the other or at the same time, and their logs.

    All files are in `directory`: one log per worker process, one per agent, the checkpoint.
    """

    def __init__(self, endpoint: str | None, directory: Path, name: str = "") -> None:
        self.endpoint, self.directory = endpoint, directory
        self.name = name or f"job-{uuid.uuid4().hex[:8]}"
        self.mark = uuid.uuid4().hex
        self.agents: list[Agent] = []
        self.abandoned = False  # by a test: nobody was left to write the outcome
        directory.mkdir(parents=True, exist_ok=True)
        self._changes = Changes(directory)
        self._offsets: dict[Path, int] = {}
        self._events: list[Event] = []

    # --- agents

    def start(
        self,
        node: str,
        *worker: str,
        nnodes: str = "1:2",
        nproc: int | str = 1,
        script: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        output: Path | None = None,
        python: Path = Path(sys.executable),
        program: tuple[str, ...] = ("elastic_etcd.launch",),
        **flags: object,
    ) -> Agent:
        """Start an agent; `worker` are the arguments of trainers/ddp.py, `flags` more of launch's,
        None for one that takes no value.

        Its stdout and stderr are a file in `output`, by default in the job's own folder.

        The settle time is long by default: tests start with as many nodes as may be, and then
        nobody waits for it.
        """
        mark = f"{self.mark}.{len(self.agents)}.{node}"
        flags = {"lease_ttl": TTL, "settle": 20, "max_restarts": 3} | flags
        argv = [str(python), "-m", *program, "--job", self.name]
        argv += ["--etcd", self.endpoint] if self.endpoint else []
        argv += ["--node-name", node, "--nnodes", nnodes, "--nproc-per-node", str(nproc)]
        argv += [
            f"--{name.replace('_', '-')}" + ("" if value is None else f"={value}")
            for name, value in flags.items()
        ]
        argv += script or (DDP, "--dir", ".", *worker)
        said = (output or self.directory) / f"{node}.{len(self.agents)}.agent.log"
        paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), MARK: mark}
        with said.open("wb") as stream:
            process = subprocess.Popen(
                argv,
                cwd=self.directory,
                env=environment | (env or {}),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        agent = Agent(node, mark, said, process)
        self.agents.append(agent)
        self._changes.follow(process.pid)
        return agent

    def wait(self, what: str, until: Callable[[], T | None], seconds: float = PATIENCE) -> T:
        """The first true value of `until`; fails with all that is known when it comes too late."""
        value = self._changes.wait(until, seconds)
        assert value, f"after {seconds} s not yet: {what}\n{self.account()}"
        return value

    def exits(self, agent: Agent, code: int, seconds: float = PATIENCE) -> None:
        """Wait for an agent's end, which must have this exit status."""
        self.wait(f"{agent.node} ends", lambda: not agent.running(), seconds)
        assert agent.process.returncode == code, (
            f"{agent.node}: exit {agent.process.returncode} instead of {code}\n{self.account()}"
        )

    def said(self, agent: Agent, text: str, seconds: float = PATIENCE) -> None:
        self.wait(f"{agent.node} says {text!r}", lambda: text in agent.output, seconds)

    # --- workers

    def events(self, event: str = "") -> list[Event]:
        """All events so far, in the order of their files' lines, or those of one kind."""
        for path in self.directory.glob("*.jsonl"):
            with path.open() as file:
                file.seek(self._offsets.get(path, 0))
                new = file.read()
            whole, _, rest = new.rpartition("\n")
            self._offsets[path] = self._offsets.get(path, 0) + len(new) - len(rest)
            self._events += [Event(**json.loads(line)) for line in whole.splitlines()]
        return [e for e in self._events if event in ("", e.event)]

    def trains(
        self, world: int, *, after: int = 0, steps: int = 3, seconds: float = PATIENCE
    ) -> int:
        """Wait until every rank of a world of this size, in a generation later than `after`,
        has done some steps; which generation that is.
        """

        def generation() -> int | None:
            done: dict[tuple[int, int], int] = defaultdict(int)
            for e in self.events("step"):
                if e.generation > after and e.world_size == world:
                    done[e.generation, e.rank] += 1
            for g in {g for g, _ in done}:
                if all(done.get((g, rank), 0) >= steps for rank in range(world)):
                    return g
            return None

        return self.wait(f"a world of {world} trains after generation {after}", generation, seconds)

    def worker(self, generation: int, rank: int) -> Event:
        """The start of a rank's process."""
        (start,) = [e for e in self.events("start") if (e.generation, e.rank) == (generation, rank)]
        return start

    def begun(self, generation: int) -> dict[str, Event]:
        """The starts of a generation's workers, by node; for nodes of one worker."""
        return {e.node: e for e in self.events("start") if e.generation == generation}

    def goes_on(self, generation: int, steps: int = 3, seconds: float = PATIENCE) -> None:
        """Wait until a generation has trained some more steps than it has now."""

        def count() -> int:
            return sum(e.generation == generation for e in self.events("step"))

        goal = count() + steps * max(
            (e.world_size for e in self.events("step") if e.generation == generation), default=1
        )
        self.wait(f"generation {generation} goes on", lambda: count() >= goal, seconds)

    def stop(self) -> None:
        """Ask the workers to finish at their next step, with exit code 0."""
        (self.directory / "stop").touch()

    def finish(self, *agents: Agent, seconds: float = PATIENCE) -> None:
        """End the training: every agent given exits 0."""
        self.stop()
        for agent in agents:
            self.exits(agent, 0, seconds)

    # --- the end

    def account(self) -> str:
        """What everyone said, for a failed test."""
        last = self.events()[-8:]
        logs = [f"--- {a.node} ({a.process.poll()})\n{a.output[-4000:]}" for a in self.agents]
        end = ["--- last events", *map(str, last), "--- processes", *self.processes()]
        return "\n".join([*logs, *end])

    def processes(self) -> list[str]:
        """All that runs of this job, agents and what descends from them."""
        return [f"{pid} {command(pid)}" for pid in marked(self.mark)]

    def close(self) -> None:
        """Kill what is left."""
        send(signal.SIGKILL, marked(self.mark))
        for agent in self.agents:
            agent.process.kill()
            agent.process.wait(PATIENCE)
        self._changes.close()

    def check(self) -> None:
        """The invariants, from what the workers logged."""
        check(self.events())
