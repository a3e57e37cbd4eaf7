"""An agent whose event loop stands still, though its process lives."""

import signal
from pathlib import Path

import pytest

from tests.support.etcd import EtcdServer
from tests.support.job import TTL
from tests.support.processes import send
from tests.support.residue import history
from tests.support.ticking import TickingJob

pytestmark = pytest.mark.timeout(600)

# Python runs what stands here before the agent; a signal's handler runs on the loop's thread.
STUCK = f"""
import signal, time
def stands_still(*_):
    time.sleep({4 * TTL})
signal.signal(signal.SIGPROF, stands_still)
"""


def test_r8_a_stuck_agent_says_where_and_counts_as_lost(
    ticks: TickingJob, etcd: EtcdServer, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(STUCK)
    n1 = ticks.start("n1")
    n2 = ticks.start("n2", env={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"})
    g = ticks.trains(2, seconds=60)
    send(signal.SIGPROF, [n2.pid])
    ticks.said(n2, "the agent's loop has stood still for")
    assert "in stands_still (" in n2.output, n2.output
    alone = ticks.trains(1, after=g, seconds=60)
    assert history(etcd, ticks.name)[alone]["began"] == "n2 is lost: its lease has ended"
    again = ticks.trains(2, after=alone, seconds=60)
    assert again > alone
    ticks.said(n2, "the agent's loop turns again")
    ticks.finish(n1, n2)
