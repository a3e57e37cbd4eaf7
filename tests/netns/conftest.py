"""A job whose nodes and etcd are on hosts of their own, with a wire between them."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.support.etcd import EtcdServer
from tests.support.job import Agent, Job
from tests.support.residue import passed
from tests.support.ticking import TickingJob

from .wire import INTERFACE, Wire

NODES = ("n1", "n2", "n3", "n4")
TTL = 3

AnyNetJob = TypeVar("AnyNetJob", bound="NetJob")


class HostedEtcd(EtcdServer):
    """An etcd on a host of the wire."""

    address = ""

    @property
    def endpoint(self) -> str:
        return f"{self.address}:{self.port}"


class NetJob(Job):
    """Its nodes are on the hosts of their names."""

    def __init__(self, wire: Wire, endpoint: str, directory: Path) -> None:
        super().__init__(endpoint, directory)
        self.wire = wire

    def node(self, name: str, *worker: str, **flags: Any) -> Agent:
        """Start the agent of a node there."""
        # All hosts have the machine's name, and gloo would take the address of that.
        env = {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
        options: dict[str, Any] = {"nnodes": "1:3", "lease_ttl": TTL, "env": env} | flags
        return self.wire.hosts[name].run(partial(self.start, name, *worker, **options))

    def steps(self) -> int:
        """All steps of all ranks so far."""
        return len(self.events("step"))

    def advances(self, steps: int, seconds: float = 90) -> None:
        """Wait for so many more steps, in whatever generation."""
        goal = self.steps() + steps
        self.wait(f"{steps} more steps", lambda: self.steps() >= goal, seconds)

    def stands_still(self, generation: int, seconds: float) -> None:
        """For so long no step is done, once the last ones are, and no generation begins."""
        self._changes.wait(lambda: None, 1)
        before = self.steps()
        changed = self._changes.wait(
            lambda: (
                self.steps() > before
                or any(e.generation > generation for e in self.events("start"))
            ),
            seconds,
        )
        assert not changed, f"training goes on, or begins anew\n{self.account()}"


@pytest.fixture
def wires() -> Iterator[Callable[..., Wire]]:
    """Makes the wire of the hosts etcd and those that are named."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces take root")
    if not Path("/dev/net/tun").exists() or shutil.which("ip") is None:
        pytest.skip("without /dev/net/tun and the program ip there are no hosts")
    made: list[Wire] = []

    def make(*names: str) -> Wire:
        try:
            made.append(Wire(("etcd", *names)))
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")
        return made[-1]

    yield make
    for wire in made:
        wire.close()


@pytest.fixture
def wire(wires: Callable[..., Wire]) -> Wire:
    """The hosts etcd, n1 … n4."""
    return wires(*NODES)


class NetTicks(NetJob, TickingJob):
    """Its workers only tick, and have nothing to do with each other."""


@pytest.fixture
def job(wire: Wire, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[NetJob]:
    """A job of nodes on the wire; the invariants must hold in the logs of a test that passed."""
    with on_the_wire(NetJob, wire, tmp_path, request) as job:
        yield job


@pytest.fixture
def ticks(wire: Wire, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[NetTicks]:
    """The same of workers that only tick."""
    with on_the_wire(NetTicks, wire, tmp_path, request) as job:
        yield job


@contextmanager
def on_the_wire(
    kind: type[AnyNetJob], wire: Wire, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[AnyNetJob]:
    host = wire.hosts["etcd"]
    etcd = HostedEtcd(tmp_path)
    etcd.address = host.address
    job = kind(wire, etcd.endpoint, tmp_path / "job")
    try:
        host.run(etcd.start)
        yield job
        if request.node.stash.get(passed, False):
            job.check()
            job.wait("nothing is left", lambda: not job.processes(), 10)
    finally:
        job.close()
        etcd.kill()
