"""What the package does with etcd, in a few seconds; run by the Python of each environment.

`python smoke.py HOST:PORT PREFIX [CLIENT]`: CLIENT is another etcd client's module, which is
imported first and whose messages must not get in the way.
"""

import asyncio
import importlib
import sys

import google.protobuf
import grpc
from google.protobuf import descriptor_pool
from google.protobuf.internal import api_implementation

if len(sys.argv) > 3:
    importlib.import_module(sys.argv[3])
    descriptor_pool.Default().FindMessageTypeByName("etcdserverpb.TxnRequest")  # it is there

from elastic_etcd.core.lifecycle import Action, StartWorkers, from_json, to_json
from elastic_etcd.core.schema import (
    Master,
    Page,
    Participant,
    Phase,
    Round,
    decode,
    encode,
    format_of,
)
from elastic_etcd.core.txn import Compare, Delete, Get, Put, Txn
from elastic_etcd.etcd.access import EtcdConfig
from elastic_etcd.etcd.client import Client
from elastic_etcd.etcd.mirror import Mirror
from elastic_etcd.etcd.session import Session


def values() -> None:
    """What keys hold, and what the recorder writes."""
    part = Participant(10, "n1", 2, 0, 0)
    page = Page(1, (part,))
    final = Round(1, Phase.FINAL, 10, "why", "r", "n1", 1, 2, Master("n1", 80))
    start = StartWorkers(final, part)
    assert decode(Round, encode(final)) == final
    assert decode(Page, encode(page)) == page
    assert from_json(Action, to_json(start)) == start
    assert "`$.participants[0].nproc`" in refused(encode(page).replace('"nproc": 2', '"nproc": 0'))
    assert refused("[" * 100_000) == "nested too deeply"
    assert refused("{")
    assert format_of("{") == 0


def refused(value: str) -> str:
    """Why."""
    try:
        decode(Page, value)
    except ValueError as error:
        return str(error)
    raise AssertionError("it is a round")


async def main(endpoint: str, prefix: str) -> None:
    changes = asyncio.Event()
    async with (
        Client(EtcdConfig(("127.0.0.1:1", endpoint))) as client,
        asyncio.timeout(30),
        Session(client, 5) as session,
        Mirror(client, (Get(prefix, prefix=True),), changes.set) as mirror,
    ):
        create = Txn((Compare(prefix, "create", 0),), (Put(prefix, "v", session.lease),))
        assert (await client.txn(create)).succeeded
        assert not (await client.txn(create)).succeeded
        while (snapshot := mirror.snapshot()) is None or prefix not in snapshot.kvs:
            changes.clear()
            await changes.wait()
        assert snapshot.kvs[prefix].lease == session.lease
        await client.txn(Txn((), (Delete(prefix),)))
        while prefix in (mirror.snapshot() or snapshot).kvs:
            changes.clear()
            await changes.wait()
    print(grpc.__version__, google.protobuf.__version__, api_implementation.Type())


if __name__ == "__main__":
    values()
    asyncio.run(main(*sys.argv[1:3]))
