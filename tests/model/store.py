"""etcd as the model sees it: keys, fences and leases, at one revision a time.

Revisions are counted per key, not over the store: fences only ever compare a key's own, and
so interleavings of independent writes lead to one and the same state.
"""

from dataclasses import dataclass, replace

from elastic_etcd.core.keys import Keys
from elastic_etcd.core.txn import Compare, Delete, Get, KeyValue, Put, Snapshot, Txn

KEYS = Keys("/m/j")


@dataclass(frozen=True)
class Store:
    """Sorted (key, value, mod, lease), and how often each key was ever written.

    `top` is the highest generation and `finals` every final world that was ever written:
    what the invariants need to remember.
    """

    kvs: tuple[tuple[str, str, int, int], ...] = ()
    writes: tuple[tuple[str, int], ...] = ()
    top: int = 0
    finals: tuple[tuple[int, str], ...] = ()

    def holds(self, compare: Compare) -> bool:
        match = [kv for kv in self.kvs if _covers(compare.key, compare.prefix, kv[0])]
        if not match:
            return compare.prefix or compare.value == 0
        for _, _, mod, lease in match:
            got = {"mod": mod, "create": 1, "version": mod, "lease": lease}[compare.target]
            if got != compare.value:
                return False
        return True

    def apply(self, txn: Txn) -> tuple["Store", bool]:
        """The store after `txn`, and whether its fence held."""
        if not all(self.holds(c) for c in txn.compare):
            return self, False
        kvs = {kv[0]: kv for kv in self.kvs}
        writes = dict(self.writes)
        for op in txn.then:
            if isinstance(op, Delete):
                kvs = {k: kv for k, kv in kvs.items() if not _covers(op.key, op.prefix, k)}
            elif isinstance(op, Put) and "/history/" not in op.key:
                if "/members/" not in op.key:  # a lease id is never used again
                    writes[op.key] = writes.get(op.key, 0) + 1
                kvs[op.key] = (op.key, op.value, writes.get(op.key, 1), op.lease)
        after = replace(
            self, kvs=tuple(sorted(kvs.values())), writes=tuple(sorted(writes.items()))
        )
        return after, True

    def revoke(self, lease: int) -> "Store":
        return replace(self, kvs=tuple(kv for kv in self.kvs if kv[3] != lease))

    def read(self, gets: tuple[Get, ...]) -> Snapshot:
        kvs = {
            k: KeyValue(k, v, 1, mod, lease)
            for k, v, mod, lease in self.kvs
            if any(_covers(g.key, g.prefix, k) for g in gets)
        }
        return Snapshot(0, kvs)

    def value(self, key: str) -> str | None:
        return next((v for k, v, _, _ in self.kvs if k == key), None)


def _covers(key: str, prefix: bool, other: str) -> bool:
    return other.startswith(key) if prefix else other == key
