"""docs/contributing/keys.md shows what is really written: keys, fields, leases, and no more."""

import base64
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elastic_etcd.__main__ import main
from elastic_etcd.core.schema import hexed
from tests.support.etcd import EtcdServer, tool

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "contributing" / "keys.md").read_text()
SHOWN = "/elastic_etcd/resnet-7"  # the job of the document's examples
WORKER = """
import os, signal
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    signal.pause()
"""
STEPS = """
import tenacity, torch
torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()
import signal
signal.pause()
"""
HANGS = """
import time
import elastic_etcd as ee
ee.heartbeat()
time.sleep(1000)
"""
SLOW = """
import os, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import elastic_etcd as ee
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = ee.ElasticState(model=model.module)
state.sync()
with torch.no_grad():
    model.module.weight += dist.get_rank()  # as memory that rots
state.commit()
while True:
    time.sleep(0.02 + 0.08 * dist.get_rank())
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
"""

pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True)
class Written:
    """A value that a key had, with its lease."""

    key: str
    value: dict[str, Any]
    lease: int = 0

    @property
    def kind(self) -> str:
        return self.key.split("/")[0]


# --- what is documented


def documented() -> list[Written]:
    """Each JSON block, as a value of the key that is named last before it."""
    found, key = [], ""
    for named, text in re.findall(
        rf"`{SHOWN}/([^`\n]+)`|^```json\n(.*?)\n```", DOCUMENT, re.DOTALL | re.MULTILINE
    ):
        key = named or key
        if text:
            found.append(Written(key, json.loads(text)))
    return found


def leases() -> dict[str, str]:
    """From the table: the kind of key and whose lease it has."""
    rows = re.findall(r"^\| `JOB/(\w+)[^|]*\|[^|]*\|([^|]*)\|", DOCUMENT, re.MULTILINE)
    return {kind: lease.strip() for kind, lease in rows}


def commands() -> list[str]:
    return re.findall(r"^    (etcdctl .*)$", DOCUMENT, re.MULTILINE)


# --- what is written


