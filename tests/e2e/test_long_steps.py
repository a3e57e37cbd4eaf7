"""Workers in ee.run that take long: in a step while a node joins, and after their training."""

import signal
from pathlib import Path

import pytest

from tests.support.job import Agent, Job
from tests.support.processes import send

pytestmark = pytest.mark.timeout(600)

# The third step takes until a file is there; a rank says what it does.
LONG_STEP = """
import os, time
import torch
import elastic_etcd as ee

state = ee.ElasticState(step=0)
state.on_reset(lambda old, new: print("from", old.world_size, "to", new.world_size))


@ee.run
def train(state):
    while state.step < 200:
        torch.distributed.all_reduce(torch.ones(1))
        state.step += 1
        print("step", state.step, "of", os.getpid(), "in", torch.distributed.get_world_size())
        while state.step == 3 and not os.path.exists("go"):
            time.sleep(0.1)  # torch.compile, an evaluation, a large checkpoint
        state.commit(every=50)
        state.check()
        time.sleep(0.05)


train(state)
"""

EXPORTS = """
import os, signal, sys, time
import torch
import elastic_etcd as ee

state = ee.ElasticState(step=0)
seconds = float(sys.argv[1])


@ee.run
def train(state):
    while state.step < 20:
        torch.distributed.all_reduce(torch.ones(1))
        state.step += 1
        state.commit()
        state.check()
        time.sleep(0.02)


def on_sigterm(*_):
    print("told to stop", flush=True)
    time.sleep(5)  # what it has is saved
    print("saved", flush=True)
    sys.exit(1)


train(state)
signal.signal(signal.SIGTERM, on_sigterm)
rank, generation = os.environ["RANK"], os.environ["ELASTIC_ETCD_GENERATION"]
print("exports", flush=True)
if os.path.exists("fail") and rank == "1":
    os.remove("fail")
    sys.exit(3)
while not os.path.exists("go"):
    time.sleep(0.1)
time.sleep(seconds)
print("exported in generation", generation, flush=True)
"""


def start(job: Job, node: str, source: str, *arguments: str, **flags: object) -> Agent:
    script = job.directory / "train.py"
    script.write_text(source)
    given = ("-u", str(script), *arguments)
    return job.start(node, script=given[1:], env={"PYTHONUNBUFFERED": "1"}, **flags)  # type: ignore[arg-type]


@pytest.mark.nightly(part="jobs")
def test_t3_a_newcomer_waits_for_a_step_that_takes_longer_than_the_grace(job: Job) -> None:
    n1 = start(job, "n1", LONG_STEP, settle=0, shutdown_timeout=1)
    job.said(n1, "step 3 of", seconds=90)
    n2 = start(job, "n2", LONG_STEP, shutdown_timeout=1)
    late = "n2 joins: rank 0: no state.check() for 10 s; they are waited for"
    job.said(n1, late, seconds=90)
    (job.directory / "go").touch()
    job.said(n2, "in 2", seconds=90)
    job.exits(n1, 0, seconds=90)
    job.exits(n2, 0, seconds=90)
    assert "SIGKILL" not in n1.output
    steps = [line.split("step ")[1].split() for line in n1.output.splitlines() if "step " in line]
    own = [words for words in steps if len(words) == 5]
    assert [int(words[0]) for words in own] == list(range(1, 201)), "nothing is trained again"
    assert len({words[2] for words in own}) == 1, "its process was killed"
    assert "(n2 joins): rank 0 of 2 goes on from commit" in n1.output
    assert "from 1 to 2" in n1.output
    assert "from 1 to 2" in n2.output


@pytest.mark.nightly(part="jobs")
def test_t4_a_newcomer_does_not_end_what_comes_after_the_training(job: Job) -> None:
    n1 = start(job, "n1", EXPORTS, "4", settle=0, shutdown_timeout=1)
    job.said(n1, "exports", seconds=90)
    n2 = start(job, "n2", EXPORTS, "4", shutdown_timeout=1)
    job.said(n2, "waiting to be taken in", seconds=60)
    (job.directory / "go").touch()
    job.exits(n1, 0, seconds=60)
    job.exits(n2, 0, seconds=60)
    assert "exported in generation 1" in n1.output
    assert "exports" not in n2.output


