"""What a job of chaos runs on: its nodes, and the members of etcd with what they record."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from elastic_etcd.core.schema import PREFIX
from elastic_etcd.system import trampoline
from tests.support.disks import loop_disk, stand_still, turn_again
from tests.support.etcd import FAST, EtcdCluster, EtcdServer, hand_over
from tests.support.job import FORKSERVER, ROOT, Agent, Job
from tests.support.processes import Changes, send

from .history import Recorded, read

TTL = 5
MIN_NODES, MAX_NODES = 2, 4  # of a world
FEWEST, MOST = 3, 5  # agents after each burst; the surplus is a spare
WORKLOAD = Path(__file__).with_name("workload.py")
WORKERS = {"n2": 2}  # on all other nodes one
FLAGS: dict[str, Any] = {
    "nnodes": f"{MIN_NODES}:{MAX_NODES}",
    "lease_ttl": TTL,
    "settle": TTL,
    "max_restarts": 10**6,
    "min_uptime": 0,
    "start_timeout": 120,  # so that a false alarm would show
    "stop_after_no_progress": 0,  # a burst may kill the same world before its next commit
    "suspect_after": 0,  # nodes come back again and again, and are awaited
    "redirects": 1,  # what workers say goes to files only; what goes wrong, to their agent's, too
}
COMMIT_EVERY = 3
IMPATIENT = ("--dial-timeout=3s", "--command-timeout=3s")  # of a member that may be away
TEMPORARY = "tmp"  # and an agent's number: its TMPDIR
ASKED_FOR = ("torchinductor_", "elastic_etcd-flight-")  # torch's cache, flight records
RECORDED = ": the last events are in "
TRIES = 20  # of a command that is refused
USER, PASSWORD, ROLE = "me", "mine", "training"  # as EtcdServer.guard makes them
ROOT_USER, ROOT_PASSWORD = "root", "secret"


@dataclass
class Rank:
    """A rank of a world: its process, and when it last finished a step (wall clock)."""

    node: str
    group_rank: int
    pid: int
    size: int
    last: float = 0.0


class WorkerLogs:
    """What the workers have logged: who trains now, and how far. `read` takes in what is new."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[Path, int] = {}
        self._worlds: dict[int, dict[int, Rank]] = {}  # by generation and rank
        self.step = 0

    @property
    def generation(self) -> int:
        """The latest that workers have begun."""
        return max(self._worlds, default=0)

    @property
    def world(self) -> dict[int, Rank]:
        """Its ranks so far."""
        return self._worlds.get(self.generation, {})

    def read(self) -> None:
        for path in self._directory.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                new = file.read()
            whole, newline, _ = new.rpartition(b"\n")
            self._offsets[path] = self._offsets.get(path, 0) + len(whole + newline)
            for line in whole.splitlines():
                self._take(json.loads(line))

    def _take(self, line: dict[str, Any]) -> None:
        ranks = self._worlds.setdefault(line["generation"], {})
        if line["event"] == "start":
            group_rank, size = line["group_rank"], line["world_size"]
            ranks[line["rank"]] = Rank(line["node"], group_rank, line["pid"], size)
            for old in [g for g in self._worlds if g < self.generation - 3]:
                del self._worlds[old]
        elif line["event"] == "step" and line["rank"] in ranks:
            ranks[line["rank"]].last = line["time"]
            self.step = max(self.step, line["step"])

    def nodes(self) -> list[str]:
        """The world's nodes, in rank order."""
        nodes = {rank.group_rank: rank.node for rank in self.world.values()}
        return [nodes[group_rank] for group_rank in sorted(nodes)]

    def pids(self, node: str) -> list[int]:
        """Its workers', in rank order."""
        return [rank.pid for _, rank in sorted(self.world.items()) if rank.node == node]

    def trains(self, since: float) -> bool:
        """Whether every rank of the latest world has finished a step after that moment."""
        ranks = self.world.values()
        complete = bool(ranks) and len(ranks) == next(iter(ranks)).size
        return complete and all(rank.last > since for rank in ranks)


@contextmanager
def disk(directory: Path) -> Iterator["Disk"]:
    """Make one in this folder, where it can be made; what was on it is kept there."""
    path = directory / "disk"
    path.mkdir()
    with loop_disk(path, directory / "disk.image") as made:
        opened = Disk(path, made)
        try:
            yield opened
        finally:
            opened.thaw()
        if made:
            shutil.copytree(path, directory / "logs")


