"""etcd as the model sees it: keys, fences and leases, at one revision a time.

A key's mod revision is a number for its value: fences compare revisions for equality only,
and no value that a fence looks at is ever written twice (checked by I1). So all ways that
lead to the same keys are one state.
"""

from typing import NamedTuple

from elastic_etcd.core.schema import Keys, Participant
from elastic_etcd.core.txn import Compare, Delete, Get, KeyValue, Put, Snapshot, Txn

KEYS = Keys("/m/j")
NEWER = '{"v": 3}'  # an outcome that an agent of a newer version writes
EARLY = "ImportError: no numpy"  # what a worker has said

_revisions: dict[str, int] = {}


def _revision(value: str) -> int:
    return _revisions.setdefault(value, len(_revisions) + 1)


class Store(NamedTuple):
    """Sorted (key, value, lease), and what is to be remembered of keys that are gone.

    `top` is the highest generation and `final` the newest final round that was ever
    written, with each of its participants.
    `lost` is whose round went with its coordinator's lease, and in which phase, until the next
    claim. `hung` are the leases of agents that do nothing any more. `back` are those whose key was
    put back into the world of now: somebody may have decided that they are gone. `again` are those
    whose key was put back at any time, with another create revision. `backup` is what etcd held
    when somebody saved it; `restored` is whether etcd has gone back to that.
    """

    kvs: tuple[tuple[str, str, int], ...] = ()
    top: int = 0
    final: tuple[int, tuple[tuple[str, Participant], ...]] = (0, ())
    lost: tuple[int, str] | None = None
    hung: tuple[int, ...] = ()
    back: tuple[int, ...] = ()
    again: tuple[int, ...] = ()
    backup: "Store | None" = None
    restored: bool = False

    def holds(self, compare: Compare) -> bool:
        match = [kv for kv in self.kvs if _covers(compare.key, compare.prefix, kv[0])]
        if not match:
            return compare.value == 0
        for _, value, lease in match:
            revision, create = _revision(value), 2 if lease in self.again else 1
            got = {"mod": revision, "create": create, "version": revision}
            if got[compare.target] != compare.value:
                return False
        return True

    def apply(self, txn: Txn) -> tuple["Store", bool]:
        """The store after `txn`, and whether its fence held."""
        if not all(self.holds(c) for c in txn.compare):
            return self, False
        kvs = {kv[0]: kv for kv in self.kvs}
        for op in txn.then:
            if isinstance(op, Delete):
                kvs = {k: kv for k, kv in kvs.items() if not _covers(op.key, op.prefix, k)}
            elif isinstance(op, Put) and "/history/" not in op.key:
                kvs[op.key] = (op.key, op.value, op.lease)
        return self._replace(kvs=tuple(sorted(kvs.values()))), True

    def revoke(self, lease: int) -> "Store":
        return self._replace(kvs=tuple(kv for kv in self.kvs if kv[2] != lease))

    def read(self, gets: tuple[Get, ...]) -> Snapshot:
        kvs = {
            k: KeyValue(k, v, 1, 1 if "/reports/" in k else _revision(v), lease)
            for k, v, lease in self.kvs
            if any(_covers(g.key, g.prefix, k) for g in gets)
        }
        return Snapshot(0, kvs)

    def value(self, key: str) -> str | None:
        return next((v for k, v, _ in self.kvs if k == key), None)


def _covers(key: str, prefix: bool, other: str) -> bool:
    return other.startswith(key) if prefix else other == key
