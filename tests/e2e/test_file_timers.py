"""torch's file timers, in scripts as users write them: who is not done by then is ended."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.job import Job

pytestmark = pytest.mark.timeout(600)
NIGHTLY = pytest.mark.nightly(part="jobs")  # the same once more, for other scripts and starts

# What rank 1 loads takes too long, once.
TIMED = """
import os, time
import torch
import torch.distributed as dist
import torch.distributed.elastic.timer as timer
from torch.nn.parallel import DistributedDataParallel

def load(step):
    if step == 3 and dist.get_rank() == 1 and not os.path.exists("slept"):
        open("slept", "w").close()
        time.sleep(1000)
    return torch.ones(4, 2)
"""
PLAIN = (
    TIMED
    + """
def main():
    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        with timer.expires(after=6.0, scope="load"):
            batch = load(step)
        with timer.expires(after=300):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
    dist.destroy_process_group()

main()
"""
)
ELASTIC = (
    TIMED
    + """
import elastic_etcd as ee

timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
state = ee.ElasticState(model=torch.nn.Linear(2, 2), step=0)

@ee.run
def train(state):
    model = ee.ddp(state.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while state.step < 6:
        with timer.expires(after=6.0, scope="load"):
            batch = load(state.step)
        with timer.expires(after=300):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
        state.step += 1
        state.commit()

train(state)
"""
)
LOADING = r"rank 1 on n[12]: timer 'load' expired"


def environment(job: Job) -> dict[str, str]:
    """In which all that agents make for themselves goes into a folder of this job."""
    folder = job.directory / "tmp"
    folder.mkdir(exist_ok=True)
    return {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TMPDIR": str(folder)}


def script(job: Job, text: str) -> tuple[str]:
    path = job.directory / "train.py"
    path.write_text(text)
    return (str(path),)


@pytest.mark.parametrize(
    ("text", "method"),
    [
        pytest.param(PLAIN, "prefork", id="plain"),
        pytest.param(PLAIN, "exec", id="exec", marks=NIGHTLY),
        pytest.param(ELASTIC, "prefork", id="ee.run", marks=NIGHTLY),
    ],
)
def test_who_is_not_done_in_time_is_ended_and_begun_anew(job: Job, text: str, method: str) -> None:
    command, env = script(job, text), environment(job)
    n1 = job.start("n1", nnodes="1", nproc=2, script=command, env=env, start_method=method)
    job.exits(n1, 0, 240)
    (line,) = set(re.findall(LOADING, n1.output))
    assert f"generation 2 ({line}): " in n1.output
    at = [sys.executable, "-m", "elastic_etcd", "status", job.name, f"--etcd={job.endpoint}"]
    assert f": {line} (trained" in subprocess.check_output(at, text=True)
    assert not list(Path(env["TMPDIR"]).glob("elastic_etcd*"))


def test_a_job_that_ends_by_a_timer_says_so_and_its_pipe_is_gone(job: Job) -> None:
    pipe = job.directory / "timers"
    env = environment(job) | {"TORCHELASTIC_TIMER_FILE": str(pipe)}
    text = PLAIN.replace("get_rank() == 1", "get_rank() == 0")
    n1 = job.start("n1", nnodes="1", script=script(job, text), env=env, max_restarts=0)
    job.exits(n1, 1, 120)
    line = LOADING.replace("rank 1", "rank 0")
    assert re.search(f"error: {line}; no restart is allowed\n", n1.output), n1.output
    assert re.search(rf"root cause: rank 0 on n1 \(local rank 0, pid \d+\): {line}", n1.output), (
        n1.output
    )
    assert not pipe.exists()
