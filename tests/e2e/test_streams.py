"""A job whose samples are streamed: each once in an epoch, over a failure, a leave and a join."""

import signal
from collections import defaultdict
from typing import Any

import pytest

from tests.support.invariants import samples
from tests.support.job import TRAINERS, Agent, Job
from tests.support.processes import send

pytestmark = pytest.mark.timeout(600)

STREAM = str(TRAINERS / "stream.py")


def start(job: Job, node: str, **flags: Any) -> Agent:
    return job.start(node, script=(STREAM, "--dir", str(job.directory)), **flags)


def test_streamed_samples_come_once_over_a_failure_a_leave_and_a_join(job: Job) -> None:
    n1, n2 = start(job, "n1"), start(job, "n2")
    g = job.trains(2, seconds=60)
    send(signal.SIGKILL, [job.begun(g)["n2"].pid])
    g = job.trains(2, after=g, seconds=60)
    n2.terminate()
    job.exits(n2, 143, 60)
    g = job.trains(1, after=g, seconds=60)
    n3 = start(job, "n3")
    g = job.trains(2, after=g, steps=70, seconds=90)  # more than an epoch has
    job.finish(n1, n3)
    used: dict[int, list[int]] = defaultdict(list)
    for lines in samples(job.directory).values():
        for line in lines:
            used[line["epoch"]] += line["indices"]
    assert len(used) >= 2
    for epoch, indices in used.items():
        assert len(set(indices)) == len(indices), f"epoch {epoch} repeats samples"
        if epoch != max(used):  # what the world did not divide is dropped
            assert len(indices) >= 238, f"epoch {epoch} lacks samples"
