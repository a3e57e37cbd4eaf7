"""An etcd that is full takes no writes but keeps its leases: the training goes on and waits."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_etcd.errors import EtcdRefused
from elastic_etcd.etcd.client import Client
from tests.support.aio import put
from tests.support.etcd import FAST, EtcdServer
from tests.support.residue import member
from tests.support.ticking import TickingJob, ticking

pytestmark = pytest.mark.timeout(600)

CURE = "etcdctl alarm disarm"


@pytest.fixture
def small(own_etcd: EtcdServer) -> EtcdServer:
    own_etcd.arguments = (*FAST, f"--quota-backend-bytes={16 << 20}")
    own_etcd.start()
    return own_etcd


@pytest.fixture
def job(small: EtcdServer, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[TickingJob]:
    with ticking(small.endpoint, small, tmp_path / "job", request) as job:
        yield job


async def fill(server: EtcdServer) -> None:
    async with Client(server.config) as client:

        async def write_for_ever() -> None:
            while True:
                await put(client, "/other/large", "x" * (1 << 20))

        with pytest.raises(EtcdRefused, match=CURE):
            await write_for_ever()


def make_room(server: EtcdServer) -> None:
    status = json.loads(server.ctl("endpoint", "status", "-w", "json"))
    server.ctl("compact", str(status[0]["Status"]["header"]["revision"]))
    server.ctl("defrag")
    server.ctl("alarm", "disarm")


def test_no_space(job: TickingJob, small: EtcdServer) -> None:
    n1, n2, g = job.pair(lease_ttl=1)
    spare = job.start("spare")
    job.said(spare, "spare: ")
    asyncio.run(fill(small))
    assert "NOSPACE" in small.ctl("alarm", "list")
    late = job.start("late")
    spare.terminate()
    job.undisturbed(g, 2)  # which is longer than a lease that nobody renews
    job.exits(late, 5)
    assert CURE in late.output
    job.exits(spare, 143)
    job.kill_worker(g)
    failed, other = (n1, n2) if job.worker(g, 0).node == "n1" else (n2, n1)
    job.said(failed, CURE)  # it can't report
    small.ctl("lease", "revoke", member(small, job.name, other.node))
    job.said(other, "this node's key is gone, its world is not")
    job.said(other, CURE)  # for a new lease, too
    assert n1.running()
    assert n2.running()
    make_room(small)
    job.trains(2, after=g)
    job.finish(n1, n2)
