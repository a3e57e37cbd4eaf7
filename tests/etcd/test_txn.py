"""Txn and Range against a real etcd: what is sent is what is meant."""

import asyncio
from functools import partial
from typing import Any

import pytest

from elastic_etcd.core.txn import Compare, Delete, Get, Put, Txn
from elastic_etcd.errors import EtcdRefused
from elastic_etcd.etcd import _grpc
from elastic_etcd.etcd import client as client_module
from elastic_etcd.etcd.client import Client
from elastic_etcd.etcd.faults import TooLarge
from tests.support.aio import asynchronous, put
from tests.support.etcd import EtcdServer


@asynchronous
async def test_put_get_delete(etcd: EtcdServer, prefix: str) -> None:
    async with Client(etcd.config) as client:
        lease = await client.grant(60)
        key = f"{prefix}/ключ"
        first = await client.txn(Txn((), (Put(key, "значение 🎉", lease.id),)))
        assert first.succeeded
        assert not first.ambiguous
        snapshot = await client.range(Get(key))
        kv = snapshot.kvs[key]
        assert (kv.value, kv.create, kv.mod, kv.lease) == (
            "значение 🎉",
            first.revision,
            first.revision,
            lease.id,
        )
        assert etcd.ctl("get", key, "--print-value-only") == "значение 🎉\n"
        await client.txn(Txn((), (Delete(prefix, prefix=True),)))
        assert (await client.range(Get(prefix, prefix=True))).kvs == {}


@asynchronous
async def test_every_compare(etcd: EtcdServer, prefix: str) -> None:
    async with Client(etcd.config) as client:
        key = f"{prefix}/a"
        created = await put(client, key, "1")
        changed = await put(client, key, "2")

        async def holds(*compare: Compare) -> bool:
            return (await client.txn(Txn(compare, ()))).succeeded

        for target, right in (("create", created), ("mod", changed), ("version", 2)):
            assert await holds(Compare(key, target, right))  # type: ignore[arg-type]
            assert not await holds(Compare(key, target, right + 1))  # type: ignore[arg-type]
        assert await holds(Compare(f"{prefix}/none", "create", 0))
        await put(client, f"{prefix}/b", "1")
        assert not await holds(Compare(f"{prefix}/", "version", 2, prefix=True))
        await put(client, f"{prefix}/b", "2")
        assert await holds(Compare(f"{prefix}/", "version", 2, prefix=True))


@asynchronous
async def test_gets_of_the_branch_that_ran(etcd: EtcdServer, prefix: str) -> None:
    async with Client(etcd.config) as client:
        a, b = f"{prefix}/a", f"{prefix}/b"
        await put(client, b, "2")
        txn = Txn(
            (Compare(a, "create", 0),),
            (Put(a, "1"), Get(a), Delete(b), Get(prefix, prefix=True)),
            (Get(b), Get(a)),
        )
        done = await client.txn(txn)
        assert [[kv.value for kv in kvs] for kvs in done.gets] == [["1"], ["1"]]
        refused = await client.txn(txn)
        assert not refused.succeeded
        assert [[kv.value for kv in kvs] for kvs in refused.gets] == [[], ["1"]]


@asynchronous
async def test_128_operations_and_no_more(etcd: EtcdServer, prefix: str) -> None:
    def puts(count: int) -> Txn:
        return Txn((), tuple(Put(f"{prefix}/{i}", "") for i in range(count)))

    async with Client(etcd.config) as client:
        assert (await client.txn(puts(128))).succeeded
        with pytest.raises(EtcdRefused, match="Raise its --max-request-bytes and --max-txn-ops"):
            await client.txn(puts(129))
        with pytest.raises(EtcdRefused, match="--max-txn-ops"):
            await client.txn(Txn(tuple(Compare(str(i), "mod", 0) for i in range(129)), ()))
        with pytest.raises(EtcdRefused, match="--max-txn-ops"):
            await client.range(*(Get(str(i)) for i in range(129)))


@pytest.mark.parametrize(
    "operations",
    [
        (Put("/k", "1"), Put("/k", "2")),
        (Put("/k", "1"), Delete("/k")),
        (Delete("/", prefix=True), Put("/k", "")),
    ],
)
@asynchronous
async def test_no_key_twice(etcd: EtcdServer, operations: tuple[Put | Delete, ...]) -> None:
    async with Client(etcd.config) as client:
        with pytest.raises(EtcdRefused, match="duplicate key"):
            await client.txn(Txn((), operations))


