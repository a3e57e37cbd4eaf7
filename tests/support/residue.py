"""What a job leaves behind: processes, keys and leases, as /proc and etcdctl show them."""

import base64
import json
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.support.etcd import EtcdServer
from tests.support.job import PATIENCE, TTL, Job

PREFIX = "/elastic_etcd"
PAUSE = 0.1  # seconds; each question starts a program, which would take a core from who is awaited

passed = pytest.StashKey[bool]()  # whether the test itself did, for the fixtures that it has


def keys(etcd: EtcdServer, job: str) -> dict[str, Any]:
    """All keys of a job, without the part that names it, with their decoded values."""
    root = f"{PREFIX}/{job}/"
    answer = json.loads(etcd.ctl("get", "--prefix", root, "-w", "json"))
    return {
        base64.b64decode(kv["key"]).decode().removeprefix(root): json.loads(
            base64.b64decode(kv["value"])
        )
        for kv in answer.get("kvs", [])
    }


def history(etcd: EtcdServer, job: str) -> dict[int, Any]:
    """The history entries, by generation."""
    found = keys(etcd, job)
    return {int(k.split("/")[1]): v for k, v in found.items() if k.startswith("history/")}


def member(etcd: EtcdServer, job: str, node: str) -> str:
    """The lease id of a node's member key, as etcdctl writes it."""
    found = keys(etcd, job).items()
    (lease,) = [k.split("/")[1] for k, v in found if k[:8] == "members/" and v["node"] == node]
    return lease


def members_are(etcd: EtcdServer, job: str, count: int, kind: str = "members/") -> None:
    """Wait for so many members, or acks."""
    deadline = time.monotonic() + 30
    while len(found := [k for k in keys(etcd, job) if k.startswith(kind)]) != count:
        assert time.monotonic() < deadline, found
        time.sleep(PAUSE)


def leases(etcd: EtcdServer) -> set[str]:
    """All leases there are, but for those of nodes that were not fit."""
    every = json.loads(etcd.ctl("get", "--prefix", f"{PREFIX}/", "-w", "json")).get("kvs", [])
    unfit = {
        format(kv.get("lease", 0), "016x")
        for kv in every
        if base64.b64decode(kv["key"]).decode().split("/")[3:4] == ["unfit"]
    }
    return set(etcd.ctl("lease", "list").split("\n")[1:]) - {"", *unfit}


class Residue:
    """Compares what is there after a test with what was there before."""

    def __init__(self, etcd: EtcdServer) -> None:
        self._etcd = etcd
        self._leases = leases(etcd)

    def assert_clean(self, jobs: Iterable[Job]) -> None:
        """No process, no key but history, outcome and what people wanted, no lease.

        Nodes that were not fit are remembered for ten minutes.

        What a node that died held goes when its lease ends. A job whose last agent ended at once
        has no outcome: what is bound to no lease stays for the run to go on.
        """
        for job in jobs:
            _gone("processes", job.processes, seconds=PATIENCE)
            _gone("keys", lambda job=job: self._keys(job), seconds=TTL + 30)  # type: ignore[misc]
        _gone("leases", lambda: sorted(leases(self._etcd) - self._leases), seconds=TTL + 30)

    def _keys(self, job: Job) -> list[str]:
        goes_on = ("spec", "ledger", "round", "world/", "hang") if job.abandoned else ()
        stay = ("history/", "outcome", "wanted", "unfit/", *goes_on)
        return [k for k in keys(self._etcd, job.name) if not k.startswith(stay)]


def _gone(what: str, find: Callable[[], list[str]], seconds: float) -> None:
    """Ask until there is none."""
    deadline = time.monotonic() + seconds
    while found := find():
        assert time.monotonic() < deadline, f"{what} left: {found}"
        time.sleep(PAUSE)
