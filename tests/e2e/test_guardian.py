"""Agents that are killed: what they ran ends, and the others learn of it long before the lease.

The leases here outlast every deadline, so what is seen in time is the guardian's doing.
"""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.etcd import EtcdServer
from tests.support.job import GUARDIAN, Agent, Job
from tests.support.processes import command, send
from tests.support.residue import members_are
from tests.support.ticking import TickingJob

pytestmark = pytest.mark.timeout(600)

LONG = 100  # seconds


@pytest.fixture
def job(ticks: TickingJob) -> TickingJob:
    """Without fork servers, and with workers that only tick."""
    return ticks


def guardian(agent: Agent) -> int:
    (pid,) = agent.programs(GUARDIAN)
    return pid


def killed_with_its_guardian_busy(job: Job) -> tuple[Agent, int]:
    """n1's agent, which is dead, and its guardian, which is stopped before it does anything."""
    before = job.start("n1", nnodes="1:1")
    job.trains(1)
    busy = guardian(before)
    send(signal.SIGSTOP, [busy])
    before.kill()
    before.process.wait()
    return before, busy


def sockets(pid: int) -> set[str]:
    """What the process has open of sockets."""
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.add(str(fd.readlink()))
        except FileNotFoundError:  # closed meanwhile
            continue
    return {name for name in found if name.startswith("socket:")}


def test_the_guardian_of_an_agent_that_logs_json_does_so_too(ticks: TickingJob) -> None:
    n1 = ticks.start("n1", nnodes="1", log_format="json")
    ticks.trains(1)
    n1.kill()
    ticks.wait("the guardian ends last", lambda: not n1.others())
    told = [json.loads(line) for line in n1.output.splitlines()][-1]
    assert list(told) == ["time", "level", "job", "node", "message"]
    assert (told["job"], told["node"]) == (ticks.name, "n1")
    assert told["message"].startswith(
        f"the agent (pid {n1.pid}) is gone: killed what it ran, lease "
    )
    ticks.abandoned = True


def test_the_folder_of_a_killed_agent_s_error_files_goes_but_for_a_hang_s_evidence(
    ticks: TickingJob, tmp_path: Path
) -> None:
    n1, n2 = (ticks.start(n, env={"TMPDIR": str(folder)}) for n, folder in folders(tmp_path))
    ticks.trains(2)
    (kept,) = tmp_path.glob(f"n2/{ticks.name}_*/generation_1/*")
    (kept / "hang.txt").touch()
    for agent in (n1, n2):
        assert list(tmp_path.glob(f"{agent.node}/{ticks.name}_*"))
        agent.kill()
    ticks.wait("the guardians end last", lambda: not (n1.others() or n2.others()))
    assert list(tmp_path.glob(f"*/{ticks.name}_*")) == [kept.parent.parent]
    ticks.abandoned = True


def folders(tmp_path: Path) -> list[tuple[str, Path]]:
    found = [(node, tmp_path / node) for node in ("n1", "n2")]
    for _, folder in found:
        folder.mkdir()
    return found


def test_an_agent_is_killed_and_others_leave_in_order(jobs: Callable[..., Job]) -> None:
    job = jobs()
    n1 = job.start("n1", lease_ttl=LONG)
    n2 = job.start("n2", "--fault", "linger@node=n2", nproc=2, lease_ttl=LONG)
    g = job.trains(3)
    for agent in (n1, n2):
        nobody_else_holds_a_socket_of(agent)
    assert "sleep 600" in map(command, n2.others()), "a worker's child, in its process group"
    n2.kill()
    job.wait("all that it ran ends, its guardian last", lambda: not n2.others())
    job.said(n2, f"elastic_etcd: the agent (pid {n2.pid}) is gone: killed what it ran, lease ")
    g = job.trains(1, after=g)
    assert "n2 is lost" in n1.output

    n3 = job.start("n3", lease_ttl=LONG)
    g = job.trains(2, after=g)
    n3.terminate()
    job.exits(n3, 143)
    assert not n3.others()
    job.trains(1, after=g)
    os.killpg(n1.pid, signal.SIGINT)  # as Ctrl-C does
    job.exits(n1, 130)
    assert "guardian" not in n1.output + n3.output
    assert "the agent (pid " not in n1.output + n3.output


def nobody_else_holds_a_socket_of(agent: Agent) -> None:
    """Else its guardian would not see its end."""
    ours, others = sockets(agent.pid), {pid: sockets(pid) for pid in agent.others()}
    assert others[guardian(agent)], "its own end"
    assert len(others) >= 3, "guardian, fork server, workers"
    assert {command(pid): both for pid, open_ in others.items() if (both := open_ & ours)} == {}


def test_r18_the_guardian_ends_also_what_has_left_its_process_group(job: Job) -> None:
    n1 = job.start("n1", "--fault", "daemon", nnodes="1:1", lease_ttl=LONG)
    job.trains(1)
    assert "sleep 600" in map(command, n1.others())
    n1.kill()
    job.wait("all that it ran ends, its guardian last", lambda: not n1.others())
    n1 = job.start("n1", nnodes="1:1")
    job.trains(1, after=1)
    job.finish(n1)


def test_r18_an_agent_ends_what_was_left_of_the_one_before_it(job: Job) -> None:
    before = job.start("n1", "--fault", "daemon", nnodes="1:1")
    job.trains(1)
    (left,) = [pid for pid in before.others() if command(pid) == "sleep 600"]
    both = [before.pid, guardian(before)]
    send(signal.SIGSTOP, both)  # or the agent starts another guardian between the two signals
    send(signal.SIGKILL, both)
    job.wait("its worker is gone", lambda: before.others() == [left])
    n1 = job.start("n1", nnodes="1:1")
    job.said(n1, f"waiting for what a former agent of this node left: {left} (sleep)")
    job.trains(1, after=1)
    assert command(left) in ("gone", ""), "or its new parent has not heard of its end"
    job.finish(n1)


def test_r18_an_agent_waits_for_the_guardian_of_the_one_before_it(job: Job) -> None:
    """That one waits for what is dying: a process that is has no environment any more."""
    _, busy = killed_with_its_guardian_busy(job)
    n1 = job.start("n1", nnodes="1:1")
    job.said(n1, f"waiting for what a former agent of this node left: {busy} (")
    send(signal.SIGCONT, [busy])
    job.trains(1, after=1)
    job.finish(n1)


def test_r18_an_agent_gives_up_on_what_does_not_end(job: Job) -> None:
    before, busy = killed_with_its_guardian_busy(job)
    n1 = job.start("n1", nnodes="1:1", kill_timeout=1)
    job.exits(n1, 1)
    assert f"what a former agent of this node left is still there after 1 s: {busy} (" in n1.output
    send(signal.SIGCONT, [busy])
    job.wait("it ends", lambda: not before.others())
    n1 = job.start("n1", nnodes="1:1")
    job.trains(1, after=1)
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
    job.said(n2, f"the guardian (pid {first}) was killed by SIGKILL; another one is started now")
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
