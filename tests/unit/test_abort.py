"""Threads that wait for a frozen peer are freed, and nobody else's connections are touched."""

import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from elastic_etcd.train.abort import abort_gloo

pytestmark = pytest.mark.timeout(120)

# Rank 1 is frozen by rank 0, which then waits for it in the way that `wait` names.
RANK = """
    import asyncio, os, signal, socket, sys, threading
    import torch, torch.distributed as dist
    from datetime import timedelta
    from elastic_etcd.train.abort import abort_gloo

    rank, port, wait = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    later = dist.new_group([0, 1])
    ones = torch.ones(4)
    dist.all_reduce(ones)
    dist.all_reduce(ones, group=later)
    if rank == 1:
        store.set("pid", str(os.getpid()))
        signal.pause()
    os.kill(int(store.get("pid")), signal.SIGSTOP)

    async def serve():
        # What an asyncio server has: an epoll instance with a listening socket and a connection.
        got = asyncio.Queue()
        async def serve_one(reader, writer):
            got.put_nowait(await reader.readline())
            writer.close()
        server = await asyncio.start_server(serve_one, "127.0.0.1", 0)
        client, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        await asyncio.to_thread(be_aborted)
        writer.write(b"still here\\n")
        await writer.drain()
        print((await got.get()).decode(), end="")
        server.close()

    def be_aborted():
        waits = {
            "all_reduce": lambda: dist.all_reduce(ones),
            "later group": lambda: dist.all_reduce(ones, group=later),
            "key": lambda: store.wait(["never"], timedelta(seconds=100)),
            "new group": lambda: dist.new_group([0, 1]),
        }
        def abort_until_over():
            while not over.wait(0.05):
                abort_gloo(port)
        over = threading.Event()
        aborter = threading.Thread(target=abort_until_over)
        aborter.start()
        try:
            waits[wait]()
        except RuntimeError as error:
            print(type(error).__name__)
        over.set()
        aborter.join()

    asyncio.run(serve())
    dist.destroy_process_group()
    print(wait, "is over")
"""


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
            abort_gloo(0)
            client.sendall(b"a")
            epoll.register(pipe[0], select.EPOLLIN)
            abort_gloo(0)
            with pytest.raises(BrokenPipeError):
                client.sendall(b"b")
            assert accepted.recv(10) == b"a"
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
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(RANK), str(rank), str(server.port), wait],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    first, frozen = ranks
    pidfd = os.pidfd_open(first.pid)
    with first, frozen:
        try:
            assert select.select([pidfd], [], [], 60)[0], "it still waits"
        finally:
            os.close(pidfd)
            for rank in ranks:
                rank.kill()
        assert first.stdout is not None
        output = first.stdout.read()
    error, *rest = output.splitlines()
    assert error in {"RuntimeError", "DistNetworkError", "DistStoreError", "DistBackendError"}
    assert rest == ["still here", f"{wait} is over"]
    assert frozen.returncode == -signal.SIGKILL
