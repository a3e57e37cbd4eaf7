"""Txn, Get and KeyValue as etcd's messages and back: the only module that knows both."""

from collections.abc import Sequence

from elastic_etcd.core.txn import Compare, Delete, Get, KeyValue, Put, Txn
from elastic_etcd.errors import EtcdRefused
from elastic_etcd.etcd.faults import TooLarge
from elastic_etcd.etcd.pb import elastic_etcd_rpc_pb2 as pb

MAX_OPERATIONS = 128  # etcd's --max-txn-ops: for compares, for `then` and for `otherwise`


def encode(text: str) -> bytes:
    """A key or value as bytes in UTF-8; what `decode` read of other bytes comes out unchanged."""
    return text.encode("utf-8", "surrogateescape")


def decode(data: bytes) -> str:
    """The inverse of `encode`."""
    return data.decode("utf-8", "surrogateescape")


def range_end(key: str, prefix: bool) -> bytes:
    """The end of the range of all keys that start with `key`; empty for the key alone."""
    if not prefix:
        return b""
    stem = encode(key).rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else b"\0"


def txn_request(txn: Txn) -> pb.TxnRequest:
    """The request of `txn`. Raises EtcdRefused for too many operations or a key written twice."""
    check_size(max(len(txn.compare), len(txn.then), len(txn.otherwise)))
    _no_key_twice(txn.then)
    return pb.TxnRequest(
        compare=[_compare(compare) for compare in txn.compare],
        success=[_operation(operation) for operation in txn.then],
        failure=[_operation(operation) for operation in txn.otherwise],
    )


def check_size(operations: int) -> None:
    """Raises TooLarge for more operations than one Txn can hold."""
    if operations > MAX_OPERATIONS:
        raise TooLarge(
            f"a Txn of {operations} operations: etcd takes at most {MAX_OPERATIONS}; split it"
        )


def range_request(get: Get, *, limit: int = 0, values: bool = True) -> pb.RangeRequest:
    """A linearizable read of `get`, of at most `limit` keys (0: all) where it says nothing."""
    return pb.RangeRequest(
        key=encode(get.key),
        range_end=range_end(get.key, get.prefix),
        limit=get.limit or limit,
        keys_only=not values,
    )


def key_value(kv: pb.KeyValue) -> KeyValue:
    """A key with its value, as read."""
    return KeyValue(decode(kv.key), decode(kv.value), kv.create_revision, kv.mod_revision, kv.lease)


def key_values(response: pb.RangeResponse) -> dict[str, KeyValue]:
    """The answer of one Range, by key."""
    return {kv.key: kv for kv in map(key_value, response.kvs)}


def gets(response: pb.TxnResponse) -> tuple[tuple[KeyValue, ...], ...]:
    """The answers of the Gets of the branch that ran, in order."""
    return tuple(
        tuple(key_value(kv) for kv in answer.range.kvs)
        for answer in response.responses
        if answer.HasField("range")
    )


def _no_key_twice(operations: Sequence[Put | Delete | Get]) -> None:
    """Raise for a key that is put twice, or put and deleted: etcd refuses both."""
    puts = [operation.key for operation in operations if isinstance(operation, Put)]
    twice = {key for key in puts if puts.count(key) > 1} if len(set(puts)) < len(puts) else set()
    for operation in operations:
        if isinstance(operation, Delete):
            match = str.startswith if operation.prefix else str.__eq__
            twice |= {key for key in puts if match(key, operation.key)}
    if twice:
        raise EtcdRefused(f"a Txn writes {', '.join(sorted(twice))} twice: write each key once")


def _compare(compare: Compare) -> pb.Compare:
    key, end = encode(compare.key), range_end(compare.key, compare.prefix)
    value = compare.value
    match compare.target:
        case "create":
            return pb.Compare(
                key=key, range_end=end, target=pb.Compare.CREATE, create_revision=value
            )
        case "mod":
            return pb.Compare(key=key, range_end=end, target=pb.Compare.MOD, mod_revision=value)
        case "version":
            return pb.Compare(key=key, range_end=end, target=pb.Compare.VERSION, version=value)
        case "lease":
            return pb.Compare(key=key, range_end=end, target=pb.Compare.LEASE, lease=value)


def _operation(operation: Put | Delete | Get) -> pb.RequestOp:
    match operation:
        case Put():
            return pb.RequestOp(
                put=pb.PutRequest(
                    key=encode(operation.key),
                    value=encode(operation.value),
                    lease=operation.lease,
                )
            )
        case Delete():
            return pb.RequestOp(
                delete=pb.DeleteRequest(
                    key=encode(operation.key),
                    range_end=range_end(operation.key, operation.prefix),
                )
            )
        case Get():
            return pb.RequestOp(range=range_request(operation))
