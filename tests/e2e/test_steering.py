"""`elastic-etcd drain`, `undrain`, `scale`, `stop` on jobs that train, as at a shell."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_etcd.core.schema import PREFIX
from tests.support.etcd import EtcdServer
from tests.support.invariants import each_sample_once
from tests.support.job import ELASTIC, ROOT, Agent, Job
from tests.support.residue import keys
from tests.support.ticking import TickingJob

pytestmark = pytest.mark.timeout(600)

# What it has time for between SIGTERM and its end is up to who has asked for that.
SAVES = """
import os, pathlib, signal, sys, time
import elastic_etcd as ee

saved = pathlib.Path(sys.argv[1]) / "saved"


def on_sigterm(*_):
    if not ee.leaving():
        sys.exit()
    print("saving", flush=True)
    while not (pathlib.Path(sys.argv[1]) / "may save").exists():
        time.sleep(0.1)
    saved.touch()
    sys.exit()


signal.signal(signal.SIGTERM, on_sigterm)
print("training", flush=True)
while True:
    time.sleep(0.1)
"""


def steer(job: Job, command: str, *arguments: str, code: int = 0, node: str = "") -> Any:
    """What `elastic-etcd COMMAND JOB ... --json` prints, or, where it fails, what it says."""
    argv = [sys.executable, "-m", "elastic_etcd", command, job.name, *arguments]
    done = subprocess.run(
        [*argv, "--etcd", str(job.endpoint), "--timeout", "60", "--json"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PET_NODE_NAME": node},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, f"{done}\n{job.account()}"
    return json.loads(done.stdout) if done.stdout else done.stderr


def top(job: Job) -> str:
    """The job as somebody sees it who looks at it for the first time."""
    argv = [sys.executable, "-m", "elastic_etcd", "top", job.name, "--timeout=60"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [*argv, f"--etcd={job.endpoint}"]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


def script(job: Job) -> dict[str, Any]:
    """What its agents run: a trainer that recovers in process, or workers that tick."""
    ticks = isinstance(job, TickingJob)
    return {} if ticks else {"script": (ELASTIC, "--dir", str(job.directory))}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(TickingJob, id="plain"),
        pytest.param(Job, id="ee.run", marks=pytest.mark.nightly(part="jobs")),
    ],
)
def test_s13_a_drained_node_stays_out_until_it_is_undrained(
    jobs: Callable[..., Job], etcd: EtcdServer, kind: type[Job]
) -> None:
    job = jobs(kind=kind)
    given, elastic = script(job), kind is Job
    n1, n2 = (job.start(node, **given) for node in ("n1", "n2"))
    g = job.trains(2, seconds=90)
    survivor = job.begun(g)["n1"].pid
    if elastic:
        is_shown(job, etcd)
    assert steer(job, "drain", "n2", "--wait")["left"]
    job.exits(n2, 143, seconds=60)
    g = job.trains(1, after=g, seconds=90)
    again = job.start("n2", **given)
    job.said(again, "this node is drained: it waits", seconds=90)
    job.goes_on(g, seconds=60)
    assert max(e.generation for e in job.events("step")) == g, "it has disturbed nobody"
    (drained,) = steer(job, "status")["wanted"]["drains"]
    assert drained["node"] == "n2"
    assert steer(job, "undrain", "n2")["changed"]
    g = job.trains(2, after=g, seconds=90)
    assert (job.begun(g)["n1"].pid == survivor) == elastic
    if elastic:
        steps = [e.step for e in job.events("step") if e.node == "n1"]
        assert steps == list(range(1, len(steps) + 1)), "a step was trained twice"
    spare = job.start("n3", **given)
    job.said(spare, "spare: 2 nodes train", seconds=90)
    assert steer(job, "scale", "2:3")["nodes"] == 3
    g = job.trains(3, after=g, seconds=90)
    assert steer(job, "scale", "1,2", "--wait")["changed"]
    g = job.trains(2, after=g, seconds=90)
    assert spare.output.count("spare: 2 nodes train") == 2
    assert (job.begun(g)["n1"].pid == survivor) == elastic
    assert steer(job, "status")["limits"]["sizes"] == [1, 2]
    assert steer(job, "stop", "--wait")["state"] == "stopped"
    for agent in (n1, again, spare):
        job.exits(agent, 143, seconds=60)
    outcome = keys(etcd, job.name)["outcome"]
    assert (outcome["state"], outcome["reason"].split()[:2]) == ("stopped", ["stopped", "by"])
    if elastic:
        each_sample_once(job.directory)
        last = {max(e.step for e in job.events("step") if e.node == n) for n in ("n1", "n2")}
        assert len(last) == 1, "all ranks have stopped at the same step"
    assert "is over: stopped" in steer(job, "drain", "n1", code=1)
    assert steer(job, "wait", code=3)["state"] == "stopped"


def is_shown(job: Job, etcd: EtcdServer) -> None:
    """Who looks sees each node's pace, which nobody writes any more when nobody looks."""
    shown = top(job)
    for node in ("n1", "n2"):
        assert re.search(rf"{node} +training +\d+ +[1-9]\d* +\d+\.\d+ +\w+", shown), shown
    paces = ("get", "--prefix", "--keys-only", f"{PREFIX}/{job.name}/paces/")
    job.wait("nobody looks", lambda: not etcd.ctl(*paces).split())


