"""The recipes of docs/memory.md: what a killed worker, and then a killed node, cost a framework."""

import re
import signal
from pathlib import Path

import pytest

from tests.support.job import Agent, Job
from tests.support.processes import send
from tests.support.savers import PATIENCE, begun, saved, start
from tests.support.venv import FRAMEWORKS, venv_or_skip

pytestmark = [
    pytest.mark.timeout(1200),  # the first time, pip has to download
    pytest.mark.nightly(part="frameworks"),
]


@pytest.mark.parametrize("framework", ["accelerate", "lightning", "transformers"])
def test_what_a_killed_worker_and_a_killed_node_cost(job: Job, framework: str) -> None:
    program = Path(__file__).with_name(f"with_{framework}.py")
    env = {"PYTHON_EXEC": str(venv_or_skip("frameworks", *FRAMEWORKS))}

    def node(name: str) -> Agent:
        return start(job, name, program=program, start_method="exec", env=env)

    agents = {name: node(name) for name in ("n1", "n2")}
    g, step, pids = begun(job, 2)
    assert step == 0
    last = saved(job, g, more=2)
    send(signal.SIGKILL, [pids[1]])
    g, step, _ = begun(job, 2, after=g)
    assert step >= last
    last = saved(job, g, more=2, rank=1)  # who stays: rank 0 may be a step ahead
    leads = re.compile(rf"generation {g} \(.*\): group rank 0 of 2")
    (first,) = [name for name, agent in agents.items() if leads.search(agent.output)]
    agents.pop(first).node_kill()
    g, step, _ = begun(job, 1, after=g)
    assert step >= last
    saved(job, g)
    job.finish(*agents.values(), seconds=PATIENCE)
