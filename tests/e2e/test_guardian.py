"""Agents that are killed: what they ran ends, and the others learn of it long before the lease.

The leases here outlast every deadline, so what is seen in time is the guardian's doing.
"""

import os
import signal
from pathlib import Path

import pytest

from tests.support.etcd import EtcdServer
from tests.support.job import GUARDIAN, Agent, Job
from tests.support.processes import command, send
from tests.support.residue import members_are

pytestmark = pytest.mark.timeout(120)

LONG = 100  # seconds


def guardian(agent: Agent) -> int:
    (pid,) = agent.programs(GUARDIAN)
    return pid


def sockets(pid: int) -> set[str]:
    """What the process has open of sockets."""
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.add(str(fd.readlink()))
        except FileNotFoundError:  # closed meanwhile
            continue
    return {name for name in found if name.startswith("socket:")}


def test_an_agent_is_killed(job: Job) -> None:
    n1 = job.start("n1", lease_ttl=LONG)
    n2 = job.start("n2", "--fault", "linger@node=n2", nproc=2, lease_ttl=LONG)
    g = job.trains(3)
    assert "sleep 600" in map(command, n2.others()), "a worker's child, in its process group"
    n2.kill()
    job.wait("all that it ran ends, its guardian last", lambda: not n2.others())
    job.said(n2, f"elastic_etcd: the agent (pid {n2.pid}) is gone: killed what it ran, lease ")
    job.trains(1, after=g)
    assert "n2 is lost" in n1.output
    job.finish(n1)


def test_a_spare_is_killed(job: Job, etcd: EtcdServer) -> None:
    n1 = job.start("n1", nnodes="1:1", lease_ttl=LONG)
    g = job.trains(1)
    n2 = job.start("n2", nnodes="1:1", lease_ttl=LONG)
    job.said(n2, "spare")
    n2.kill()
    members_are(etcd, job.name, 1)
    job.goes_on(g)
    job.finish(n1)


def test_a_guardian_is_killed_and_then_its_agent(job: Job) -> None:
    n1, n2 = job.start("n1", lease_ttl=LONG), job.start("n2", lease_ttl=LONG)
    g = job.trains(2)
    first = guardian(n2)
    send(signal.SIGKILL, [first])
    job.said(n2, f"the guardian (pid {first}) has ended (SIGKILL); another one is started now")
    job.goes_on(g)
    assert guardian(n2) != first
    n2.kill()
    job.trains(1, after=g)
    job.finish(n1)


def test_an_agent_is_stopped_for_a_while(job: Job) -> None:
    n1, n2 = job.start("n1", lease_ttl=LONG), job.start("n2", lease_ttl=LONG)
    g = job.trains(2)
    send(signal.SIGSTOP, [n2.pid])
    job.goes_on(g)
    send(signal.SIGCONT, [n2.pid])
    job.goes_on(g)
    job.finish(n1, n2)


def test_an_agent_leaves_in_order(job: Job) -> None:
    n1, n2 = job.start("n1", lease_ttl=LONG), job.start("n2", lease_ttl=LONG)
    g = job.trains(2)
    n2.terminate()
    job.exits(n2, 143)
    assert not n2.others()
    job.trains(1, after=g)
    os.killpg(n1.pid, signal.SIGINT)  # as Ctrl-C does
    job.exits(n1, 130)
    assert "guardian" not in n1.output + n2.output
    assert "is gone" not in n1.output + n2.output


def test_nobody_else_holds_a_socket_of_the_agent(job: Job) -> None:
    """Else its guardian would not see its end."""
    n1 = job.start("n1", nnodes="1:1", nproc=2)
    job.trains(2)
    ours, others = sockets(n1.pid), {pid: sockets(pid) for pid in n1.others()}
    assert others[guardian(n1)], "its own end"
    assert len(others) > 3, "workers, store, pool"
    assert {command(pid): both for pid, open_ in others.items() if (both := open_ & ours)} == {}
    job.finish(n1)
