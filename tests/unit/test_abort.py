"""Threads that wait for a frozen peer are freed, and nobody else's connections are touched."""

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.distributed import TCPStore

from elastic_etcd.train import abort
from elastic_etcd.train.abort import abort_gloo, abort_nccl, addresses_of, nccl_error, strangers
from tests.support.forked import Child

pytestmark = pytest.mark.timeout(600)

DEADLINE = 60.0


def rank(number: int, port: int, wait: str) -> list[str]:
    """Rank 1 is frozen by rank 0, which then waits for it in the way that `wait` names."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=number, world_size=2)
    later = dist.new_group([0, 1])
    ones = torch.ones(4)
    dist.all_reduce(ones)
    dist.all_reduce(ones, group=later)
    if number == 1:
        store.set("pid", str(os.getpid()))
        signal.pause()
    os.kill(int(store.get("pid")), signal.SIGSTOP)
    waits: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(ones),
        "later group": lambda: dist.all_reduce(ones, group=later),
        "key": lambda: store.wait(["never"], timedelta(seconds=100)),
        "new group": lambda: dist.new_group([0, 1]),
    }
    said = asyncio.run(serve_while(partial(be_aborted, port, waits[wait])))
    dist.destroy_process_group()
    return [*said, f"{wait} is over"]


async def serve_while(run: Callable[[], str]) -> list[str]:
    """Have what an asyncio server has: an epoll instance, a listening socket and a connection."""
    got: asyncio.Queue[bytes] = asyncio.Queue()

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.put_nowait(await reader.readline())
        writer.close()

    server = await asyncio.start_server(serve_one, "127.0.0.1", 0)
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    error = await asyncio.to_thread(run)
    writer.write(b"still here\n")
    await writer.drain()
    said = [error, (await got.get()).decode().strip()]
    server.close()
    return said


def be_aborted(port: int, wait: Callable[[], object]) -> str:
    """The name of the error by which the wait ends."""
    over = threading.Event()

    def abort_until_over() -> None:
        while not over.wait(0.05):
            abort_gloo(addresses_of("127.0.0.1", port))

    aborter = threading.Thread(target=abort_until_over)
    aborter.start()
    error = ""
    try:
        wait()
    except RuntimeError as raised:
        error = type(raised).__name__
    over.set()
    aborter.join()
    return error


@pytest.mark.usefixtures("no_garbage")
def test_what_is_not_gloo_s_is_left_alone_and_nothing_is_left_open() -> None:
    """An epoll instance is gloo's if it has a pipe and a listening socket beside connections."""
    pipe, (ours, theirs) = os.pipe(), socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server, ours, theirs, select.epoll() as epoll:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        with client, accepted:
            before = len(list(Path("/proc/self/fd").iterdir()))
            for watched in (client, ours, server):
                epoll.register(watched, select.EPOLLIN)
            abort_gloo(())
            client.sendall(b"a")
            epoll.register(pipe[0], select.EPOLLIN)
            epoll.unregister(ours)
            strange = strangers()
            abort_gloo((), strange)
            client.sendall(b"still")
            assert accepted.recv(10) == b"astill"
            abort_gloo(())
            with pytest.raises(BrokenPipeError):
                client.sendall(b"b")
            ours.sendall(b"not TCP")
            socket.create_connection(server.getsockname()).close()
            accepted.close()
            client, _ = server.accept()
            client.close()
            assert len(list(Path("/proc/self/fd").iterdir())) == before - 1
    for fd in pipe:
        os.close(fd)


@pytest.mark.parametrize("wait", ["all_reduce", "later group", "key", "new group"])
def test_a_wait_is_over(wait: str) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, frozen = (Child(rank, number, server.port, wait) for number in (0, 1))
    try:
        error, *rest = first.result(DEADLINE)
        assert error in {"RuntimeError", "DistNetworkError", "DistStoreError", "DistBackendError"}
        assert rest == ["still here", f"{wait} is over"]
        assert frozen.process.is_alive()
    finally:
        frozen.end()


def test_t14_a_store_s_server_in_the_process_is_left_alone() -> None:
    """It watches a pipe, its listening socket and its connections, too."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False)
    abort_gloo(addresses_of("127.0.0.1", server.port + 1))
    client.set("still", "here")
    assert server.get("still") == b"here"
    abort_gloo(addresses_of("localhost", server.port))
    with pytest.raises(RuntimeError):
        client.set("still", "here")


def test_t14_a_connection_to_the_same_port_elsewhere_is_left_alone() -> None:
    with socket.create_server(("127.0.0.2", 0)) as server:
        host, port = server.getsockname()
        with socket.create_connection((host, port)) as client, server.accept()[0] as accepted:
            abort_gloo(addresses_of("127.0.0.1", port))
            client.sendall(b"here")
            assert accepted.recv(10) == b"here"


class Backend:
    """Stands in for NCCL's, of which there is none without a GPU."""

    def __init__(self, *fails: bool) -> None:
        self.fails, self.did = list(fails), list[str]()

    def abort(self) -> None:
        self.did.append("abort")
        if self.fails and self.fails.pop():
            raise RuntimeError("unhandled cuda error")


class Telling(Backend):
    """One of a torch that tells what its watchdog has met."""

    error = ErrorType.SUCCESS

    def get_error(self) -> ErrorType:
        return self.error


def test_g7_an_abort_that_fails_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = Backend(True)
    monkeypatch.setattr(abort, "_nccl_backends", lambda: [backend])
    aborted: list[Backend] = []
    with pytest.raises(RuntimeError):
        abort_nccl(aborted)
    assert (backend.did, aborted) == (["abort"], [])
    abort_nccl(aborted)
    abort_nccl(aborted)
    assert (backend.did, aborted) == (["abort"] * 2, [backend])


def test_g7_communicators_are_aborted_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of one waits for the kernels of all: one by one they would wait for ever."""

    class Together(Backend):
        both = threading.Barrier(2, timeout=20)

        def abort(self) -> None:
            self.both.wait()
            super().abort()

    one, two = Together(), Together(True)
    monkeypatch.setattr(abort, "_nccl_backends", lambda: [one, two])
    aborted: list[Backend] = []
    with pytest.raises(RuntimeError, match="unhandled cuda error"):
        abort_nccl(aborted)
    assert aborted == [one]


def test_g2_what_the_watchdog_has_met_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    older, one, two = Backend(), Telling(), Telling()
    monkeypatch.setattr(abort, "_nccl_backends", lambda: [older, one, two])
    assert nccl_error() == ""
    two.error = ErrorType.TIMEOUT
    assert nccl_error() == "TIMEOUT"


def test_g7_a_backend_is_found_where_torch_debugs_collectives() -> None:
    code = """
        import torch, torch.distributed as dist
        from elastic_etcd.train.abort import unwrapped
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert not isinstance(backend, dist.ProcessGroupGloo)
        assert isinstance(unwrapped(backend), dist.ProcessGroupGloo)
        assert unwrapped(unwrapped(backend)) is unwrapped(backend)
    """
    env = os.environ | {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=env, check=True)
