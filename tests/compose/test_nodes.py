"""Nodes of a real network that are killed, frozen, cut off and stopped, by docker."""

import os
import time
from collections.abc import Callable

import pytest

from tests.support.invariants import each_sample_once
from tests.support.job import DDP, ELASTIC

from .job import ComposeJob

pytestmark = [pytest.mark.timeout(600), pytest.mark.nightly(part="compose")]

Jobs = Callable[..., ComposeJob]
LONG = 600  # seconds of a lease that does not end in a test


def node_of_rank(job: ComposeJob, generation: int, rank: int) -> str:
    return job.worker(generation, rank).node


def test_a_node_is_killed_and_comes_back(jobs: Jobs) -> None:
    job = jobs()
    g = job.begin()
    victim = job.nodes[node_of_rank(job, g, rank=0)]
    victim.kill()
    g = job.trains(2, after=g, seconds=60)
    victim.start()
    g = job.trains(3, after=g, seconds=90)
    assert job.worker(g, rank=0).restarts == 0, "nodes that come and go cost no restart"


@pytest.mark.timeout(4 * LONG)
@pytest.mark.parametrize("trainer", [DDP, ELASTIC], ids=["plain", "in process"])
def test_a_killed_node_is_missed_long_before_its_lease_ends(
    jobs: Jobs, capsys: pytest.CaptureFixture[str], trainer: str
) -> None:
    """Prints how long after `docker kill` the survivors' first step was."""
    job = jobs(trainer, ttl=LONG, step_time=0.02)
    g = job.begin()
    took = []
    for rank in (2, 0):
        victim = job.nodes[node_of_rank(job, g, rank)]
        job.goes_on(g, steps=50)
        began = time.time()
        victim.kill()
        g = job.trains(2, after=g, seconds=LONG / 2)
        took.append(job.first_step(g) - began)
        victim.start()
        g = job.trains(3, after=g, seconds=240)
    seconds = ", ".join(f"{t:.3f}" for t in took)
    with capsys.disabled():
        print(f"\ndocker kill -> first step: {seconds} s; load {os.getloadavg()[0]:.1f}")


def test_a_node_is_paused_past_its_ttl(jobs: Jobs) -> None:
    """Recovering in process: a plain script's frozen rank 0 may save an old state as it wakes."""
    job = jobs(ELASTIC)
    g = job.begin()
    before = job.begun(g)
    victim = node_of_rank(job, g, rank=0)
    job.nodes[victim].pause()
    g = job.trains(2, after=g, seconds=60)
    job.goes_on(g, steps=20)
    job.nodes[victim].unpause()
    g = job.trains(3, after=g, seconds=90)
    after = job.begun(g)
    for name in set(job.nodes) - {victim}:
        assert after[name].pid == before[name].pid, f"the worker of {name} was started anew"
    job.end()
    each_sample_once(job.directory)


def test_a_node_is_cut_off_and_connected_again(jobs: Jobs) -> None:
    job = jobs()
    g = job.begin()
    victim = job.nodes[node_of_rank(job, g, rank=0)]
    victim.disconnect()
    g = job.trains(2, after=g, seconds=60)
    victim.connect()
    g = job.trains(3, after=g, seconds=120)
    assert job.worker(g, rank=0).restarts == 0
    masters = {e.master.rpartition(":")[0] for e in job.events("start") if e.generation == g}
    assert masters == {job.nodes[node_of_rank(job, g, rank=0)].address()}


def test_a_node_is_stopped(jobs: Jobs) -> None:
    job = jobs()
    g = job.begin()
    victim = job.nodes[node_of_rank(job, g, rank=1)]
    victim.stop()
    assert victim.state()["ExitCode"] == 143, victim.output()
    g = job.trains(2, after=g, seconds=30)
    victim.start()
    g = job.trains(3, after=g, seconds=90)
    assert job.worker(g, rank=0).restarts == 0
