"""What `elastic-etcd events`, `report` and their like show of a job that really trains."""

import json
import os
import subprocess
import sys
import time
from typing import Any

import pytest

from tests.support.job import ROOT, Agent, Job

pytestmark = pytest.mark.timeout(600)

# Rank 1 fails once, five steps after a commit; then all train until they are told to stop.
TRAINS = """
import os, pathlib, sys, time
import torch
import torch.distributed as dist
import elastic_etcd as ee

stop = pathlib.Path(sys.argv[1]) / "stop"
state = ee.ElasticState(step=0)

@ee.run
def train(state):
    generation, stopped = os.environ["ELASTIC_ETCD_GENERATION"], torch.zeros(1)
    while not stopped:
        if (generation, dist.get_rank(), state.step) == ("1", 1, 15):
            raise ValueError("a mistake of the user's")
        # Rank 0 learns of it in a long step, so that its agent has something to stop.
        time.sleep(3 if (generation, state.step) == ("1", 15) else 0.03)
        stopped += stop.exists()
        dist.all_reduce(stopped)
        state.step += 1
        state.commit(every=10)
        state.check()
        if (generation, dist.get_rank(), state.step) == ("2", 0, 25):
            print("generation 2 trains on", flush=True)

train(state)
"""


def look(job: Job, command: str, *arguments: str) -> str:
    """What a command prints of the job."""
    argv = [sys.executable, "-m", "elastic_etcd", command, job.name, *arguments]
    done = subprocess.run(
        [*argv, "--etcd", str(job.endpoint), "--timeout", "60"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done}\n{job.account()}"
    return done.stdout


def events(job: Job) -> list[dict[str, Any]]:
    return [json.loads(line) for line in look(job, "events", "--json").splitlines()]


def names(some: list[dict[str, Any]]) -> list[str]:
    return [event["name"].rpartition(".")[2] for event in some]


def test_a_job_is_looked_at_while_it_trains_and_afterwards(job: Job) -> None:
    began = time.time()
    script = job.directory / "train.py"
    script.write_text(TRAINS)
    command = (str(script), str(job.directory))
    n1 = job.start("n1", script=command)
    n2 = job.start("n2", script=command)

    def raised() -> list[str]:
        return [agent.node for agent in (n1, n2) if "a mistake of the user's" in agent.output]

    def trains_on() -> list[Agent]:
        return [agent for agent in (n1, n2) if "generation 2 trains on" in agent.output]

    job.wait("generation 2 trains on", trains_on, 180)
    (first,), (bad,) = trains_on(), raised()
    seen = events(job)
    assert names(seen)[-4:] == ["RENDEZVOUS", "FAILED", "STOPPED", "RENDEZVOUS"]
    failed = next(event for event in seen if event["name"].endswith("FAILED"))
    assert failed["source"] == "WORKER"
    assert (failed["metadata"]["hostname"], failed["metadata"]["global_rank"]) == (bad, 1)
    assert "a mistake of the user's" in failed["metadata"]["raw_error"]
    assert json.loads(failed["metadata"]["metadata"])["exit_code"] == [1]
    assert all(1e3 * began < event["timestamp"] < 1e3 * time.time() for event in seen)
    head = look(job, "status").splitlines()[:3]
    assert head[0].startswith(f"job {job.name}: training since 20")
    assert head[1:] == [
        f"  because rank 1 on {bad} exited 1",
        "  last words: ValueError: a mistake of the user's",
    ]
    assert head[2].removeprefix("  last words") in look(job, "events")
    report = json.loads(look(job, "report", "--json"))
    assert (report["state"], report["generation"], report["restarts"]) == ("training", 2, 1)
    assert report["going_on"] > 0
    job.finish(n1, n2, seconds=120)
    took = time.time() - began
    report = json.loads(look(job, "report", "--json"))
    assert (report["state"], report["restarts"], report["unknown"]) == ("succeeded", 1, 0.0)
    assert 0 < report["goodput"] < 1
    assert 0 < report["seconds"] <= took
    history = json.loads(look(job, "status", "--json"))["history"]
    assert history[0]["spent"]["steps"] == 15
    assert report["lost"]["again"] > 5 * 0.03
    for cause in ("stop", "rendezvous", "start", "first_step"):
        assert report["lost"][cause] > 0, cause
    assert report["pause"] > 0
    assert names(events(job))[-1] == "SUCCEEDED"
    assert f"goodput {report['goodput']}, seconds {report['seconds']}, " in first.output
    assert sum("goodput" in agent.output for agent in (n1, n2)) == 1
