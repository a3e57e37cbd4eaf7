"""The log's line of transformers is true: with the --preload that it names a restart is quicker."""

import re
import signal
from typing import Any

import pytest

from tests.support.job import Agent, Job
from tests.support.processes import send
from tests.support.venv import FRAMEWORKS, venv_or_skip

pytestmark = [
    pytest.mark.timeout(1800),  # the first time, pip has to download
    pytest.mark.nightly(part="frameworks"),
]

SCRIPT = """\
import os, time
begun = time.monotonic()
from transformers import GPT2Config, GPT2LMHeadModel, Trainer
spent = time.monotonic() - begun
import signal, torch
torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()
print(f"generation {os.environ['ELASTIC_ETCD_GENERATION']} pid {os.getpid()} spent {spent:.3f}")
if os.environ["ELASTIC_ETCD_GENERATION"] == "1":
    signal.pause()
"""
LINE = re.compile(r"restart spent ([\d.]+) s importing transformers: --preload (\S+) saves it")
PATIENCE = 300


def restarted(job: Job, node: str, **flags: Any) -> tuple[Agent, float]:
    """The agent and how long the imports took that came after a restart."""
    (job.directory / "train.py").write_text(SCRIPT)
    python = venv_or_skip("frameworks", *FRAMEWORKS)
    flags |= {"min_uptime": 0, "settle": 0}
    agent = job.start(node, python=python, script=("train.py",), env={"PET_RERUN": "1"}, **flags)

    def look() -> list[tuple[str, ...]]:
        return re.findall(r"generation \d+ pid (\d+) spent ([\d.]+)", agent.output)

    ((pid, _),) = job.wait("it has its imports", look, PATIENCE)
    send(signal.SIGKILL, [int(pid)])
    job.exits(agent, 0, PATIENCE)
    _, (_, spent) = look()
    return agent, float(spent)


def test_what_the_log_says_of_transformers_is_saved(job: Job) -> None:
    agent, before = restarted(job, "n1")
    said = LINE.search(agent.output)
    assert said, agent.output
    seconds = float(said[1])
    assert 0.8 * before <= seconds <= before + 0.05, "nearly all of it"
    again, after = restarted(job, "n1", preload=said[2])
    assert after < before - 0.5 * seconds
    assert not LINE.search(again.output)
