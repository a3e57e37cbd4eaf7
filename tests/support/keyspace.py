"""etcd's key space as a value in memory: Txns, revisions and leases, nothing else.

It stands in for etcd where only the rules are played; tests/etcd/test_keyspace_agreement.py
holds it against a real server.
"""

from dataclasses import dataclass, field

from msgspec import structs

from elastic_etcd.core.txn import Compare, Delete, Get, KeyValue, Put, Snapshot, Txn


@dataclass
class KeySpace:
    """Changed by `txn` and `revoke`, each at one revision."""

    revision: int = 1
    kvs: dict[str, KeyValue] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)

    def txn(self, txn: Txn) -> bool:
        """Do `txn`; whether its comparisons held."""
        if not all(self._holds(compare) for compare in txn.compare):
            return False
        before, revision = dict(self.kvs), self.revision + 1
        for operation in txn.then:
            if isinstance(operation, Put):
                self._put(operation, revision)
            elif isinstance(operation, Delete):
                self._remove([k for k in self.kvs if _covers(operation, k)])
        if self.kvs != before:
            self.revision = revision
        return True

    def revoke(self, lease: int) -> None:
        """End a lease and delete its keys."""
        ended = [key for key, kv in self.kvs.items() if kv.lease == lease]
        if ended:
            self.revision += 1
            self._remove(ended)

    def read(self, *gets: Get) -> Snapshot:
        """What `gets` cover, as it stands now."""
        kvs: dict[str, KeyValue] = {}
        for get in gets:
            keys = sorted(k for k in self.kvs if _covers(get, k)) if get.prefix else [get.key]
            found = [(k, self.kvs[k]) for k in keys if k in self.kvs]
            kvs |= found[: get.limit or len(found)]
        return Snapshot(self.revision, kvs)

    def _holds(self, compare: Compare) -> bool:
        keys = [k for k in self.kvs if _covers(compare, k)]
        # Of a range without keys etcd compares an empty key, all of whose numbers are 0.
        numbers = [self._number(key, compare.target) for key in keys] or [0]
        return all(number == compare.value for number in numbers)

    def _number(self, key: str, target: str) -> int:
        if target == "version":
            return self.versions[key]
        return int(getattr(self.kvs[key], target))

    def _put(self, put: Put, revision: int) -> None:
        old = self.kvs.get(put.key)
        new = KeyValue(put.key, put.value, revision, revision, put.lease)
        self.kvs[put.key] = structs.replace(new, create=old.create) if old else new
        self.versions[put.key] = self.versions.get(put.key, 0) + 1

    def _remove(self, keys: list[str]) -> None:
        for key in keys:
            del self.kvs[key]
            del self.versions[key]


def _covers(what: Get | Delete | Compare, key: str) -> bool:
    return key.startswith(what.key) if what.prefix else key == what.key
