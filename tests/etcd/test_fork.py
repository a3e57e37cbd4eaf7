"""Rule 7: gRPC does not survive a fork, so a forked child is told so instead of hanging."""

import os

import pytest

from elastic_etcd.core.txn import Get
from elastic_etcd.errors import ForkedClient
from elastic_etcd.etcd.client import Client
from elastic_etcd.etcd.session import Session
from tests.etcd.aio import Copy, asynchronous
from tests.etcd.server import EtcdServer


def in_child(client: Client) -> str:
    """What the forked child says; it does not return to pytest."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = "nothing was raised"
        try:
            client.range(Get("/")).send(None)  # the child has no event loop of its own
        except ForkedClient as error:
            said = f"ForkedClient: {error}"
        finally:
            os.write(writer, said.encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@asynchronous
async def test_forked_child(etcd: EtcdServer, prefix: str) -> None:
    async with (
        Client(etcd.config) as client,
        Session(client, 5) as session,
        Copy(client, Get(prefix)) as copy,
    ):
        await copy.until(lambda _: True)
        said = in_child(client)
        assert said.startswith("ForkedClient: the etcd client of process")
        assert "make a Client in the child" in said
        await client.range(Get("/"), timeout=5)  # the parent's is as good as before
        assert not session.lost.done()
