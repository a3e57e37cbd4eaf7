"""The independent second clients: etcdctl and, in its own process, the etcd3 package."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_etcd.core.txn import Get, Put, Txn
from elastic_etcd.etcd.client import Client
from elastic_etcd.etcd.session import Session
from tests.support.aio import Copy, asynchronous, put
from tests.support.etcd import EtcdServer
from tests.support.venv import venv

# It does not import with protobuf's compiled implementations, hence the pure Python one.
ETCD3 = """
import sys, etcd3
host, port, prefix = sys.argv[1:]
client = etcd3.client(host=host, port=int(port))
for value, meta in client.get_prefix(prefix + "/ours/"):
    print(meta.key.decode(), value.decode(), meta.lease_id, meta.mod_revision)
client.put(prefix + "/theirs/put", "from etcd3: ключ")
lease = client.lease(60)
client.put(prefix + "/theirs/leased", "leased", lease)
print(lease.id)
client.transaction(
    compare=[client.transactions.version(prefix + "/ours/b") > 0],
    success=[client.transactions.delete(prefix + "/ours/b")],
    failure=[],
)
"""


@pytest.fixture(scope="module")
def etcd3_python() -> Path:
    return venv("etcd3", "etcd3==0.12.0", "protobuf==3.20.3", "grpcio")


def run_etcd3(python: Path, *arguments: str) -> str:
    done = subprocess.run(
        [python, "-W", "ignore", "-c", ETCD3, *arguments],
        env={"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@asynchronous
async def test_etcd3_reads_and_changes(etcd: EtcdServer, prefix: str, etcd3_python: Path) -> None:
    ranges = Get(f"{prefix}/ours/", prefix=True), Get(f"{prefix}/theirs/", prefix=True)
    async with (
        Client(etcd.config) as client,
        Session(client, 30) as session,
        Copy(client, *ranges) as copy,
    ):
        a, b = Put(f"{prefix}/ours/a", "значение", session.lease), Put(f"{prefix}/ours/b", "2")
        written = await client.txn(Txn((), (a, b)))
        host, _, port = etcd.endpoint.rpartition(":")
        *read, lease = run_etcd3(etcd3_python, host, port, prefix).splitlines()
        assert read == [
            f"{a.key} {a.value} {session.lease} {written.revision}",
            f"{b.key} 2 0 {written.revision}",
        ]
        snapshot = await copy.until(lambda values: len(values) == 3)
        assert copy.values == {
            a.key: a.value,
            f"{prefix}/theirs/put": "from etcd3: ключ",
            f"{prefix}/theirs/leased": "leased",
        }
        assert snapshot.kvs[f"{prefix}/theirs/leased"].lease == int(lease)


@asynchronous
async def test_etcdctl_reads_and_changes(etcd: EtcdServer, prefix: str) -> None:
    async with (
        Client(etcd.config) as client,
        Session(client, 30) as session,
        Copy(client, Get(prefix, prefix=True)) as copy,
    ):
        await copy.until(lambda _: True)
        await put(client, f"{prefix}/a", '{"v": 1}', session.lease)
        found = json.loads(etcd.ctl("get", "--prefix", prefix, "-w", "json"))["kvs"]
        assert [kv["lease"] for kv in found] == [session.lease]
        assert etcd.ctl("get", f"{prefix}/a", "--print-value-only") == '{"v": 1}\n'
        assert f"{session.lease:x}" in etcd.ctl("lease", "list")
        etcd.ctl("put", f"{prefix}/b", "from etcdctl")
        etcd.ctl("del", f"{prefix}/a")
        await copy.until(lambda values: values == {f"{prefix}/b": "from etcdctl"})


def test_this_process_has_no_other_client() -> None:
    assert "etcd3" not in sys.modules
