"""An agent whose event loop stands still, though its process lives."""

import signal
from pathlib import Path

import pytest

from tests.support.etcd import EtcdServer
from tests.support.job import TTL, Job
from tests.support.processes import send
from tests.support.residue import history

pytestmark = pytest.mark.timeout(600)

# Python runs what stands here before the agent; a signal's handler runs on the loop's thread.
STUCK = f"""
import signal, time
def stands_still(*_):
    time.sleep({4 * TTL})
signal.signal(signal.SIGPROF, stands_still)
"""


def test_r8_a_stuck_agent_says_where_and_counts_as_lost(
    job: Job, etcd: EtcdServer, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(STUCK)
    n1 = job.start("n1")
    n2 = job.start("n2", env={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"})
    g = job.trains(2, seconds=60)
    send(signal.SIGPROF, [n2.pid])
    job.said(n2, "the agent's loop has stood still for")
    assert "in stands_still (" in n2.output, n2.output
    alone = job.trains(1, after=g, seconds=60)
    assert history(etcd, job.name)[alone]["began"] == "n2 is lost"
    again = job.trains(2, after=alone, seconds=60)
    assert again > alone
    job.said(n2, "the agent's loop turns again")
    job.finish(n1, n2)
