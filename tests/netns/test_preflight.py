"""Nodes of which some are bad: --preflight keeps each of these out, and no other."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from elastic_etcd.__main__ import main
from tests.support.debian import NotToBeHad, unpacked
from tests.support.disks import slow_disk, slow_processor, small_disk
from tests.support.job import Agent

from .conftest import NetTicks, on_the_wire
from .wire import Wire

pytestmark = [pytest.mark.timeout(900), pytest.mark.nightly(part="netns")]
AT_ONCE = 4
QUIET = 60  # seconds of a lease: nothing is to be lost here
MIB = 1 << 20


def another_time() -> dict[str, str]:
    """Variables of a process whose clock is a minute ahead."""
    try:
        root = unpacked("faketime libfaketime", "bookworm", "faketime-bookworm")
    except NotToBeHad as why:
        pytest.skip(str(why))
    (library,) = root.glob("usr/lib/*/faketime/libfaketimeMT.so.1")
    return {"LD_PRELOAD": str(library), "FAKETIME": "+60s"}


def batches(names: Sequence[str]) -> Iterator[list[str]]:
    rest = iter(names)
    while batch := list(islice(rest, AT_ONCE)):
        yield batch


def together(job: NetTicks, nodes: Sequence[Agent]) -> None:
    """Agents that have just been started go on at the same time, on whatever machine."""
    for node in nodes:
        job.said(node, ": 1 worker on this node")
        node.freeze()
    for node in nodes:
        node.thaw()


def all_decided(nodes: Iterable[Agent]) -> bool:
    return all("preflight: processor" in each.output or not each.running() for each in nodes)


def listed(job: NetTicks, said: pytest.CaptureFixture[str]) -> tuple[set[str], set[str]]:
    """The members, and the nodes that were kept out, as `status` has them."""
    asked = ("status", job.name, f"--etcd={job.endpoint}", "--json")
    said.readouterr()
    assert job.wire.hosts["etcd"].run(lambda: main(asked)) == 0
    state = json.loads(said.readouterr().out)
    members, unfit = ({each["node"] for each in state[of]} for of in ("nodes", "unfit"))
    return members, unfit


@pytest.mark.parametrize("count", [12, 40])
def test_each_bad_node_is_kept_out_and_no_good_one(
    count: int,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    wires: Callable[..., Wire],
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = [f"n{number:02}" for number in range(1, count + 1)]
    processor, cut, slow, full, clock = (names[number] for number in (0, 2, 6, 7, 9))
    others = [name for name in names if name != cut]
    logs = {name: tmp_path / "logs" / name for name in names}
    for folder in logs.values():
        folder.mkdir(parents=True)
    told = {
        processor: "processor (MB/s of blake2b): ",
        slow: "disk of --log-dir (MB/s written and synced): ",
        full: f"--log-dir {logs[full]} has 0 MiB free, 64 are asked for: ",
        cut: "can't connect to {}: no answer within 1.5 s: open all ports between nodes",
        clock: "its clock is ",
    }
    env: dict[str, dict[str, str]] = {clock: another_time()}
    with ExitStack() as scope:
        wire = wires(*names)
        job = scope.enter_context(on_the_wire(NetTicks, wire, tmp_path, request))
        group = scope.enter_context(slow_processor(0.05))
        scope.enter_context(slow_disk(logs[slow], tmp_path / "image", MIB))
        scope.enter_context(small_disk(logs[full]))
        told[cut] = told[cut].format(wire.hosts[cut].address)
        wire.cut(others, [cut])

        def start(name: str) -> Agent:
            flags: dict[str, Any] = {"nnodes": f"{count}", "lease_ttl": QUIET, "preflight": "basic"}
            return job.node(name, log_dir=str(logs[name]), env=env.get(name, {}), **flags)

        nodes = {processor: start(processor)}
        (group / "cgroup.procs").write_text(str(nodes[processor].pid))
        for batch in batches(names[1:]):
            here = {name: start(name) for name in batch}
            together(job, list(here.values()))
            job.wait(f"all of {batch} are checked", partial(all_decided, here.values()))
            nodes |= here
        for name, why in told.items():
            job.exits(nodes[name], 8, seconds=180)
            assert why in nodes[name].output, job.account()
        good = set(names) - told.keys()
        job.wait("all others join", lambda: listed(job, capsys) == (good, set(told)))
        for name in good:
            nodes[name].terminate()
        for name in good:
            job.exits(nodes[name], 143)


def test_a_node_with_a_slow_network_is_kept_out_by_pairs(
    wires: Callable[..., Wire], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    names = [f"n{number}" for number in range(1, 7)]
    wire = wires(*names)
    with on_the_wire(NetTicks, wire, tmp_path, request) as job:
        wire.limits["n3"] = 2e5
        nodes = {
            name: job.node(name, nnodes="6", lease_ttl=QUIET, preflight="pairs") for name in names
        }
        together(job, list(nodes.values()))
        bad = nodes.pop("n3")
        job.exits(bad, 8)
        assert "network (MB/s): " in bad.output
        for node in nodes.values():
            job.said(node, "preflight: processor")
            node.terminate()
            job.exits(node, 143)
