"""Traps into which other elastic trainers fell; docs/contributing/failures.md lists them."""

import asyncio
import base64
import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from elastic_etcd.core import rules, writes
from elastic_etcd.core.lifecycle import Life, State, Write
from elastic_etcd.core.rules import Elapsed, Local
from elastic_etcd.core.schema import Keys, Limits, Member, Spec
from elastic_etcd.core.txn import Get, Snapshot, Txn
from elastic_etcd.core.view import Narrow, covered, view_of
from elastic_etcd.etcd.client import Client
from tests.support.aio import asynchronous
from tests.support.disks import small_disk
from tests.support.etcd import EtcdServer
from tests.support.job import Job
from tests.support.processes import command, send
from tests.support.residue import history, keys
from tests.support.ticking import TickingJob

pytestmark = pytest.mark.timeout(600)


def versions(etcd: EtcdServer, key: str) -> Iterator[dict[str, Any]]:
    """What a key has held since it was last created, the newest first."""
    revision = 0
    while revision >= 0:
        answer = json.loads(etcd.ctl("get", key, "-w", "json", f"--rev={revision}"))
        if "kvs" not in answer:
            return
        (kv,) = answer["kvs"]
        yield json.loads(base64.b64decode(kv["value"]))
        revision = kv["mod_revision"] - 1


def test_master_address_race(ticks: TickingJob, etcd: EtcdServer) -> None:
    """pytorch#132950: workers start on what was written together with their world, or not at all.

    Rank 0 is killed each time, so that each world has another store.
    """
    n1, n2 = (ticks.start(node, suspect_after=0) for node in ("n1", "n2"))
    g = ticks.trains(2, seconds=60)
    for _ in range(2):
        os.kill(ticks.worker(g, rank=0).pid, signal.SIGKILL)
        g = ticks.trains(2, after=g, seconds=60)
    rounds = list(versions(etcd, f"/elastic_etcd/{ticks.name}/round"))
    assert len(rounds) == 4 * g, "setup, joinable, frozen, final of each generation"
    assert all((r["master"] is not None) == (r["phase"] == "final") for r in rounds)
    written = {r["generation"]: r["master"] for r in rounds if r["master"]}
    assert len({str(master) for master in written.values()}) == g, "a fresh store for each"
    starts = ticks.events("start")
    assert len(starts) == 2 * g
    for e in starts:
        assert e.master == f"{written[e.generation]['addr']}:{written[e.generation]['port']}"
    ticks.finish(n1, n2)


@pytest.mark.nightly(part="jobs")
def test_agent_stopped_with_sigstop_past_its_ttl_and_then_continued(
    job: Job, etcd: EtcdServer
) -> None:
    """Only the agent: its worker runs on, meets its peers' end, and waits for somebody to care."""
    n1, n2 = job.start("n1"), job.start("n2")
    g = job.trains(2, seconds=60)
    stopped = job.worker(g, rank=1)
    victim, other = (n2, n1) if stopped.node == "n2" else (n1, n2)
    send(signal.SIGSTOP, [victim.pid])
    alone = job.trains(1, after=g)
    assert history(etcd, job.name)[alone]["began"] == f"{victim.node} is lost: its lease has ended"
    job.goes_on(alone)
    send(signal.SIGCONT, [victim.pid])
    again = job.trains(2, after=alone, seconds=60)
    job.said(victim, "joining again as another member")
    assert command(stopped.pid) == "gone"
    assert job.worker(again, rank=0).node == other.node, "the survivor keeps its place"
    assert job.worker(again, rank=0).restarts == 0, "an old failure of an old member is nobody's"
    job.finish(n1, n2)


async def joined(client: Client, keys: Keys, number: int) -> State:
    """A member of the job in `keys` that has seen no round yet."""
    lease = (await client.grant(60)).id
    member, spec = Member(lease, f"n{number}", 1), Spec("run", Limits(1, 64))
    while True:
        seen = await client.range(*writes.look(keys))
        txn = writes.join(keys, seen, member, spec, again=False)
        assert isinstance(txn, Txn)
        reading = Txn(txn.compare, (*txn.then, Get(keys.spec), Get(keys.member(lease))))
        result = await client.txn(reading)
        if result.succeeded:
            break
    created = {kv.key: kv.create for got in result.gets for kv in got}
    local = Local("run", lease, created[keys.member(lease)], created[keys.spec])
    snapshot = await client.range(*covered(keys, Narrow(), lease))
    return State(local, 1, Life.MEMBER, view=view_of(snapshot, keys, Narrow()))


def claim(state: State, keys: Keys) -> Txn:
    """What the rules have a member of a job without a round write."""
    assert state.view
    decision = rules.decide(state.view, state.local, Limits(1, 64), Elapsed(0, 0))
    assert isinstance(decision, rules.Claim)
    write = Write(decision, state.local.lease)
    return writes.build(keys, state, write, Member(state.local.lease, "n", 1), None, "")


@asynchronous
async def test_two_agents_claiming_the_same_generation(etcd: EtcdServer, prefix: str) -> None:
    """And fourteen more. Their claims arrive together, and once again when one has won."""
    names = Keys(f"{prefix}/job")
    async with Client(etcd.config) as client:
        states = [await joined(client, names, n) for n in range(16)]
        txns = [claim(state, names) for state in states]
        won = [result.succeeded for result in await asyncio.gather(*map(client.txn, txns))]
        assert sum(won) == 1
        assert not any(r.succeeded for r in await asyncio.gather(*map(client.txn, txns)))
        seen: Snapshot = await client.range(*covered(names, Narrow(), 0))
        now = view_of(seen, names, Narrow()).round
        assert now
        assert now.generation == 1
        assert now.coordinator == states[won.index(True)].local.lease
        for state in states:
            await client.revoke(state.local.lease)


@pytest.mark.parametrize("how", ["no space left", "files may not grow"])
def test_full_disk_under_log_dir(
    jobs: Callable[..., TickingJob], etcd: EtcdServer, how: str, tmp_path: Path
) -> None:
    job = jobs(kind=TickingJob)
    logs = tmp_path / "logs"
    logs.mkdir()
    with ExitStack() as scope:
        if how == "no space left":
            scope.enter_context(small_disk(logs))
        agent = job.start(
            "n1", "--fault", "talk@step=2", nnodes="1", settle=0, redirects=3, log_dir=logs
        )
        if how == "files may not grow":  # for everybody: the agent writes the files itself
            resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))
        g = job.trains(1, seconds=60)
        job.said(agent, "training goes on without log files")
        job.said(agent, "--log-dir")
        os.kill(job.worker(g, rank=0).pid, signal.SIGKILL)
        g = job.trains(1, after=g, seconds=60)
        job.goes_on(g)
        assert agent.output.count("can't write") == 1, agent.output
        job.finish(agent)
    assert keys(etcd, job.name)["outcome"]["state"] == "succeeded"
