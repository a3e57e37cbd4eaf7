"""`elastic-etcd check`: by hand, and as the command of --health-check."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic_etcd.__main__ import main
from elastic_etcd.agent.followers import health_check
from tests.support.disks import small_disk
from tests.support.etcd import EtcdServer
from tests.support.job import Job
from tests.support.ticking import TickingJob

pytestmark = pytest.mark.timeout(600)
CHECK = f"{sys.executable} -m elastic_etcd check"


def status(etcd: EtcdServer, job: str, said: pytest.CaptureFixture[str], *more: str) -> str:
    said.readouterr()
    assert main(["status", job, f"--etcd={etcd.endpoint}", *more]) == 0
    return said.readouterr().out


def test_a_node_and_its_etcd_are_looked_at(
    etcd: EtcdServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    logs = f"--log-dir={tmp_path}"
    assert main(["check", f"--etcd={etcd.endpoint}", logs, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fit"]
    names = [each["name"] for each in told["checks"]]
    assert {"memory", "shm", "processes", "descriptors", "devices", "clock"} < set(names)
    assert {"disk of TMPDIR", "disk of --log-dir"} < set(names)
    assert names[-6:] == ["address", "link", "etcd", "lease", "txn", "watch"]
    assert main(["check", f"--etcd={etcd.endpoint}", logs]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.partition(": ok: ")[0] for line in lines) == sorted(names)
    assert etcd.ctl("get", "--prefix", "/elastic_etcd/check-") == ""


def test_what_is_wrong_comes_last_with_what_to_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["check"]) == 0
    assert "etcd: ok: not asked, as there is no --etcd" in capsys.readouterr().out
    flags = ["--etcd=127.0.0.1:1", "--timeout=0.5", f"--log-dir={tmp_path}/none"]
    assert main(["check", *flags]) == 10
    *_, disk, last = capsys.readouterr().out.splitlines()
    why = f"{tmp_path}/none can't be written to: No such file or directory"
    assert disk == f"disk of --log-dir: wrong: {why}: mend it, or give another folder"
    assert last.startswith("etcd: wrong: no answer from etcd at 127.0.0.1:1 for 0.5 s")
    assert main(["check", "--advertise=203.0.113.0/24"]) == 10
    assert "\naddress: wrong: " in capsys.readouterr().out


def test_a_user_is_checked_under_the_prefix(
    own_etcd: EtcdServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own_etcd.start()
    own_etcd.guard("/mine/")
    monkeypatch.setenv("ELASTIC_ETCD_PASSWORD", "mine")
    flags = [f"--etcd={own_etcd.endpoint}", "--user=me"]
    assert main(["check", *flags, "--prefix=/mine"]) == 0
    assert "txn: ok: written under /mine" in capsys.readouterr().out
    assert main(["check", *flags]) == 10
    (wrong,) = [line for line in capsys.readouterr().out.splitlines() if ": wrong: " in line]
    assert wrong.startswith("etcd: wrong: ")
    assert "denies user 'me' access to /elastic_etcd/check-" in wrong


def test_an_outage_of_etcd_is_no_fault_of_a_node_beside_its_agent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETCDCTL_ENDPOINTS", "no-such.example.:2379")
    why = asyncio.run(health_check._unfit(CHECK))
    assert why == ""
    assert main(["check", "--timeout=0.5"]) == 10
    assert "\netcd: wrong: " in capsys.readouterr().out


def test_a_node_whose_disk_is_full_stays_out_until_it_is_not(
    ticks: TickingJob, etcd: EtcdServer, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = ticks.directory / "logs"
    logs.mkdir()
    flags: dict[str, Any] = {"health_check": f"{CHECK} --log-dir={logs}", "settle": 0}
    with small_disk(logs):
        n1 = ticks.start("n1", **flags)
        ticks.exits(n1, 8)
    why = f"disk of --log-dir: wrong: {logs} has 0 MiB free, 64 are asked for: free some, or "
    assert f"error: this node does not join: --health-check {sys.executable} exited 10: {why}" in (
        n1.output
    )
    told = status(etcd, ticks.name, capsys)
    assert "n1 was kept out at 20" in told
    assert why in told
    (unfit,) = json.loads(status(etcd, ticks.name, capsys, "--json"))["unfit"]
    assert unfit["node"] == "n1"
    assert why in unfit["why"]
    n1 = ticks.start("n1", **flags)
    ticks.trains(1)
    assert "kept out" not in status(etcd, ticks.name, capsys)
    ticks.finish(n1)


FILLS = """
import os, pathlib, sys, time
import elastic_etcd as ee

if os.environ["ELASTIC_ETCD_NODE"] == "n1":
    pathlib.Path(sys.argv[1], "full").write_bytes(bytes(60 << 20))
    sys.exit("GPU 3 has fallen off the bus")
print("trains in a world of", os.environ["WORLD_SIZE"], flush=True)
while not ee.leaving():
    time.sleep(0.05)
    ee.heartbeat()
"""


def test_a_node_that_is_left_out_is_checked_once_more(job: Job, tmp_path: Path) -> None:
    script, logs = tmp_path / "train.py", tmp_path / "logs"
    script.write_text(FILLS)
    logs.mkdir()
    given: dict[str, Any] = {
        "script": (str(script), str(logs)),
        "start_method": "exec",
        "leave_deadline": 5,
        "max_restarts": 9,
    }
    check = f"{CHECK} --log-dir={logs}"
    with small_disk(logs, "size=100m"):
        n2 = job.start("n2", **given)
        n1 = job.start("n1", health_check=check, health_interval=3600, **given)
        job.exits(n1, 8)
    assert "free, 64 are asked for: free some, or give another folder: leaving" in n1.output
    job.said(n2, "trains in a world of 1")
    n2.terminate()
    job.exits(n2, 143)


def test_a_node_whose_health_check_fails_is_shown(
    ticks: TickingJob, etcd: EtcdServer, capsys: pytest.CaptureFixture[str]
) -> None:
    n1 = ticks.start("n1", health_check="echo a page is to be retired; exit 3")
    ticks.exits(n1, 8)
    told = status(etcd, ticks.name, capsys)
    assert "Z: --health-check echo exited 3: a page is to be retired" in told