@asynchronous
async def test_refusals_name_the_key(etcd: EtcdServer, prefix: str) -> None:
    async with Client(etcd.config) as client:
        with pytest.raises(EtcdRefused, match=f"take {prefix} in.*request is too large"):
            await put(client, prefix, "x" * 2_000_000)
        with pytest.raises(
            EtcdRefused, match=f"{etcd.endpoint} refused {prefix}: .*lease not found"
        ):
            await put(client, prefix, "", lease=4711)


@asynchronous
async def test_pages_are_of_one_revision(
    etcd: EtcdServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "PAGE", 10)
    async with Client(etcd.config) as client:
        for start in range(0, 200, 100):
            puts = tuple(Put(f"{prefix}/{i:03}", "0") for i in range(start, start + 100))
            await client.txn(Txn((), puts))

        async def rewrite(value: int) -> None:
            both = Put(f"{prefix}/000", str(value)), Put(f"{prefix}/199", str(value))
            await client.txn(Txn((), both))

        for value in range(20):
            writer = asyncio.create_task(rewrite(value))
            kvs = (await client.range(Get(f"{prefix}/", prefix=True))).kvs
            await writer
            assert len(kvs) == 200
            assert kvs[f"{prefix}/000"].value == kvs[f"{prefix}/199"].value


@asynchronous
async def test_compacted_between_two_pages(
    own_etcd: EtcdServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_etcd.start()
    monkeypatch.setattr(client_module, "PAGE", 2)
    compacted = 0

    class Compacting(Client):
        """Compacts after the first page, as another client's maintenance may."""

        async def call(self, rpc: Any, request: Any, what: str, deadline: float) -> Any:
            nonlocal compacted
            if rpc is _grpc.RANGE and not compacted:
                compacted = await put(client, f"{prefix}/e", "new")
                own_etcd.ctl("compact", str(compacted))
            return await super().call(rpc, request, what, deadline)

    async with Compacting(own_etcd.config) as client:
        for name in "abcde":
            await put(client, f"{prefix}/{name}", "old")
        snapshot = await client.range(Get(f"{prefix}/", prefix=True))
        assert snapshot.revision == compacted
        assert [kv.value for kv in snapshot.kvs.values()] == ["old"] * 4 + ["new"]


@asynchronous
async def test_an_answer_larger_than_grpc_s_limit(etcd: EtcdServer, prefix: str) -> None:
    async with Client(etcd.config) as client:
        for i in range(6):
            await put(client, f"{prefix}/{i}", "x" * 1_000_000)
        kvs = (await client.range(Get(prefix, prefix=True))).kvs
        assert sum(len(kv.value) for kv in kvs.values()) == 6_000_000  # gRPC's default is 4 MiB
        await client.txn(Txn((), (Delete(prefix, prefix=True),)))


@asynchronous
async def test_leases(etcd: EtcdServer, prefix: str) -> None:
    async with Client(etcd.config) as client:
        lease = await client.grant(30)
        assert lease.ttl == 30
        await put(client, prefix, "", lease.id)
        await client.revoke(lease.id)
        assert (await client.range(Get(prefix))).kvs == {}
        await client.revoke(lease.id)  # gone is gone


@asynchronous
async def test_a_txn_that_is_too_large_is_not_tried_again(etcd: EtcdServer, prefix: str) -> None:
    """Also by one who waits out what etcd refuses: it would wait for ever."""
    large = Txn((), (Put(prefix, "x" * (2 << 20)),))
    longer = Txn((), (Put(prefix, "x" * (4 << 20)),))  # which gRPC does not let through
    async with Client(etcd.config) as client:
        client.refusals.succeeded()
        for txn in (large, longer):
            async with asyncio.timeout(20):
                with pytest.raises(TooLarge) as error:
                    await client.refusals.wait_out(partial(client.txn, txn))
            assert f"etcd at {etcd.endpoint} can't take {txn.then[0].key}" in str(error.value)
            assert "--max-request-bytes" in str(error.value)
        await put(client, prefix)
