"""Worlds without a step for longer than --start-timeout."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.job import Agent, Job

pytestmark = pytest.mark.timeout(600)
NIGHTLY = pytest.mark.nightly(part="jobs")  # the same once more, started in another way

# Rank 1 stands once: before its process group, or in ee.run before its first step.
STANDS = """
import os, time

def stand():
    if os.environ["RANK"] == "1" and not os.path.exists("stood"):
        open("stood", "w").close()
        time.sleep(1000)
"""
PLAIN = """
import stands
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

stands.stand()
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
dist.barrier()
"""
ELASTIC = """
import torch
import elastic_etcd as ee
import stands

state = ee.ElasticState(model=torch.nn.Linear(2, 2), step=0)

@ee.run
def train(state):
    model = ee.ddp(state.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while state.step < 4:
        stands.stand()
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        state.step += 1
        state.check()

train(state)
"""


def script(job: Job, text: str) -> tuple[str]:
    for name, content in (("train", text), ("stands", STANDS)):
        (job.directory / f"{name}.py").write_text(content)
    return (str(job.directory / "train.py"),)


def status(job: Job) -> str:
    command = ["-m", "elastic_etcd", "status", job.name, f"--etcd={job.endpoint}"]
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=True
    ).stdout


def begins_anew(job: Job, agents: list[Agent], line: str) -> None:
    """All nodes say it, and the next world begins for it, as after a failure."""
    for agent in agents:
        job.exits(agent, 0, 240)
    found = re.search(line, status(job))
    assert found, status(job)
    for agent in agents:
        assert f"warning: {found[0]}\n" in agent.output
        assert f"generation 2 ({found[0]}): " in agent.output
        assert "restart 1 of 1" in agent.output


BEFORE = (
    r"rank 1 on n[12] has been before its process group for \d+ s, "
    r"1 other waits in its process group \(stands.py:\d+ in stand\)"
)
FIRST = (
    r"ranks (0 on n[12] and 1 on n[12]|1 on n[12] and 0 on n[12]) have been before their "
    r"first step for \d+ s \(.*\)"
)


@pytest.mark.parametrize(
    ("text", "method", "line"),
    [
        pytest.param(PLAIN, "prefork", BEFORE, id="before the process group"),
        pytest.param(PLAIN, "exec", BEFORE, id="before the process group, exec", marks=NIGHTLY),
        pytest.param(ELASTIC, "prefork", FIRST, id="ee.run", marks=NIGHTLY),
    ],
)
def test_a_start_that_takes_too_long_is_begun_anew(
    job: Job, text: str, method: str, line: str
) -> None:
    flags: dict[str, Any] = {"nnodes": "2", "lease_ttl": 20, "max_restarts": 1}
    flags |= {"start_timeout": 12 if method == "prefork" else 40, "start_method": method}
    flags["log_dir"] = str(job.directory)
    command = script(job, text)
    agents = [job.start(node, script=command, **flags) for node in ("n1", "n2")]
    begins_anew(job, agents, line)
    behind = next(agent for agent in agents if "group rank 1 " in agent.output)
    path = re.search(r"rank 1: where it stands is in (\S+/hang.txt)", behind.output)
    if "stands.py" in line:
        assert path
        assert " in stand\n" in Path(path[1]).read_text()
