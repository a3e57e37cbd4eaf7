"""Jobs whose workers only tick: cheap enough to ask much of etcd in little time."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.etcd import EtcdCluster, EtcdServer
from tests.support.invariants import check_worlds
from tests.support.job import ROOT, TICKER, Agent, Job
from tests.support.residue import Residue, passed

# Before torch in the imports of the store server, which no worker of these jobs asks.
NO_STORE = str(Path(__file__).with_name("no_store"))
STEP_TIME = 0.03  # a little more than that, in fact
ESTABLISHED = "01"


class TickingJob(Job):
    """A job of agents without a fork server and workers without torch."""

    def start(self, node: str, *worker: str, **more: object) -> Agent:
        """As Job.start."""
        script = (TICKER, "--dir", ".", *worker)  # the same in each of a name
        flags: dict[str, Any] = {"start_method": "exec", "script": script} | more
        if flags["start_method"] == "exec":
            paths = filter(None, (NO_STORE, str(ROOT), os.environ.get("PYTHONPATH")))
            flags["env"] = {"PYTHONPATH": os.pathsep.join(paths)} | (flags.get("env") or {})
        return super().start(node, **flags)

    def pair(self, **flags: object) -> tuple[Agent, Agent, int]:
        """Two nodes that train, and their generation."""
        n1, n2 = self.start("n1", **flags), self.start("n2", **flags)
        return n1, n2, self.trains(2)

    def kill_worker(self, generation: int, rank: int = 0) -> None:
        os.kill(self.worker(generation, rank).pid, signal.SIGKILL)

    def undisturbed(self, generation: int, seconds: float = 0) -> None:
        """The generation goes on for so long, and there is no later one."""
        self.goes_on(generation, steps=max(3, int(seconds / STEP_TIME)))
        last = max(e.generation for e in self.events())
        assert last == generation, f"generation {last}\n{self.account()}"

    def settles(self, world: int, seconds: float = 1.0) -> int:
        """The newest generation, once that is of this size and trains after so many seconds."""
        since = time.time() + seconds

        def newest() -> int | None:
            late = [e for e in self.events("step") if e.time > since]
            generation = max((e.generation for e in late), default=0)
            its = [e for e in late if e.generation == generation and e.world_size == world]
            return generation if len({e.rank for e in its}) == world else None

        return self.wait(f"a world of {world} for {seconds} s", newest)

    def check(self) -> None:
        """One world per generation, one generation per node."""
        check_worlds(self.events())


def connected(agent: Agent, cluster: EtcdCluster) -> list[EtcdServer]:
    """The members to which this agent has connections, as the kernel shows them.

    One, but for a while after it has left one that owes it an answer.
    """
    links = (entry.readlink().name for entry in Path(f"/proc/{agent.pid}/fd").iterdir())
    own = {link[8:-1] for link in links if link.startswith("socket:[")}
    ports = set()
    # gRPC's sockets are of both families.
    lines = Path(f"/proc/{agent.pid}/net/tcp6").read_text().splitlines()[1:]
    for line in lines:
        _, _, remote, state, *_, inode = line.split()[:10]
        if inode in own and state == ESTABLISHED:
            ports.add(int(remote.rpartition(":")[2], 16))
    return [member for member in cluster.members if member.port in ports]


@contextmanager
def ticking(
    endpoints: str, look: EtcdServer | None, directory: Path, request: pytest.FixtureRequest
) -> Iterator[TickingJob]:
    """A job for one test; if that passes it is checked, and what it left looked for at `look`."""
    residue = Residue(look) if look else None
    job = TickingJob(endpoints, directory)
    try:
        yield job
        if request.node.stash.get(passed, False):
            job.check()
            if residue:
                residue.assert_clean([job])
    finally:
        job.close()
