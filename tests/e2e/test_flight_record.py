"""SIGUSR1 makes an agent write its flight record, and its training goes on."""

import re
import signal
from pathlib import Path

from tests.support.job import Agent, Job
from tests.support.replay import replay
from tests.support.ticking import TickingJob


def record(job: Job, agent: Agent) -> Path:
    agent.terminate(signal.SIGUSR1)
    job.said(agent, "the last events are in")
    return Path(re.findall(r"events are in (\S+)", agent.output)[-1])


def test_sigusr1_writes_a_record_that_replays(ticks: TickingJob) -> None:
    n1, n2 = ticks.start("n1", nnodes="2"), ticks.start("n2", nnodes="2")
    generation = ticks.trains(2)
    for agent in (n1, n2):
        path = record(ticks, agent)
        try:
            steps = path.read_text()
            assert '"StartWorkers"' in steps
            assert replay(path) == ""
        finally:
            path.unlink()
    ticks.goes_on(generation)
    ticks.finish(n1, n2)
