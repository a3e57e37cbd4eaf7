"""Restarts that come no further end the job, which names the batch; others do not end it."""

import json
import subprocess
import sys

import pytest

from tests.support.job import Job

pytestmark = pytest.mark.timeout(600)

# In epoch 1 the sample 57 can't be read. The order is that of the data set.
POISONED = """
import torch
from torch.utils.data import DataLoader
import elastic_etcd as ee

class Samples:
    def __len__(self):
        return 96

    def __getitem__(self, index):
        if index == 57 and state.sampler.epoch == 1:
            raise ValueError(f"sample {index} is torn")
        return torch.full((2,), float(index))

data = Samples()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
sampler = ee.ElasticSampler(data, shuffle=False)
state = ee.ElasticState(model=model, optimizer=optimizer, sampler=sampler)

@ee.run
def train(state):
    ddp = torch.nn.parallel.DistributedDataParallel(state.model)
    for epoch in range(state.sampler.epoch, 3):
        state.sampler.set_epoch(epoch)
        for batch in state.steps(DataLoader(data, 4, sampler=state.sampler), commit_every=3):
            state.optimizer.zero_grad()
            ddp(batch).sum().backward()
            state.optimizer.step()

train(state)
"""
# It fails once in each of four batches, by the same error.
GOES_ON = """
import os
import torch
from torch.utils.data import DataLoader
import elastic_etcd as ee

data = torch.ones(64, 2)
state = ee.ElasticState(sampler=ee.ElasticSampler(data))

@ee.run
def train(state):
    for batch in state.steps(DataLoader(data, 4, sampler=state.sampler), commit_every=1):
        number = state.sampler.consumed // 4  # the batch in hand counts
        if number in (3, 6, 7, 11):
            mark = f"failed.{number}"
            if not os.path.exists(mark):
                open(mark, "w").close()
                raise ValueError("by chance")

train(state)
"""


def test_a_poisoned_batch_ends_the_job_and_is_named(job: Job) -> None:
    script = job.directory / "train.py"
    script.write_text(POISONED)
    n1 = job.start("n1", nnodes="1", nproc=2, max_restarts=9, min_uptime=0, script=(str(script),))
    job.exits(n1, 9, seconds=240)
    status = [sys.executable, "-m", "elastic_etcd", "status", job.name, f"--etcd={job.endpoint}"]
    told = subprocess.run([*status, "--json"], capture_output=True, text=True, check=True).stdout
    outcome = json.loads(told)["outcome"]
    node = outcome["failure"]["node"]
    expected = (
        f"rank 1 on {node} exited 1; 3 restarts in a row have come no further "
        "(--stop-after-no-progress); the last 3 failures were in batch 7 of epoch 1 "
        f"(indices 57, 59, 61, 63), of rank 1 on {node}, by ValueError: sample 57 is torn"
    )
    assert (outcome["state"], outcome["reason"]) == ("failed", expected)
    assert f"error: {expected}\n" in n1.output
    assert "Mend the script or its data before it is started again." in n1.output


@pytest.mark.nightly(part="jobs")
def test_failures_that_each_come_further_do_not_end_the_job(job: Job) -> None:
    script = job.directory / "train.py"
    script.write_text(GOES_ON)
    flags = {"nnodes": "1:1", "max_restarts": 9, "min_uptime": 0, "script": (str(script),)}
    n1 = job.start("n1", stop_after_no_progress=1, **flags)  # type: ignore[arg-type]
    job.exits(n1, 0, seconds=240)
    assert len([*job.directory.glob("failed.*")]) == 4
    assert "no further" not in n1.output