class Disk:
    """Where --log-dir is. It can stand still if it is `apart`: a disk of its own."""

    def __init__(self, path: Path, apart: bool) -> None:
        self.path, self._apart = path, apart
        self._frozen = False

    def freeze(self) -> str:
        """Whoever writes to it waits from here on; what was done, in words."""
        if not self._apart:
            return "left out: it takes root and a loop device"
        stand_still(self.path)
        self._frozen = True
        return "under --log-dir"

    def thaw(self) -> None:
        if self._frozen:
            turn_again(self.path)
        self._frozen = False


class Nodes:
    """Agents of one job, whose --log-dir is on `disk`.

    Raises AssertionError when one ends that should not. `seen(logs)` is called again and again
    while something is waited for.
    """

    def __init__(
        self,
        endpoints: str,
        directory: Path,
        name: str,
        disk: Disk,
        seen: Callable[[WorkerLogs], None],
        *,
        plain: bool,
    ) -> None:
        self.disk = disk
        self._endpoints = endpoints
        self.job = Job(endpoints, directory, name)
        self.logs = WorkerLogs(directory)
        self._changes = Changes(directory)
        self._expected: dict[Agent, int | None] = {}  # exit status of agents; None: it runs
        self._seen, self._plain = seen, plain
        self._awaited: set[str] = set()  # names of nodes that will start again
        self._returning: list[Agent] = []  # agents that are to end, and whose nodes start then
        self._returned = 0.0  # when the last ones of them started (wall clock)
        self._orders: list[Order] = []

    @property
    def running(self) -> list[Agent]:
        """Agents that should run."""
        return [agent for agent, code in self._expected.items() if code is None]

    def join(self) -> str:
        """Start an agent under the first name that is free."""
        used = self._awaited | {agent.node for agent in self._expected if agent.running()}
        node = next(n for n in (f"n{i}" for i in range(1, 2 * MOST)) if n not in used)
        self.start(node)
        return node

    def await_again(self, agent: Agent) -> Callable[[], None]:
        """Keep the name of an agent that is killed now; gives what starts another one under it."""
        self._awaited.add(agent.node)
        return lambda: self.start(agent.node)

    def drain(self, agent: Agent, seconds: float) -> Callable[[], None]:
        """Have it leave, and undrain it after so long; gives what starts its node again."""
        self.expect(agent, 128 + signal.SIGTERM)
        self._awaited.add(agent.node)
        who = shlex.quote(agent.node)
        self._order(f"sleep {seconds} & give drain {who} --wait && wait && give undrain {who}")
        return lambda: self._returning.append(agent)

    def scale(self, sizes: str, seconds: float) -> str:
        """Have other numbers of nodes train for so long; what was done, in words."""
        self._order(f"give scale {sizes} && sleep {seconds} && give scale {MIN_NODES}:{MAX_NODES}")
        return f"to {sizes}"

    def stop_job(self) -> tuple[str, Callable[[], None]]:
        """All leave, and the job's run is over; who, and what starts their nodes again."""
        agents = self.running
        for agent in agents:
            self.expect(agent, 128 + signal.SIGTERM)
            self._awaited.add(agent.node)
        self._order("give stop --wait")
        return "all", lambda: self._returning.extend(agents)

    def _order(self, commands: str) -> None:
        path = self.job.directory / f"order{len(self._orders)}.log"
        self._orders.append(Order(self._endpoints, self.job.name, commands, path))
        self._changes.follow(self._orders[-1].process.pid)

    def _start_again(self) -> None:
        """The nodes that return, when all that they have run before has ended."""
        if any(agent.running() for agent in self._returning):
            return
        for agent in self._returning:
            self.start(agent.node)
            self._returned = time.time()
        self._returning = []

    def start(self, node: str) -> None:
        """Start an agent of this name."""
        self._awaited.discard(node)
        directory = self.job.directory
        temporary = directory / f"{TEMPORARY}{len(self.job.agents)}"
        temporary.mkdir()
        script = [str(WORKLOAD), "--dir", str(directory), f"--commit-every={COMMIT_EVERY}"]
        agent = self.job.start(
            node,
            nproc=WORKERS.get(node, 1),
            script=(*script, *["--plain"][: self._plain]),
            env={"TMPDIR": str(temporary), "ELASTIC_ETCD_PASSWORD": PASSWORD},
            user=USER,
            log_dir=self.disk.path,
            **FLAGS,
        )
        self._expected[agent] = None
        self._changes.follow(agent.pid)

    def temporary(self, agent: Agent) -> Path:
        """Its TMPDIR."""
        return self.job.directory / f"{TEMPORARY}{self.job.agents.index(agent)}"

    def expect(self, agent: Agent, code: int) -> None:
        """From now on this agent is to end, with this exit status."""
        self._expected[agent] = code

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
        self.logs.read()
        self._seen(self.logs)
        for agent, code in self._expected.items():
            status = agent.process.poll()
            assert status in (None, code), (
                f"{agent.node} (pid {agent.pid}) ended with {status}:\n{agent.output[-3000:]}"
            )
        for order in self._orders:
            assert order.process.poll() in (None, 0), f"a command failed: {order}"
        self._start_again()
        return True

    def whole(self) -> Callable[[], bool]:
        """Whether, after now, all that leave have left, and all others train, but spares."""
        since = time.time()

        def recovered() -> bool:
            leaving = [a for a, code in self._expected.items() if code is not None and a.running()]
            names, trains = {agent.node for agent in self.running}, set(self.logs.nodes())
            # One that has not come to etcd yet would give up if that were to go now.
            spares = [a for a in self.running if a.node not in trains and "spare" in a.output]
            given = all(order.process.poll() is not None for order in self._orders)
            return (
                given
                and not self._returning
                and not leaving
                and trains <= names
                and len(trains) == min(len(names), MAX_NODES)
                and len(trains) + len(spares) == len(names)
                and self.logs.trains(max(since, self._returned))
            )

        return recovered

    def finish(self, seconds: float) -> None:
        """End the training: every agent that is there exits 0."""
        self.record()
        self.job.stop()
        for agent in self.running:
            self._expected[agent] = 0
        self.wait("all agents end", lambda: not any(a.running() for a in self._expected), seconds)

    def record(self) -> None:
        """Have each agent that runs write its flight record, which stays in its TMPDIR."""
        written = {agent: agent.output.count(RECORDED) for agent in self.running}
        for agent in written:
            agent.terminate(signal.SIGUSR1)

        def all_have() -> bool:
            return all(a.output.count(RECORDED) > n or not a.running() for a, n in written.items())

        self._changes.wait(all_have, 10)

    def files(self) -> list[str]:
        """What agents that ended in order have left of temporary files that nobody asked for."""
        in_order = (0, 128 + signal.SIGTERM)
        ended = [i for i, agent in enumerate(self.job.agents) if self._expected[agent] in in_order]
        folders = [self.job.directory / f"{TEMPORARY}{i}" for i in ended]
        found = [path for folder in folders for path in folder.iterdir()]
        return [str(path) for path in found if not path.name.startswith(ASKED_FOR)]

    def close(self) -> None:
        for order in self._orders:
            order.close()
        self.job.close()
        self._changes.close()