def saver(job: Job, node: str, directory: Path, **flags: Any) -> Agent:
    script = directory / "train.py"
    script.write_text(SAVES)
    given: dict[str, Any] = {"script": (str(script), str(directory)), "start_method": "exec"}
    # A lease that ends on a busy machine, while a worker saves, would leave no outcome.
    return job.start(node, settle=0, lease_ttl=20, **given, **flags)


def test_s13_what_a_drained_node_and_a_stopped_job_save_is_waited_for(
    job: Job, tmp_path: Path, etcd: EtcdServer
) -> None:
    """Also where somebody sends SIGTERM meanwhile, as Kubernetes does after a preStop hook."""
    n1 = saver(job, "n1", tmp_path, leave_deadline=1, stop_exit_code=6)
    job.said(n1, "training", seconds=90)
    assert steer(job, "drain", "--self", "--deadline", "120", node="n1")["deadline"] == 120
    job.said(n1, "saving", seconds=60)
    n1.terminate()
    job.said(n1, "SIGTERM: leaving", seconds=60)
    assert n1.running()
    (tmp_path / "may save").touch()
    job.exits(n1, 143, seconds=60)
    assert (tmp_path / "saved").exists(), n1.output
    assert "outcome" in keys(etcd, job.name), f"it was the last one\n{n1.output}"
    assert keys(etcd, job.name)["outcome"]["state"] == "stopped"
    again = saver(job, "n1", tmp_path, leave_deadline=120)  # only that agent was drained
    job.said(again, "training", seconds=90)
    (tmp_path / "saved").unlink()
    assert steer(job, "stop", "--save", "--wait")["state"] == "stopped"
    job.exits(again, 143, seconds=60)
    assert (tmp_path / "saved").exists(), again.output
    (tmp_path / "saved").unlink()
    third = saver(job, "n1", tmp_path, stop_exit_code=6)  # the order to stop was for that run
    job.said(third, "training", seconds=90)
    assert steer(job, "stop", "--wait")["state"] == "stopped"
    job.exits(third, 6, seconds=60)
    assert not (tmp_path / "saved").exists(), "without --save nothing is saved for all"


def test_s13_a_node_that_waits_to_be_undrained_ends_with_its_job(
    jobs: Callable[..., TickingJob],
) -> None:
    job = jobs(kind=TickingJob)
    n1, n2 = job.start("n1"), job.start("n2")
    g = job.trains(2, seconds=90)
    steer(job, "drain", "n2")
    job.exits(n2, 143, seconds=60)
    job.trains(1, after=g, seconds=90)
    waits = [job.start("n2") for _ in range(2)]
    for agent in waits:
        job.said(agent, "this node is drained: it waits", seconds=90)
    waits[0].terminate()
    job.exits(waits[0], 143, seconds=60)
    assert f"`elastic-etcd undrain {job.name} n2` lets it come back" in waits[0].output
    assert "no node n3; there are n1" in steer(job, "drain", "n3", code=1)
    job.finish(n1, waits[1], seconds=60)
