"""The key space of the scenarios behaves as a real etcd does, Txn by Txn."""

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from elastic_etcd.core.txn import Compare, Delete, Get, KeyValue, Put, Snapshot, Txn
from elastic_etcd.etcd.client import Client
from tests.support.aio import asynchronous
from tests.support.etcd import EtcdServer
from tests.support.keyspace import KeySpace

NAMES = ("a", "b/", "b/1", "b/2")
LEASES = (1, 2)  # by number; the real ids are etcd's

names = st.sampled_from(NAMES)
prefixed = st.tuples(names, st.booleans())
puts = st.builds(Put, names, st.text("xy", max_size=1), st.sampled_from((0, *LEASES)))
deletes = prefixed.map(lambda p: Delete(*p))
compares = st.builds(
    Compare,
    names,
    st.sampled_from(["create", "mod", "version"]),
    st.integers(0, 4),
    st.booleans(),
)
revokes = st.sampled_from(LEASES)
txns = st.builds(
    lambda compare, then: Txn(tuple(compare), tuple(then)),
    st.lists(compares, max_size=2),
    # etcd refuses a Txn that changes a key twice.
    st.lists(puts, max_size=2, unique_by=lambda put: put.key) | deletes.map(lambda d: [d]),
)


def at(prefix: str, txn: Txn, base: int, leases: Sequence[int]) -> Txn:
    """`txn` with real keys, revisions that count from `base`, and real leases."""

    def compare(c: Compare) -> Compare:
        value = c.value
        if c.target in ("create", "mod") and value:
            value += base
        return replace(c, key=prefix + c.key, value=value)

    def operation(o: Put | Delete | Get) -> Put | Delete | Get:
        if isinstance(o, Put) and o.lease:
            return replace(o, key=prefix + o.key, lease=leases[o.lease - 1])
        return replace(o, key=prefix + o.key)

    return Txn(tuple(map(compare, txn.compare)), tuple(map(operation, txn.then)))


def plain(snapshot: Snapshot) -> dict[str, KeyValue]:
    return dict(snapshot.kvs)


@pytest.fixture
def alone(own_etcd: EtcdServer) -> EtcdServer:
    """An etcd of its own: revisions count, and a lease of an earlier test may end at any time."""
    own_etcd.start()
    return own_etcd


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=st.lists(txns | revokes, max_size=8))
def test_agreement(alone: EtcdServer, prefix: str, steps: list[Txn | int]) -> None:
    asynchronous(agree)(alone, f"{prefix}/", steps)


async def agree(etcd: EtcdServer, prefix: str, steps: list[Txn | int]) -> None:
    async with Client(etcd.config) as client:
        await client.txn(Txn((), (Delete(prefix, prefix=True),)), timeout=10)
        leases = [(await client.grant(60, timeout=10)).id for _ in LEASES]
        base = (await client.range(Get(prefix), timeout=10)).revision
        space = KeySpace(revision=base)
        for step in steps:
            if isinstance(step, int):
                await client.revoke(leases[step - 1], timeout=10)
                space.revoke(leases[step - 1])
                leases[step - 1] = (await client.grant(60, timeout=10)).id
            else:
                txn = at(prefix, step, base, leases)
                assert (await client.txn(txn, timeout=10)).succeeded == space.txn(txn)
            for limit in (0, 1):
                get = Get(prefix, prefix=True, limit=limit)
                real = await client.range(get, timeout=10)
                assert plain(real) == plain(space.read(get))
            assert real.revision == space.revision
        for lease in leases:
            await client.revoke(lease, timeout=10)
