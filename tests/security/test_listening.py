"""Who can reach what this program opens."""

import socket
from pathlib import Path

import pytest

from elastic_etcd.etcd.access import EtcdConfig
from elastic_etcd.etcd.client import Client
from elastic_etcd.etcd.embedded import EmbeddedEtcd
from tests.support.aio import put
from tests.support.etcd import EtcdServer
from tests.support.job import Job
from tests.support.lines import contact, members

LISTEN = "0A"
LOOPBACK = "0100007F"  # 127.0.0.1, as /proc has it


def listening(pid: int) -> set[str]:
    """The addresses at which a process listens, TCP over IPv4 and IPv6, in hexadecimal."""
    links = [fd.readlink() for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
    inodes = {str(link)[8:-1] for link in links if str(link).startswith("socket:[")}
    found = set()
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    return found


def of_proc(address: str) -> str:
    """An IPv4 address as /proc has it."""
    return socket.inet_aton(address)[::-1].hex().upper()


async def test_the_embedded_etcd_is_for_this_machine_only() -> None:
    async with EmbeddedEtcd() as etcd:
        assert etcd._process
        assert listening(etcd._process.pid) == {LOOPBACK}


async def test_m21_the_etcd_of_a_node_alone_is_for_its_user_only() -> None:
    async with EmbeddedEtcd(private=True) as etcd, Client(EtcdConfig((etcd.endpoint,))) as client:
        await put(client, "/a")
        assert etcd._process
        assert listening(etcd._process.pid) == set()
        assert Path(etcd.endpoint.removeprefix("unix://")).readlink().parent == etcd._directory
        assert etcd._directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.nightly(part="jobs")
@pytest.mark.timeout(300)
def test_a_node_listens_at_its_own_address_only(job: Job) -> None:
    """The store, at the address on the way to etcd; workers are torch's, and not looked at."""
    n1 = job.start("n1", nnodes="1", nproc=2)
    generation = job.trains(2)
    workers = {job.worker(generation, rank).pid for rank in (0, 1)}
    found = {pid: listening(pid) for pid in (n1.pid, *n1.others()) if pid not in workers}
    assert set().union(*found.values()) == {LOOPBACK}
    job.finish(n1)


@pytest.mark.timeout(300)
def test_nodes_of_a_job_listen_at_their_own_addresses_only(job: Job, etcd: EtcdServer) -> None:
    """Each agent for lines, at the address that its member key says, and the store beside one."""
    agents = [job.start(node) for node in ("n1", "n2")]
    generation = job.trains(2)
    workers = {job.worker(generation, rank).pid for rank in (0, 1)}
    for agent in agents:
        member = members(etcd, job.name)[agent.node]
        own = {of_proc(contact(member).addr)}
        assert contact(member).addr == member.address
        assert listening(agent.pid) == own
        others = (pid for pid in agent.others() if pid not in workers)
        assert set().union(*map(listening, others)) <= own
    job.finish(*agents)
