"""The store server with real torch processes."""

import asyncio
import errno
import logging
import os
import re
import select
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from elastic_etcd.agent import store
from elastic_etcd.agent.inbox import Tasks
from elastic_etcd.agent.prefork import Prefork
from elastic_etcd.agent.store import StoreServer, bind
from elastic_etcd.children import guardian_process
from elastic_etcd.system.processes import open_pidfd
from tests.support.forked import Child

CHILDREN = Path(guardian_process.__file__).parent
# Processes that import torch while other things run on a small machine.
DEADLINE = 50.0


def summed(rank: int, port: int) -> float:
    """As a worker of two, which finds a store that nobody has used."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    assert dist.distributed_c10d._get_default_store().add("seen", 1) <= 2, "a used store"
    dist.destroy_process_group()
    return float(value)


def added(port: int) -> int:
    return int(TCPStore("127.0.0.1", port, is_master=False).add("n", 5))


class Server(logging.Handler):
    """A store server, and what it writes into the log."""

    def __init__(self, tasks: Tasks, prefork: Prefork | None = None) -> None:
        super().__init__(logging.WARNING)
        self.store = StoreServer(tasks, prefork)
        self.deaths: list[str] = []
        self._said = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.deaths.append(record.getMessage())
        self._said.set()

    async def died(self) -> str:
        """Its first words about an end."""
        async with asyncio.timeout(DEADLINE):
            await self._said.wait()
        assert self.deaths[0].startswith("nobody answers at the master endpoint any more: ")
        return self.deaths[0]

    async def pid(self) -> int:
        """Of the child, once it is started."""
        assert self.store._child is not None
        async with asyncio.timeout(DEADLINE):
            while self.store._child._process is None:  # noqa: ASYNC110 - turns of the loop
                await asyncio.sleep(0)
        return self.store._child._process.pid


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    log = logging.getLogger("elastic_etcd.agent.store")
    async with Tasks() as tasks:
        server = Server(tasks)
        log.addHandler(server)
        yield server
        log.removeHandler(server)
        server.store.close()


async def results(*children: Child) -> list[Any]:
    return [await asyncio.to_thread(child.result, DEADLINE) for child in children]


def is_refused(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) != 0


async def test_two_generations_have_a_store_each_from_one_child(server: Server) -> None:
    ports: list[int] = []
    pids: set[int] = set()
    for generation in (1, 2):
        sock, port = bind("127.0.0.1")
        ports.append(port)
        workers = [Child(summed, rank, port) for rank in (0, 1)]
        server.store.serve(generation, sock)
        assert sock.fileno() == -1, "the agent kept the socket, so the port could never close"
        pids.add(await server.pid())
        assert await results(*workers) == [2.0] * 2
    assert len(pids) == 1
    assert is_refused(ports[0])
    assert not is_refused(ports[1])
    assert server.deaths == []
    server.store.close()
    assert is_refused(ports[1])


async def test_a_client_that_comes_before_the_child_waits_for_it(server: Server) -> None:
    sock, port = bind("127.0.0.1")
    client = Child(added, port)
    await connected(port)
    server.store.serve(1, sock)
    assert await results(client) == [5]


async def connected(port: int) -> None:
    """Until a connection to the port is in the kernel's queue."""
    wanted = f":{port:04X} "
    async with asyncio.timeout(DEADLINE):
        while True:
            rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
            if any(f"{row[1]} ".endswith(wanted) and row[3] == "01" for row in rows):
                return
            await asyncio.sleep(0)


