"""A bit flips in a worker: its rank is named, and its values go where that is asked for."""

import json
import re
import subprocess
import sys

import pytest

from tests.support.job import Job

pytestmark = pytest.mark.timeout(600)

# The worker on n2 finds a file, and has another bit in a weight.
SCRIPT = """
import os
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
import elastic_etcd as ee

data = torch.randn(100_000, 8)
model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters())
state = ee.ElasticState(model=model, optimizer=optimizer, sampler=ee.ElasticSampler(data))
ee.seed_all(state, seed=1)

@ee.run
def train(state):
    ddp = DistributedDataParallel(state.model)
    for batch in state.steps(DataLoader(data, 2, sampler=state.sampler), commit_every=5):
        state.optimizer.zero_grad()
        ddp(batch).sum().backward()
        state.optimizer.step()
        if os.environ["ELASTIC_ETCD_NODE"] == "n2" and os.path.exists("flip"):
            os.remove("flip")
            state.model[0].weight.data.view(torch.int32)[3, 4] ^= 1
        if state.sampler.rank == 0 and not os.path.exists(f"began{os.environ['WORLD_SIZE']}"):
            open(f"began{os.environ['WORLD_SIZE']}", "w").close()

train(state)
"""
LINE = r"replicas differ: rank 2 on n2: model\.0\.weight( and \d+ more)?; the other 2 ranks agree"


def command(job: Job, *words: str) -> str:
    argv = [sys.executable, "-m", "elastic_etcd", *words, f"--etcd={job.endpoint}"]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    "action", [pytest.param("restart", marks=pytest.mark.nightly(part="jobs")), "drain"]
)
def test_t6_the_worker_in_which_a_bit_flips_is_named(job: Job, action: str) -> None:
    script = job.directory / "train.py"
    script.write_text(SCRIPT)
    flags = {"nnodes": "1:2", "lease_ttl": 20, "compare_every": "1", "on_divergence": action}
    n1, n2 = (
        job.start(f"n{n}", script=(str(script),), nproc=3 - n, **flags)  # type: ignore[arg-type]
        for n in (1, 2)
    )
    job.wait("it trains", (job.directory / "began3").exists)
    (job.directory / "flip").touch()
    job.said(n1, "replicas differ: ", 120)
    line = re.search(LINE, n1.output)
    assert line, n1.output
    job.said(n2, f"warning: {line[0]}\n", 120)
    if action == "drain":
        job.exits(n2, 143)
        job.wait("it trains on", (job.directory / "began2").exists)
        assert "n2 is drained by --on-divergence drain" in n1.output + n2.output
    else:
        job.said(n1, f"generation 2 ({line[0]}", 120)
        job.said(n1, "goes on from commit", 120)
    events = [json.loads(text) for text in command(job, "events", job.name, "--json").splitlines()]
    found = [each for each in events if each["name"] == "elastic_etcd.divergence"]
    assert [json.loads(each["metadata"]["metadata"])["reason"] for each in found] == [line[0]]
    assert f" {line[0]}\n" in command(job, "status", job.name)
    for agent in (n1, n2):
        agent.terminate()
    for agent in (n1, n2):
        job.exits(agent, 143)
