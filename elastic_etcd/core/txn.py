"""A Txn as plain data, which the client sends to etcd and the model checker applies.

Rules and followers describe writes with these types, so that the model explores the very Txns that
run in production, and the flight recorder writes them down
(https://etcd.io/docs/v3.5/learning/api/#transaction).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from msgspec import Struct


class Compare(Struct, frozen=True):
    """`target` of `key` equals `value`; with `prefix`, of every key that starts with `key`."""

    key: str
    target: Literal["create", "mod", "version"]
    value: int
    prefix: bool = False


class Put(Struct, frozen=True, tag=True):
    """Write `value`; the key is bound to `lease` (0: to none)."""

    key: str
    value: str
    lease: int = 0


class Delete(Struct, frozen=True, tag=True):
    """Remove `key`, or every key that starts with it."""

    key: str
    prefix: bool = False


class Get(Struct, frozen=True, tag=True):
    """Read `key`, or every key that starts with it, of these at most `limit` (0: all)."""

    key: str
    prefix: bool = False
    limit: int = 0


class Txn(Struct, frozen=True):
    """If all of `compare` hold, do `then`, else `otherwise`, at one revision."""

    compare: tuple[Compare, ...]
    then: tuple[Put | Delete | Get, ...]
    otherwise: tuple[Get, ...] = ()


class KeyValue(Struct, frozen=True, gc=False):
    """A key with its create revision, mod revision and lease id (0: none).

    A Struct for its hash: a view of ten thousand nodes looks up as many, see view.py.
    """

    key: str
    value: str
    create: int
    mod: int
    lease: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Keys as they stood at one etcd revision."""

    revision: int
    kvs: Mapping[str, KeyValue]
