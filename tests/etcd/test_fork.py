"""Rule 7: gRPC does not survive a fork, so a forked child is told so instead of hanging."""

import os
import subprocess
import sys

import pytest

from tests.support.etcd import EtcdServer

# In a process of its own: a child of pytest would free the leftovers of other tests' channels.
PROGRAM = """
import asyncio, os, sys
from elastic_etcd.core.txn import Get
from elastic_etcd.errors import ForkedClient
from elastic_etcd.etcd.client import Client
from elastic_etcd.etcd.access import EtcdConfig
from elastic_etcd.etcd.mirror import Mirror
from elastic_etcd.etcd.session import Session


def touch(work):
    try:
        work.send(None)  # the child has no event loop of its own
    except ForkedClient as error:
        print(error, flush=True)


async def main():
    ranges = (Get("/"),)
    async with Client(EtcdConfig((sys.argv[1],))) as client, Session(client, 5) as session:
        async with Mirror(client, ranges, lambda: None):
            await client.range(*ranges)
            child = os.fork()
            if child == 0:
                touch(client.range(*ranges))
                touch(client.stream(None, "a watch").__aenter__())
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            await client.range(*ranges, timeout=5)
            assert not session.lost.done()
            print("the parent is as good as before")
    print("workers inherit", os.environ.get("GRPC_ENABLE_FORK_SUPPORT"))


asyncio.run(main())
"""


@pytest.mark.parametrize("support", [None, "1"])
def test_forked_child(etcd: EtcdServer, support: str | None) -> None:
    """With the user's own GRPC_ENABLE_FORK_SUPPORT=1, too: gRPC would hang with it."""
    extra = {} if support is None else {"GRPC_ENABLE_FORK_SUPPORT": support}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, etcd.endpoint],
        env=os.environ | extra,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    in_range, in_stream, parent, inherited = done.stdout.splitlines()
    assert inherited == f"workers inherit {support}"
    for said in (in_range, in_stream):
        assert said.startswith("the etcd client of process")
        assert "make a Client in the child" in said
    assert parent == "the parent is as good as before"
