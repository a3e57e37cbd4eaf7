"""A Txn as plain data: what the client sends to etcd and what the model checker applies.

Rules and agent describe writes with these types, so that the model explores the very
Txns that run in production (https://etcd.io/docs/v3.5/learning/api/#transaction).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from msgspec import Struct


@dataclass(frozen=True, slots=True)
class Compare:
    """`target` of `key` equals `value`; with `prefix`, of every key that starts with `key`."""

    key: str
    target: Literal["create", "mod", "version", "lease"]
    value: int
    prefix: bool = False


@dataclass(frozen=True, slots=True)
class Put:
    """Write `value`; the key is bound to `lease` (0: to none)."""

    key: str
    value: str
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove `key`, or every key that starts with it."""

    key: str
    prefix: bool = False


@dataclass(frozen=True, slots=True)
class Get:
    """Read `key`, or every key that starts with it, of these at most `limit` (0: all)."""

    key: str
    prefix: bool = False
    limit: int = 0


@dataclass(frozen=True, slots=True)
class Txn:
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
