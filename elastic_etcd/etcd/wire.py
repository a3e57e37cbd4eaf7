"""Txn, Get and KeyValue as etcd's messages and back: the only module that knows both."""

from elastic_etcd.core.txn import Compare, Delete, Get, KeyValue, Put, Txn
from elastic_etcd.etcd.pb import elastic_etcd_rpc_pb2 as pb


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
    """The request of `txn`."""
    return pb.TxnRequest(
        compare=[_compare(compare) for compare in txn.compare],
        success=[_operation(operation) for operation in txn.then],
        failure=[_operation(operation) for operation in txn.otherwise],
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
