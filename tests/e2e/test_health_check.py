"""A node whose --health-check fails does not join, or leaves between two steps."""

import asyncio
from pathlib import Path

import pytest

from elastic_etcd.agent.followers import health_check
from elastic_etcd.system import child_process
from tests.support.etcd import EtcdServer
from tests.support.job import Job
from tests.support.residue import keys

pytestmark = pytest.mark.timeout(600)
TRAINS = """
import os, time
import elastic_etcd as ee

print("trains in a world of", os.environ["WORLD_SIZE"], flush=True)
while not ee.leaving():
    time.sleep(0.05)
    ee.heartbeat()
"""


def test_a_node_that_is_not_fit_leaves_and_stays_out_until_it_is(
    job: Job, etcd: EtcdServer, tmp_path: Path
) -> None:
    script, bad = tmp_path / "train.py", tmp_path / "bad"
    script.write_text(TRAINS)
    given = {"script": (str(script),), "start_method": "exec", "leave_deadline": 5}
    check = f"cat {bad} && exit 3 || true"
    n1 = job.start("n1", **given, health_check=check, health_interval=1)  # type: ignore[arg-type]
    n2 = job.start("n2", **given)  # type: ignore[arg-type]
    for node in (n1, n2):
        job.said(node, "trains in a world of 2", seconds=90)
    bad.write_text("GPU 3: 2 pages are to be retired\n")
    job.exits(n1, 8, seconds=90)
    why = "--health-check cat exited 3: GPU 3: 2 pages are to be retired"
    assert f"{why}: leaving" in n1.output
    shown = [v["why"] for k, v in keys(etcd, job.name).items() if k.startswith("unfit/")]
    assert shown == [why]
    job.said(n2, "trains in a world of 1", seconds=90)
    assert "n1 is leaving" in n2.output

    n1 = job.start("n1", **given, health_check=check)  # type: ignore[arg-type]
    job.exits(n1, 8, seconds=90)
    assert f"error: this node does not join: {why}" in n1.output
    assert "trains" not in n1.output
    bad.unlink()
    n1 = job.start("n1", **given, health_check=check)  # type: ignore[arg-type]
    job.said(n1, "trains in a world of 2", seconds=90)
    for node in (n1, n2):
        node.terminate()
        job.exits(node, 143, seconds=90)


def test_a_command_that_does_not_end_is_ended_with_all_that_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_check, "HEALTH_TIMEOUT", 0.5)
    command = f"echo asks the driver; (sleep 60; touch {tmp_path}/late) & wait"
    why = asyncio.run(health_check._unfit(command))
    assert why == "--health-check echo has not ended in 0.5 s: asks the driver"


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("true", ""),
        ("false", "--health-check false exited 1"),
        ("no-such-command", "--health-check no-such-command exited 127: "),
        ("kill -9 $$", "--health-check kill exited -9"),
        ("echo a; echo; echo b >&2; exit 2", "--health-check echo exited 2: b"),
    ],
)
def test_the_last_line_says_why(command: str, why: str) -> None:
    assert asyncio.run(health_check._unfit(command)).startswith(why)


def test_what_a_command_leaves_running_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_check, "HEALTH_TIMEOUT", 3.0)
    assert asyncio.run(health_check._unfit("sleep 6 & true")) == ""


def test_a_command_that_cannot_be_killed_is_no_word_for_the_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that hangs in a driver."""
    monkeypatch.setattr(health_check, "HEALTH_TIMEOUT", 0.5)
    monkeypatch.setattr(child_process, "signal_group", lambda *_: False)
    why = asyncio.run(health_check._unfit("sleep 4"))
    assert why.startswith("--health-check sleep has not ended in ")


def test_a_command_that_the_shell_cannot_read_is_not_a_crash() -> None:
    why = asyncio.run(health_check._unfit("echo it's well"))
    assert why.startswith("--health-check echo exited 2: ")
