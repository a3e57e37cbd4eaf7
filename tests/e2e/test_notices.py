"""A node whose machine is about to be taken away leaves, and its script saves, as on a signal."""

import signal
import time
from pathlib import Path

import pytest

from tests.support.job import Agent, Job
from tests.support.processes import send

pytestmark = pytest.mark.timeout(600)

# It needs no torch, so that many of it cost little.
SAVES = """
import os, pathlib, signal, sys, time
import elastic_etcd as ee

directory = pathlib.Path(sys.argv[1])
stop = False


def on_sigterm(*_):
    global stop
    stop = True
    if not ee.leaving():
        sys.exit()  # a new world
    print("leaving", flush=True)


signal.signal(signal.SIGTERM, on_sigterm)
print("trains in a world of", os.environ["WORLD_SIZE"], flush=True)
while not stop:
    time.sleep(0.05)
    ee.heartbeat()
while not (directory / "save").exists():  # it is large
    time.sleep(0.05)
print("saved", flush=True)
"""


def pair(job: Job, folder: Path, **watched: object) -> tuple[Agent, Agent]:
    """Two nodes that train; only the first one is watched."""
    script = folder / "train.py"
    script.write_text(SAVES)
    given = {"script": (str(script), str(folder)), "start_method": "exec", "leave_deadline": 100}
    nodes = job.start("n1", **given, **watched), job.start("n2", **given)  # type: ignore[arg-type]
    for node in nodes:
        job.said(node, "trains in a world of 2", seconds=90)
    return nodes


def leaves(job: Job, n1: Agent, n2: Agent, folder: Path) -> None:
    """The first node saves in peace, and the other goes on alone."""
    job.said(n1, ": leaving\n", seconds=90)
    job.said(n1, "]: leaving\n", seconds=90)  # the script
    send(signal.SIGTERM, [n1.pid])  # the machine's own, which ends nothing at once
    job.said(n1, "SIGTERM: leaving; once more to leave at once", seconds=90)
    (folder / "save").touch()
    job.exits(n1, 143, seconds=90)
    assert "saved" in n1.output, job.account()
    job.said(n2, "trains in a world of 1", seconds=90)
    assert "n1 is leaving" in n2.output
    n2.terminate()
    job.exits(n2, 143, seconds=90)


def test_a_node_leaves_when_a_file_appears(job: Job, tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    n1, n2 = pair(job, tmp_path, preemption_watch=f"file:{notice}")
    notice.write_text("90")
    leaves(job, n1, n2, tmp_path)
    assert f"{notice} is there, in 90 s: leaving" in n1.output


def test_sigusr2_to_all_of_a_node_drains_it(job: Job, tmp_path: Path) -> None:
    n1, n2 = pair(job, tmp_path)
    for number in (signal.SIGUSR2, signal.SIGUSR2):  # a scheduler may reach every process of a job
        send(number, [*n1.others(), n1.pid])
    job.said(n1, "SIGUSR2: leaving", seconds=90)
    send(signal.SIGTERM, [n1.pid])  # Slurm, at the job's time limit
    time.sleep(0.1)
    leaves(job, n1, n2, tmp_path)  # which sends it again
    assert "leaving at once" not in n1.output


def test_the_time_until_the_machine_goes_counts(job: Job, tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    n1, n2 = pair(job, tmp_path, preemption_watch=f"file:{notice}")
    notice.write_text("4")
    job.exits(n1, 143, seconds=90)  # though nothing lets it save, and it has 100 s by its flags
    assert "saved" not in n1.output
    job.said(n2, "trains in a world of 1", seconds=90)
    n2.terminate()
    (tmp_path / "save").touch()
    job.exits(n2, 143, seconds=90)