class Order:
    """Commands that somebody gives at a shell, in which `give COMMAND ...` is of this job.

    It is given again where it is refused: a node may be without a lease just then.
    """

    def __init__(self, endpoints: str, job: str, commands: str, log: Path) -> None:
        self._commands, self._log = commands, log
        where = f"--etcd {endpoints} --user {ROOT_USER} --timeout 60"
        ours = f"{shlex.quote(sys.executable)} -m elastic_etcd"
        again = f"for _ in $(seq {TRIES}); do {ours} $c {job} $* {where} && return; sleep 1; done"
        script = f"give() {{ c=$1; shift; {again}; return 1; }}; {commands}"
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                ["sh", "-c", script],
                env=os.environ | {"PYTHONPATH": str(ROOT), "ELASTIC_ETCD_PASSWORD": ROOT_PASSWORD},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def __str__(self) -> str:
        return f"{self._commands}\n{self._log.read_text()[-3000:]}"

    def close(self) -> None:
        """Whoever gives them goes away."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def forkserver(agent: Agent) -> list[int]:
    """Forks of it that wait look like it, but lead sessions of their own."""
    return [pid for pid in agent.programs(FORKSERVER) if os.getsid(pid) == agent.pid][:1]


def workers(agent: Agent) -> list[int]:
    return [pid for pid in agent.programs("elastic_etcd: ") if os.getsid(pid) == pid]


class Member(EtcdServer):
    """A member that Ctrl-C in the terminal does not reach."""

    def command(self) -> list[str]:
        return ["setsid", *super().command()]


class Etcd:
    """`with Etcd(directory) as etcd`; all members and the recorder run, whatever happens."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        made = EtcdCluster.make(directory).members
        self.members: Sequence[EtcdServer] = [
            Member(
                directory,
                m.name,
                (*FAST, "--bcrypt-cost=4"),
                port=m.port,
                peer_port=m.peer_port,
                cluster=m.cluster,
            )
            for m in made
        ]
        self._forbidden = False
        self._cluster = EtcdCluster(self.members)
        self._file = directory / "history.jsonl"

    @property
    def endpoints(self) -> str:
        return ",".join(member.endpoint for member in self.members)

    @property
    def healthy(self) -> EtcdServer:
        """Any member, once all are healed."""
        return self.members[0]

    def __enter__(self) -> Self:
        self.heal()
        self.healthy.guard(f"{PREFIX}/")
        for member in self.members:
            member.user = f"{ROOT_USER}:{ROOT_PASSWORD}"
        own = (sys.executable, "-I", "-S", trampoline.__file__, str(os.getpid()), "--")
        recorder = (sys.executable, "-m", "scripts.chaos_lib.history", self.endpoints, PREFIX)
        with (self._directory / "history.log").open("wb") as log:
            self._recorder = subprocess.Popen(
                [*own, *recorder, str(self._file), ROOT_USER, ROOT_PASSWORD],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._recorder.terminate()
        self._recorder.wait(10)
        self._cluster.kill()

    def heal(self) -> None:
        """All members run and agree, and the agents may do what they need."""
        self._cluster.heal()
        self.allow()

    def forbid(self) -> str:
        """The agents' user may neither read nor write the job's keys from here on."""
        self._forbidden = True
        self.healthy.ctl("--command-timeout=20s", "user", "revoke-role", USER, ROLE)
        return USER

    def allow(self) -> None:
        if self._forbidden:
            self.healthy.ctl("--command-timeout=20s", "user", "grant-role", USER, ROLE)
        self._forbidden = False

    def events(self, job: str) -> list[Recorded]:
        """All of a job's that have been recorded."""
        return list(read(self._file, f"{PREFIX}/{job}/")) if self._file.exists() else []

    def record_all(self, seconds: float) -> None:
        """Wait until the record is at etcd's revision. All that is written here is recorded."""
        answer = json.loads(self.healthy.ctl("get", PREFIX, "-w", "json"))
        last = int(answer["header"]["revision"])
        changes = Changes(self._directory)
        done = changes.wait(lambda: self.recorded() >= last, seconds)
        changes.close()
        assert done, f"only {self.recorded()} of {last} revisions are recorded after {seconds} s"

    def recorded(self) -> int:
        """The revision up to which the history has been recorded."""
        if self._recorder.poll() is not None:
            raise RuntimeError((self._directory / "history.log").read_text())
        last = self._file.read_bytes().splitlines()[-1:] if self._file.exists() else []
        return int(json.loads(last[0])["revision"]) if last else 0

    def hand_over(self) -> str:
        """Another member leads from here on, if it can; which one."""
        leader = self.member("leader")
        heir = self.members[(self.members.index(leader) + 1) % len(self.members)]
        try:
            hand_over(leader, heir, *IMPATIENT)
        except subprocess.CalledProcessError as error:
            return f"to {heir.name} refused: {error.stderr.strip().splitlines()[-1][-80:]}"
        return f"to {heir.name}"

    def compact(self) -> str:
        """Up to what is recorded: agents that are stopped may not have seen so much."""
        revision = self.recorded()
        try:
            self.healthy.ctl("--command-timeout=3s", "compact", str(revision))
            self.healthy.ctl("--command-timeout=3s", "defrag")
        except subprocess.CalledProcessError as error:
            return f"at {revision} refused: {error.stderr.strip().splitlines()[-1][-80:]}"
        return f"at {revision}"

    def member(self, role: str) -> EtcdServer:
        """The leader, or the first member that is not; as far as it can be told."""
        for member in self.members:
            try:
                answer = member.ctl(*IMPATIENT, "endpoint", "status", "-w", "json")
            except subprocess.CalledProcessError:
                continue
            status = json.loads(answer)[0]["Status"]
            leads = status["leader"] == status["header"]["member_id"]
            if leads == (role == "leader"):
                return member
        return self.members[-1]
