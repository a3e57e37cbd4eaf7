"""Garbage in every key of a job that trains: it is named, and the training goes on."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from elastic_etcd.core.txn import Put, Txn
from elastic_etcd.etcd.client import Client
from tests.support.etcd import EtcdServer
from tests.support.job import Job
from tests.support.residue import PREFIX
from tests.support.ticking import TickingJob

pytestmark = pytest.mark.timeout(600)

HUGE = 1_400_000  # etcd takes 1.5 MiB in a request
GARBAGE = {
    "no JSON": "}{",
    "huge": "x" * HUGE,
    "a huge object": json.dumps({"v": 1, "x": "x" * HUGE}),
    "deep": "[" * 100_000,
    "deep and whole": '{"v": 1, "x": ' + "[" * 900 + "]" * 900 + "}",
    "a huge number": '{"v": 1, "generation": ' + "9" * 4000 + "}",
    "not a number": '{"v": 1, "generation": NaN, "final": -Infinity, "nproc": 1e999}',
    "half a character": '{"v": 1, "reason": "\\ud800", "node": "\\udfff"}',
    "no text": "\udcff\udcfe\0",
    "a key twice": '{"v": 2, "v": 1}',
    "wrong types": '{"v": 1, "participants": {"a": []}, "nodes": [], "master": "", "run": 0}',
    "another version": '{"v": 0}',  # a newer one ends the agents: tests/e2e/test_membership.py
    "a command": '{"v": 1, "__reduce__": ["os.system", "exit"], "py/object": "builtins.exec"}',
}
# What is written there disturbs nobody: it is not read, or only later.
TIMES = {"members": 3, "round": 4, "spec": 2, "ledger": 2, "outcome": 2}
QUIET = (
    *("acks", "hang", "history", "ledger", "outcome", "paces", "steps", "strange"),
    *("divergence", "step_times", "stragglers", "wanted", "watched"),
)
MORE = {
    "divergence",
    "hang",
    "outcome",
    "paces",
    "reports",
    "step_times",
    "steps",
    "stragglers",
    "strange",
    "wanted",
    "watched",
}


@dataclass
class Writer:
    """Somebody with the right to write, who makes mistakes."""

    etcd: EtcdServer
    job: Job
    used: Iterator[str]

    async def write(self, key: str) -> str:
        """Put the next kind of garbage there."""
        kind = next(self.used)
        async with Client(self.etcd.config) as client:
            await client.txn(Txn((), (Put(key, GARBAGE[kind]),)), 10)
        return kind


def forever() -> Iterator[str]:
    while True:
        yield from GARBAGE


async def test_garbage_in_every_key_of_a_job_that_trains(
    ticks: TickingJob, etcd: EtcdServer
) -> None:
    """Not one after the other of a fixed list: each key that is there, so a new one as well."""
    agents = [ticks.start(node, nnodes="1:2") for node in ("n1", "n2")]
    generation = ticks.trains(2)
    writer = Writer(etcd, ticks, forever())
    root = f"{PREFIX}/{ticks.name}"
    kinds = {name.partition("/")[0] for name in names(etcd, ticks)}
    assert kinds == {"spec", "members", "ledger", "round", "world", "acks", "history"}
    for kind in sorted(kinds | MORE):
        for _ in range(TIMES.get(kind, 1)):
            name = of_kind(etcd, ticks, kind, generation)
            how = await writer.write(f"{root}/{name}")
            what = f"{how} in {name}, generation {generation}"
            if kind in QUIET:
                ticks.goes_on(generation, steps=2)
            else:
                generation = ticks.trains(2, after=generation, steps=1)
            unread = kind in ("history", "strange", "acks", "paces")
            nothing = kind == "wanted" and how in ("a key twice", "wrong types")  # is asked for
            if not unread and not nothing:
                told = f"ignored, not written by this program: {root}/{name}: "
                ticks.wait(f"{what} is told", lambda told=told: told in said(ticks))  # type: ignore[misc]
            assert all(agent.running() for agent in agents), what
    own = [line for line in said(ticks).splitlines() if not line.startswith("[n")]
    assert all("Z elastic_etcd[" in line for line in own), "a traceback of an agent"
    assert max(map(len, own)) < 2000, "no line is as long as what was read"
    ticks.finish(*agents)
    left = {name.partition("/")[0] for name in names(etcd, ticks)}
    by_hand = {"members", "paces", "strange", "wanted", "watched"}
    assert left == {"history", "outcome", *by_hand}, "members: bound to no lease"
    for flags in ((), ("--json",)):
        status(etcd, ticks, *flags)
    etcd.ctl("del", "--prefix", f"{root}/")


def of_kind(etcd: EtcdServer, job: Job, kind: str, generation: int) -> str:
    """A key of this kind: one that is there now, else one that could be."""
    there = names(etcd, job)
    found = [name for name in there if name.partition("/")[0] == kind]
    lease = next(name for name in there if name.startswith("members/")).partition("/")[2]
    if kind in ("reports", "steps"):
        return f"{kind}/{generation}/{lease}"
    if kind == "step_times":
        return f"{kind}/{lease}"
    return found[-1] if found else kind


def names(etcd: EtcdServer, job: Job) -> list[str]:
    """The job's keys, without the part that names it."""
    root = f"{PREFIX}/{job.name}/"
    lines = etcd.ctl("get", "--prefix", "--keys-only", root).split()
    return sorted(line.removeprefix(root) for line in lines)


def status(etcd: EtcdServer, job: Job, *flags: str) -> None:
    """It shows what can be shown."""
    argv = [sys.executable, "-m", "elastic_etcd", "status", job.name, *flags]
    done = subprocess.run(
        [*argv, f"--etcd={etcd.endpoint}"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "succeeded" in done.stdout


def said(job: Job) -> str:
    return "".join(agent.output for agent in job.agents)
