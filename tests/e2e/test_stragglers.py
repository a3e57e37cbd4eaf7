"""A node that is slower than the others is named on all nodes, and nobody where they are equal."""

import json
import re
import subprocess
import sys
import textwrap

import pytest

from tests.support.etcd import EtcdServer
from tests.support.job import Agent, Job

pytestmark = pytest.mark.timeout(600)

# A step takes a node as long as its variables say; `mended` is a file that makes it fast again.
MODEL = """
import os, threading, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, batch):
        time.sleep(0.03 if os.path.exists("mended") else float(os.environ["FORWARD"]))
        return self.layer(batch)
"""
PLAIN = (
    MODEL
    + """
def over_a_slow_link(group, bucket):
    arrived = torch.futures.Future()

    def send(tensor):
        dist.all_reduce(tensor)
        time.sleep(float(os.environ["LINK"]))
        arrived.set_result(tensor)

    threading.Thread(target=send, args=[bucket.buffer() / dist.get_world_size()]).start()
    return arrived

dist.init_process_group("gloo")
model = DistributedDataParallel(Model())
if "LINK" in os.environ:
    model.register_comm_hook(None, over_a_slow_link)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(os.environ["STEPS"])):
    optimizer.zero_grad()
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    if step % 20 == 0:
        open(f"step{step}", "w").close()
dist.barrier()
os._exit(0)
"""
)
ELASTIC = (
    MODEL
    + """
import elastic_etcd as ee

data = torch.ones(100_000, 2)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = ee.ElasticState(model=model, optimizer=optimizer, sampler=ee.ElasticSampler(data))

@ee.run
def train(state):
    model = DistributedDataParallel(state.model)
    loader = DataLoader(data, batch_size=2, sampler=state.sampler)
    for batch in state.steps(loader, commit_every=5):
        state.optimizer.zero_grad()
        model(batch).sum().backward()
        state.optimizer.step()

train(state)
"""
)
SLOW = (
    r"n2 is slow: [\d.]+ m?s a step outside of collectives, [\d.]+ x the median of 2 nodes "
    r"\([\d.]+ m?s\), over the last 50 steps or more"
)
OVER = "n2 is as fast as the others again"


def start(job: Job, text: str, *each: dict[str, str], **flags: object) -> list[Agent]:
    """A node for each of these variables."""
    script = job.directory / "train.py"
    script.write_text(textwrap.dedent(text))
    usual = {"nnodes": str(len(each)), "lease_ttl": 20, "max_restarts": 0}
    return [
        job.start(f"n{number}", script=(str(script),), env=env, **usual | flags)  # type: ignore[arg-type]
        for number, env in enumerate(each, 1)
    ]


def status(job: Job, *flags: str) -> str:
    command = ["-m", "elastic_etcd", "status", job.name, f"--etcd={job.endpoint}", *flags]
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=True
    ).stdout


def step_times(job: Job, etcd: EtcdServer) -> str:
    return etcd.ctl("get", "--prefix", f"/elastic_etcd/{job.name}/step_times/", "--keys-only")


@pytest.mark.nightly(part="jobs")  # tests/etcd/test_keys_document.py has one that is slow, too
@pytest.mark.parametrize("text", [PLAIN, ELASTIC], ids=["plain", "ee.run"])
def test_a_slow_node_is_named_on_all_nodes_and_in_the_history(job: Job, text: str) -> None:
    fast, slow = {"FORWARD": "0.03"}, {"FORWARD": "0.12"}
    nodes = start(job, text, *({"STEPS": "100000"} | each for each in (fast, slow)))
    for agent in nodes:
        job.said(agent, "warning: n2 is slow: ", 120)
    line = re.search(rf"warning: ({SLOW})\n", nodes[0].output)
    assert line, nodes[0].output
    assert f"warning: {line[1]}\n" in nodes[1].output
    assert f" {line[1]}\n" in status(job)
    (job.directory / "mended").touch()
    for agent in nodes:
        job.said(agent, f"]: {OVER}\n", 120)
    (world,) = json.loads(status(job, "--json"))["history"]
    assert world["stragglers"] == [line[1], OVER]
    for agent in nodes:
        agent.terminate()
    for agent in nodes:
        job.exits(agent, 143)
        assert agent.output.count("is slow") == 1


@pytest.mark.nightly(part="jobs")
def test_nobody_is_named_where_all_are_equal_and_the_network_is_slow(
    job: Job, etcd: EtcdServer
) -> None:
    equal = {"FORWARD": "0.03", "STEPS": "300", "LINK": "0.001"}
    nodes = start(job, PLAIN, equal, equal | {"LINK": "0.05"})
    job.wait("both have told", lambda: step_times(job, etcd).count("step_times") == 2, 120)
    for agent in nodes:
        job.exits(agent, 0, 120)
        assert "is slow" not in agent.output


@pytest.mark.nightly(part="jobs")
def test_nothing_is_measured_or_told_where_it_is_off(job: Job, etcd: EtcdServer) -> None:
    each = {"FORWARD": "0.001", "STEPS": "200"}
    nodes = start(job, PLAIN, each, each | {"FORWARD": "0.05"}, straggler_factor="off")
    job.wait("it ends", lambda: not all(agent.running() for agent in nodes), 120)
    assert not step_times(job, etcd).strip()
    for agent in nodes:
        job.exits(agent, 0, 120)
        assert "is slow" not in agent.output
