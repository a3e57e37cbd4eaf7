"""Plain scripts with checkpoints in memory: what a killed worker or node costs, and the end."""

import re
import signal
from pathlib import Path

import pytest

from tests.support.disks import small_disk
from tests.support.job import Job
from tests.support.processes import send
from tests.support.savers import PATIENCE, begun, memory_dir, saved, start

pytestmark = pytest.mark.timeout(600)


def left(job: Job) -> list[str]:
    return [path.name for path in memory_dir(job).iterdir()]


def test_killed_workers_and_a_killed_node_cost_the_steps_since_the_last_checkpoint(
    job: Job,
) -> None:
    nproc = {"n1": 2, "n2": 1}
    agents = {node: start(job, node, nproc=size) for node, size in nproc.items()}
    g, step, pids = begun(job, 3)
    assert step == 0
    for victim in (0, 2):
        last = saved(job, g, more=2)
        send(signal.SIGKILL, [pids[victim]])
        g, step, pids = begun(job, 3, after=g)
        assert step >= last

    first = next(n for n, a in agents.items() if re.search(r"group rank 0 of 2", a.output))
    last = saved(job, g, more=2, rank=nproc[first])  # who stays: rank 0 may be a step ahead
    agents.pop(first).node_kill()
    g, step, _ = begun(job, 3 - nproc[first], after=g)
    assert step >= last
    last = saved(job, g, more=2)
    agents[first] = start(job, first, nproc=nproc[first])
    g, step, _ = begun(job, 3, after=g)
    assert step >= last
    told = "".join(agent.output for agent in agents.values())
    assert f"training goes on from step {step}" in told
    assert "1 of 2 nodes had that" in told
    saved(job, g)
    job.finish(*agents.values(), seconds=PATIENCE)
    assert left(job) == [], "also what the killed node had"


def test_all_nodes_are_lost_and_the_disk_has_one_in_n(job: Job) -> None:
    disk = str(job.directory / "disk")
    n1 = start(job, "n1", "--disk", disk, settle=1)  # there is no other node
    g, _, _ = begun(job, 1)
    last = saved(job, g, more=5)
    n1.node_kill()
    n1 = start(job, "n1", "--disk", disk, settle=1)
    _, step, _ = begun(job, 1, after=g)
    assert step >= last // 20 * 20 > 0
    assert step % 20 == 0
    job.finish(n1, seconds=PATIENCE)


def test_what_a_killed_agent_had_goes_with_its_guardian_or_with_the_next_agent(job: Job) -> None:
    n1 = start(job, "n1", nnodes="1:1")
    g, _, _ = begun(job, 1)
    saved(job, g)
    assert len(left(job)) == 1
    n1.kill()
    job.wait("all that it ran ends, its guardian last", lambda: not n1.others(), PATIENCE)
    assert left(job) == []

    n1 = start(job, "n1", nnodes="1:1")
    g, _, _ = begun(job, 1, after=g)
    saved(job, g)
    (before,) = left(job)
    n1.node_kill()
    assert left(job) == [before]
    n1 = start(job, "n1", nnodes="1:1")
    job.said(n1, f"removing what a dead agent left: {memory_dir(job) / before}")
    _, step, _ = begun(job, 1, after=g)
    assert step == 0, "it was another agent's"
    assert before not in left(job)
    job.finish(n1, seconds=PATIENCE)


@pytest.mark.nightly(part="jobs")
def test_an_agent_leaves_alone_what_a_live_one_has(job: Job) -> None:
    """By default below /dev/shm, which all agents of a machine have in common."""
    n1 = start(job, "n1", nnodes="1:1", memory_dir="/dev/shm")
    g, _, _ = begun(job, 1)
    (path,) = re.findall(r"memory: (.*)", n1.output)
    memory = Path(path)
    assert memory.parent == Path("/dev/shm")
    assert memory.stat().st_mode & 0o777 == 0o700
    n2 = start(job, "n2", nnodes="1:1", memory_dir="/dev/shm")
    job.said(n2, "spare", seconds=PATIENCE)
    saved(job, g, more=2)
    assert any(memory.glob("step-*"))
    job.finish(n1, n2, seconds=PATIENCE)
    assert not memory.exists()


def test_a_memory_that_is_too_small_is_told_at_the_first_checkpoint(job: Job) -> None:
    memory_dir(job).mkdir()
    with small_disk(memory_dir(job)):
        n1 = start(job, "n1", "--size", "100000", nnodes="1:1", max_restarts=0)
        job.exits(n1, 1, seconds=PATIENCE)
    assert re.search(r"is too small: this checkpoint takes 0.\d+ MiB or more, 0.00 MiB", n1.output)
    assert "--shm-size" in n1.output


def test_no_directory_can_be_made(job: Job) -> None:
    """It matters only to who wants one: the default may be missing, one that is given may not."""
    n1 = start(job, "n1", nnodes="1:1", memory_dir="/proc/nothing")
    job.exits(n1, 2, seconds=PATIENCE)
    assert "--memory-dir /proc/nothing: cannot be written to" in n1.output
