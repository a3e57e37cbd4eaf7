"""--preflight: a node that is not fit does not join, and `status` says why."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic_etcd.__main__ import main
from tests.support.disks import small_disk
from tests.support.etcd import EtcdServer
from tests.support.job import Job
from tests.support.residue import keys
from tests.support.ticking import TickingJob

pytestmark = pytest.mark.timeout(600)


def status(etcd: EtcdServer, job: str, said: pytest.CaptureFixture[str], *more: str) -> str:
    said.readouterr()
    assert main(["status", job, f"--etcd={etcd.endpoint}", *more]) == 0
    return said.readouterr().out


def test_two_nodes_check_each_other_and_train(ticks: TickingJob, etcd: EtcdServer) -> None:
    logs = {"log_dir": str(ticks.directory / "logs"), "preflight": "pairs"}
    n1, n2 = ticks.start("n1", **logs), ticks.start("n2", **logs)
    generation = ticks.trains(2)
    for node in (n1, n2):
        ticks.said(node, "preflight: processor (MB/s of blake2b) ")
        ticks.said(node, "disk of --log-dir (MB/s written and synced) ")
    checked = [v for k, v in keys(etcd, ticks.name).items() if k.startswith("preflight/0/")]
    assert {each["node"] for each in checked} == {"n1", "n2"}
    for each in checked:
        (call,) = each["calls"]
        assert (call["error"], each["port"], each["unfit"]) == ("", 0, "")
        assert call["speed"] > 0
    ticks.goes_on(generation)
    ticks.finish(n1, n2)


def test_a_node_whose_disk_is_full_stays_out_until_it_is_not(
    ticks: TickingJob, etcd: EtcdServer, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = ticks.directory / "logs"
    logs.mkdir()
    flags: dict[str, Any] = {"log_dir": str(logs), "preflight": "basic", "settle": 0}
    with small_disk(logs):
        n1 = ticks.start("n1", **flags)
        ticks.exits(n1, 8)
    why = f"--log-dir {logs} has 0 MiB free, 64 are asked for: free some, or give another folder"
    assert f"error: this node does not join: {why}.\n" in n1.output
    told = status(etcd, ticks.name, capsys)
    assert "n1 was kept out at 20" in told
    assert f"Z: {why}" in told
    (unfit,) = json.loads(status(etcd, ticks.name, capsys, "--json"))["unfit"]
    assert (unfit["node"], unfit["why"]) == ("n1", why)
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
    with small_disk(logs, "size=100m"):
        n2 = job.start("n2", **given)
        n1 = job.start("n1", preflight="basic", log_dir=logs, **given)
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


def test_too_few_descriptors_are_told(ticks: TickingJob, tmp_path: Path) -> None:
    few = tmp_path / "python"
    few.write_text(f'#!/bin/sh\nulimit -n 300\nexec {sys.executable} "$@"\n')
    few.chmod(0o755)
    n1 = ticks.start("n1", nproc=4, preflight="basic", python=few)
    ticks.exits(n1, 8)
    found = "300 open files are allowed, 384 are asked for, for 4 workers: see ulimit -n"
    assert f"this node does not join: {found}." in n1.output