def launch(
    etcd: EtcdServer, prefix: str, directory: Path, node: str, *more: str, worker: str = WORKER
) -> "subprocess.Popen[str]":
    script = directory / f"worker{hash(worker)}.py"
    script.write_text(worker)
    flags = {
        "etcd": etcd.endpoint,
        "prefix": prefix,
        "job": "resnet-7",
        "node-name": node,
        "settle": "0",
        "min-uptime": "600",
        "topology-label": "rack1",
        "start-method": "prefork" if "torch" in worker else "exec",
    }
    argv = [sys.executable, "-m", "elastic_etcd.launch", *(f"--{k}={v}" for k, v in flags.items())]
    return subprocess.Popen(
        [*argv, *more, str(script)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )


def said(agent: "subprocess.Popen[str]", text: str) -> None:
    assert agent.stderr is not None
    for line in agent.stderr:
        if text in line:
            return
    raise AssertionError(f"{text!r} was not said")


def ends(agent: "subprocess.Popen[str]", code: int) -> None:
    _, text = agent.communicate(timeout=120)
    assert agent.returncode == code, text


def steer(etcd: EtcdServer, prefix: str, *argv: str) -> None:
    assert main([*argv, f"--etcd={etcd.endpoint}", f"--prefix={prefix}", "--timeout=60"]) == 0


def five_runs(etcd: EtcdServer, prefix: str, directory: Path) -> None:
    """One that succeeds after a restart, one that fails, one that is slow and whose replicas
    differ, one that hangs, and one that is stopped, as the slow one is.

    The last one is scaled, and a node is drained from it.
    """
    ends(launch(etcd, prefix, directory, "node2", "--health-check=echo GPU 3 is lost; exit 3"), 8)
    pair = [launch(etcd, prefix, directory, n, "--nnodes=2") for n in ("node1", "node2")]
    for agent in pair:
        ends(agent, 0)
    pair = [
        launch(etcd, prefix, directory, n, "--nnodes=2", "--max-restarts=0", "--rerun")
        for n in ("node1", "node2")
    ]
    for agent in pair:
        ends(agent, 1)
    pair = [
        launch(etcd, prefix, directory, n, "--nnodes=2", worker=SLOW) for n in ("node1", "node2")
    ]
    said(pair[0], "is slow: ")
    steer(etcd, prefix, "stop", "resnet-7")
    for agent in pair:
        ends(agent, 128 + signal.SIGTERM)
    restart = ("--hang-action=restart", "--hang-timeout=1", "--max-restarts=0")
    ends(launch(etcd, prefix, directory, "node1", *restart, worker=HANGS), 1)
    alone = launch(etcd, prefix, directory, "node1", "--nnodes=1:2", worker=STEPS)
    said(alone, "group rank 0 of 1")
    steer(etcd, prefix, "top", "resnet-7")
    steer(etcd, prefix, "scale", "resnet-7", "1")
    spare = launch(etcd, prefix, directory, "node2", "--nnodes=1:2")
    said(spare, "spare: 1 node trains")
    steer(etcd, prefix, "drain", "resnet-7", "node2")
    steer(etcd, prefix, "drain", "resnet-7", "node2", "--deadline=60")
    ends(spare, 128 + signal.SIGTERM)
    steer(etcd, prefix, "scale", "resnet-7", "1:2")
    steer(etcd, prefix, "stop", "resnet-7")
    ends(alone, 128 + signal.SIGTERM)


def events(etcd: EtcdServer, prefix: str, revision: int) -> Iterator[Written]:
    """Every value that was put under the job's root since the revision, in etcdctl's words."""
    etcd.ctl("put", f"{prefix}/resnet-7/~", "{}")
    command = [tool("etcdctl"), f"--endpoints={etcd.endpoint}", "watch", "--prefix", "-w=json"]
    with subprocess.Popen(
        [*command, f"--rev={revision}", f"{prefix}/resnet-7/"], stdout=subprocess.PIPE
    ) as watch:
        assert watch.stdout is not None
        for line in watch.stdout:
            for event in json.loads(line)["Events"]:
                if event.get("type"):
                    continue
                kv = event["kv"]
                key = base64.b64decode(kv["key"]).decode().removeprefix(f"{prefix}/resnet-7/")
                if key == "~":
                    watch.kill()
                    return
                value = json.loads(base64.b64decode(kv["value"]))
                yield Written(key, value, int(kv.get("lease", 0)))


@pytest.fixture(scope="module")
def written(_etcd: EtcdServer, tmp_path_factory: pytest.TempPathFactory) -> list[Written]:
    prefix = "/test/keys-document"
    _etcd.ctl("put", f"{prefix}/start", "")
    found = json.loads(_etcd.ctl("get", f"{prefix}/start", "-w=json"))["header"]["revision"]
    five_runs(_etcd, prefix, tmp_path_factory.mktemp("job"))
    return list(events(_etcd, prefix, found))


# --- both are the same


def shape(values: Iterable[Any]) -> Any:
    """The names and types of everything in these values, merged: a field that is not in all of
    them has "absent" among its types.
    """
    values = list(values)
    objects = [v for v in values if isinstance(v, dict)]
    items = [item for v in values if isinstance(v, list) for item in v]
    types = {type(v).__name__ for v in values}
    merged: dict[str, Any] = {"types": sorted(types)}
    if objects:
        absent = object()
        merged["fields"] = {
            name: shape(v.get(name, absent) for v in objects)
            for name in sorted({name for v in objects for name in v})
        }
    if items:
        merged["items"] = shape(items)
    return merged


def by_kind(all_of_them: Iterable[Written]) -> dict[str, list[Written]]:
    kinds: dict[str, list[Written]] = {}
    for one in all_of_them:
        kinds.setdefault(one.kind, []).append(one)
    return kinds


def unnested(one: Written) -> dict[str, Any]:
    """History has a copy of the outcome, which is compared as such."""
    return {k: v for k, v in one.value.items() if one.kind != "history" or k != "outcome"}


def variants(some: Iterable[Written]) -> set[object]:
    """Which of the named states the values are in."""
    return {v.value.get("phase") or v.value.get("state") for v in some}


def test_every_kind_of_key_is_documented(written: list[Written]) -> None:
    assert set(by_kind(documented())) == set(by_kind(written)) == set(leases())


@pytest.mark.parametrize("kind", sorted(by_kind(documented())))
def test_every_field_is_documented(written: list[Written], kind: str) -> None:
    shown, real = by_kind(documented())[kind], by_kind(written)[kind]
    assert shape(map(unnested, shown)) == shape(map(unnested, real))
    assert variants(shown) == variants(real)


def test_history_has_the_outcome(written: list[Written]) -> None:
    for some in (documented(), written):
        outcomes = [one.value for one in some if one.kind == "outcome"]
        ended = [one.value["outcome"] for one in some if "outcome" in one.value]
        assert ended
        assert all({**outcome, "v": 2} in outcomes for outcome in ended)


def test_leases_are_as_documented(written: list[Written]) -> None:
    told = leases()
    for one in written:
        owner = one.key.rpartition("/")[2]
        if told[one.kind] == "the member's":
            assert hexed(one.lease) == owner, one
        elif told[one.kind].startswith("the coordinator's until `final`"):
            final = one.value["phase"] == "final"
            assert hexed(one.lease) == (hexed(0) if final else one.value["coordinator"]), one
        elif told[one.kind] in ("that of who looks", "one of ten minutes"):
            assert one.lease, one
        else:
            assert (told[one.kind], one.lease) == ("none", 0), one


def test_values_are_written_as_documented(written: list[Written]) -> None:
    for one in (*documented(), *written):
        assert one.value["v"] == 2
    text = re.findall(r"```json\n(.*?)\n```", DOCUMENT, re.DOTALL)
    for shown in text:
        assert list(json.loads(shown)) == sorted(json.loads(shown)), shown


def test_the_commands_work(etcd: EtcdServer, prefix: str, tmp_path: Path) -> None:
    agent = launch(etcd, prefix, tmp_path, "node1", "--nnodes=1")
    said(agent, "group rank 0 of 1")
    printed = {}
    for command in commands():
        here = command.replace("/elastic_etcd", prefix).partition(" #")[0]
        environment = {**os.environ, "ETCDCTL_ENDPOINTS": etcd.endpoint}
        pipeline = here.replace("etcdctl", shlex.quote(tool("etcdctl")), 1)
        if " watch " in command:
            pipeline = f"timeout 1 {pipeline} || [ $? = 124 ]"
        if "LEASE" in command:
            lease = json.loads(etcd.ctl("get", f"{prefix}/resnet-7/round", "--print-value-only"))
            pipeline = pipeline.replace("LEASE", lease["coordinator"])
        if " del " in command:
            agent.send_signal(signal.SIGTERM)
            ends(agent, 128 + signal.SIGTERM)
        done = subprocess.run(
            pipeline, shell=True, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (pipeline, done.stderr)
        printed[command.partition(" #")[0].strip()] = done.stdout
    assert len(printed) >= 6
    assert all(printed[c] for c in printed if " watch " not in c), printed
    assert etcd.ctl("get", "--prefix", f"{prefix}/resnet-7/", "--count-only", "-w=fields").endswith(
        '"Count" : 0\n'
    )