@pytest.mark.nightly(part="jobs")
def test_t4_after_the_training_a_worker_is_told_by_sigterm_and_has_time(job: Job) -> None:
    (job.directory / "fail").touch()
    n1, n2 = (start(job, name, EXPORTS, "0") for name in ("n1", "n2"))
    for node in (n1, n2):
        job.said(node, "exports", seconds=90)
    job.wait("one is told", lambda: "told to stop" in n1.output + n2.output)
    exporting = n1 if "told to stop" in n1.output else n2
    job.said(exporting, "saved", seconds=30)
    (job.directory / "go").touch()
    job.exits(n1, 0, seconds=90)
    job.exits(n2, 0, seconds=90)
    assert "exported in generation 2" in n1.output


def test_t4_a_worker_that_leaves_after_its_training_has_sigterm(job: Job, tmp_path: Path) -> None:
    n1 = start(job, "n1", EXPORTS, "0", settle=0)
    job.said(n1, "exports", seconds=90)
    n1.terminate()
    job.exits(n1, 128 + signal.SIGTERM, seconds=60)
    assert "saved" in n1.output


def test_t3_a_worker_that_dies_in_a_long_step_keeps_nobody_waiting(job: Job) -> None:
    flags = {"nnodes": "2:3", "settle": 1, "park_timeout": 3}
    n1, n2 = (start(job, name, LONG_STEP, **flags) for name in ("n1", "n2"))
    for node in (n1, n2):
        job.said(node, "step 3 of", seconds=90)
    n3 = start(job, "n3", LONG_STEP, **flags)
    job.said(n1, "n3 joins", seconds=60)
    pid = next(int(line.split()[-3]) for line in n2.output.splitlines() if "step 3 of" in line)
    send(signal.SIGKILL, [pid])
    job.said(n1, "generation 3 (rank 1 on n2 was killed by SIGKILL)", seconds=60)
    (job.directory / "go").touch()
    job.said(n3, "in 3", seconds=60)
    for node in (n1, n2, n3):
        job.exits(node, 0, seconds=90)


PHASES = """
import os, time
import torch
import elastic_etcd as ee

one, two = ee.ElasticState(step=0), ee.ElasticState(step=0)


def steps(state, name, most):
    while state.step < most:
        torch.distributed.all_reduce(torch.ones(1))
        state.step += 1
        print(name, state.step, "of", os.getpid(), flush=True)
        state.commit()
        state.check()
        time.sleep(0.05)


@ee.run
def pretrain(state):
    steps(state, "pretrain", 10)


@ee.run
def finetune(state):
    steps(state, "finetune", 100)


pretrain(one)
finetune(two)
"""


@pytest.mark.nightly(part="jobs")
def test_t12_a_new_worker_does_not_begin_beside_others_in_their_second_call(job: Job) -> None:
    n1, n2 = (start(job, name, PHASES, suspect_after=0) for name in ("n1", "n2"))
    for node in (n1, n2):
        job.said(node, "finetune 5 of", seconds=90)
    pid = next(int(line.split()[-1]) for line in n2.output.splitlines() if "finetune 5 of" in line)
    send(signal.SIGKILL, [pid])
    for node in (n1, n2):
        job.exits(node, 0, seconds=90)
    assert "is in call 1 of ee.run (pretrain), others are in calls 1 to 2" in n2.output
    assert "is in call 2 of ee.run (finetune)" in n1.output
    for node in (n1, n2):
        begun = [line.split()[1] for line in node.output.splitlines() if "pretrain 1 of" in line]
        assert len(begun) == 1, "what was done is done again"
        assert "finetune 100 of" in node.output