async def test_the_end_of_the_child_is_told_with_its_last_words(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.99: no such file')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sock, _ = bind("127.0.0.1")
    server.store.serve(1, sock)
    text = await server.died()
    assert server.deaths == [text]
    assert "exited 1: torch cannot be imported by" in text
    assert text.endswith("libcudart.so.99: no such file")


async def test_f5_a_scheduler_s_signal_to_all_of_a_node_does_not_end_it(server: Server) -> None:
    """Also USR1, by which Slurm warns before the time limit, while workers save."""
    sock, port = bind("127.0.0.1")
    server.store.serve(1, sock)
    assert await results(Child(added, port)) == [5]
    pid = await server.pid()
    for number in guardian_process.IGNORED:
        os.kill(pid, number)
    assert await results(Child(added, port)) == [10]
    assert server.deaths == []


def test_f5_our_children_ignore_the_same_signals() -> None:
    """Each has a list of its own: they run without this package."""
    for program in ("forkserver.py", "store_server.py"):
        text = (CHILDREN / program).read_text()
        (found,) = re.findall(r"(?m)^IGNORED = \((.*?)^\)", text, re.DOTALL)
        listed = [getattr(signal, name) for name in re.findall(r"signal\.(\w+)", found)]
        assert listed == list(guardian_process.IGNORED)


async def test_a_killed_child_is_told_and_another_one_can_be_started(server: Server) -> None:
    server.store.serve(1, bind("127.0.0.1")[0])
    first = await server.pid()
    os.kill(first, signal.SIGKILL)
    assert "was killed by SIGKILL" in await server.died()
    server.store.serve(2, bind("127.0.0.1")[0])
    assert await server.pid() != first
    server.store.close()
    server.store.close()
    assert len(server.deaths) == 1


@pytest.mark.nightly(part="jobs")
async def test_it_is_started_though_the_fork_server_has_just_died(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    argv = (sys.executable, "-u", str(tmp_path / "train.py"))
    prefork = Prefork(argv, os.environ, (), 1, asyncio.create_task)
    prefork.start()
    await prefork.imported()
    assert prefork.pid
    kill_and_wait(prefork.pid, *[each.pid for each in prefork._waiting if each.pid])
    assert prefork.ready, "this loop has not turned since"
    async with Tasks() as tasks:
        server = Server(tasks, prefork)
        sock, port = bind("127.0.0.1")
        server.store.serve(1, sock)
        await asyncio.get_running_loop().run_in_executor(None, ping, port)
        server.store.close()
    prefork.close()


def kill_and_wait(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


async def test_a_file_in_the_working_directory_is_not_taken_for_a_module(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('the wrong torch')\n")
    monkeypatch.chdir(tmp_path)
    sock, port = bind("127.0.0.1")
    server.store.serve(1, sock)
    sock, newer = bind("127.0.0.1")
    server.store.serve(2, sock)
    await asyncio.get_running_loop().run_in_executor(None, ping, newer)
    assert is_refused(port)
    assert server.deaths == []


def ping(port: int) -> None:
    TCPStore("127.0.0.1", port, is_master=False)


async def test_a_child_that_cannot_be_started_is_told(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    sock, _ = bind("127.0.0.1")
    server.store.serve(1, sock)
    assert sock.fileno() == -1
    assert "can't be started: No such file" in await server.died()


async def test_a_child_for_which_no_descriptor_is_left_leaves_none_open(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left() -> tuple[int, int]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before = len([*Path("/proc/self/fd").iterdir()])
    for lacking in ((os, "pipe"), (store, "channel_pair")):
        sock, _ = bind("127.0.0.1")
        with monkeypatch.context() as patched:
            patched.setattr(*lacking, none_left)
            server.store.serve(1, sock)
    assert "can't be started: Too many open files" in await server.died()
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_the_child_dies_with_a_killed_agent() -> None:
    agent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent("""
                import asyncio
                from elastic_etcd.agent.inbox import Tasks
                from elastic_etcd.agent.store import StoreServer, bind

                async def main() -> None:
                    async with Tasks() as tasks:
                        server = StoreServer(tasks)
                        sock, port = bind("127.0.0.1")
                        server.serve(1, sock)
                        while server._child._process is None:
                            await asyncio.sleep(0)
                        print(server._child._process.pid, flush=True)
                        await asyncio.Event().wait()

                asyncio.run(main())
            """),
        ],
        stdout=subprocess.PIPE,
    )
    with agent:
        assert agent.stdout is not None
        pidfd = open_pidfd(int(agent.stdout.readline()))
        agent.kill()
    assert select.select([pidfd], [], [], DEADLINE)[0]
    os.close(pidfd)


def test_an_address_of_another_machine_or_a_name_means_all_interfaces() -> None:
    for address in ("192.0.2.1", "name.invalid"):
        sock, port = bind(address)
        with sock, socket.create_connection(("127.0.0.1", port)):
            assert sock.getsockname()[0] in {"::", "0.0.0.0"}
    sock, port = bind("127.0.0.1")
    with sock:
        assert sock.getsockname() == ("127.0.0.1", port)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_an_ipv6_address() -> None:
    sock, port = bind("::1")
    with sock, socket.create_connection(("::1", port)):
        pass
    sock, port = bind("::ffff:127.0.0.1")  # an IPv4 address of this machine, written so
    with sock, socket.create_connection(("127.0.0.1", port)):
        pass
