"""What can be known of a job's nodes only while somebody looks: their paces, and their leases."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Never

from elastic_etcd.cli import control
from elastic_etcd.core.schema import Pace, Watched, decode, encode
from elastic_etcd.core.txn import Put, Txn
from elastic_etcd.errors import EtcdDenied, EtcdError
from elastic_etcd.etcd.retry import now
from elastic_etcd.etcd.session import Session
from elastic_etcd.times import LOOK_ASK, LOOK_PERIOD, LOOK_TTL

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elastic_etcd.core.schema import Keys
    from elastic_etcd.core.txn import Snapshot
    from elastic_etcd.core.view import View
    from elastic_etcd.etcd.client import Client, TimeToLive

_ASKED = 8  # at a time


class Looker:
    """Tells the job that somebody looks, under a lease of its own."""

    def __init__(self, client: Client, keys: Keys, timeout: float) -> None:
        self.told = False
        self.refused = ""
        self._trouble = ""
        self._client, self._keys, self._timeout = client, keys, timeout
        self._session: Session | None = None
        self._scope = AsyncExitStack()

    async def look(self, seen: Snapshot) -> None:
        """Say so, if nobody does."""
        if self._keys.watched in seen.kvs:
            self.told, self.refused = True, ""
            return
        if self.refused:
            return
        try:
            if self._session is None or self._session.lost.done():
                session = Session(self._client, LOOK_TTL, timeout=self._timeout)
                self._session = await self._scope.enter_async_context(session)
            value = encode(Watched(LOOK_PERIOD, by=control.user()))
            put = Put(self._keys.watched, value, self._session.lease)
            await self._client.txn(Txn((), (put,)), self._timeout)
            self.told = True
        except EtcdDenied as error:
            self.refused = f"steps are not shown: {error}"
        except EtcdError as error:
            self._trouble = f"etcd: {error}"
        else:
            self._trouble = ""

    @property
    def note(self) -> str:
        """What whoever looks had better know."""
        since = self._session.silent_since if self._session else None
        if since is not None:
            return f"no answer from etcd for {now() - since:.0f} s: this may be old"
        return self.refused or self._trouble

    async def end(self) -> None:
        """The key goes with its lease."""
        await self._scope.aclose()


class Leases:
    """Asks etcd how long leases still are, and puts it into `lefts`."""

    def __init__(self, client: Client, lefts: dict[int, TimeToLive]) -> None:
        self._client, self._lefts = client, lefts

    async def follow(self, visible: Callable[[], Sequence[int]]) -> Never:
        """Ask of those that are visible, some at a time, in turn."""
        at = 0
        while True:
            leases = visible()
            at = at + _ASKED if at + _ASKED < len(leases) else 0
            for gone in self._lefts.keys() - set(leases):
                del self._lefts[gone]
            try:
                await self.ask(leases[at : at + _ASKED])
            except EtcdError:
                self._lefts.clear()
            await asyncio.sleep(LOOK_ASK)

    async def ask(self, leases: Sequence[int]) -> None:
        """Raises EtcdError."""
        found = await asyncio.gather(*(self._client.left_of(lease, LOOK_ASK) for lease in leases))
        self._lefts |= zip(leases, found, strict=True)


def pace_as_json(pace: Pace) -> dict[str, Any]:
    """What a node has said of its workers."""
    return {"step": pace.step, "per_second": pace.per_second, "doing": str(pace.doing)}


def paces(snapshot: Snapshot, keys: Keys, view: View) -> dict[str, Pace]:
    """How fast the nodes are whose workers run, as far as they have said it."""
    found = {}
    for member in view.members:
        kv = snapshot.kvs.get(keys.pace(member.lease))
        try:
            pace = decode(Pace, kv.value, lease=member.lease) if kv else None
        except ValueError:
            continue
        if pace and pace.generation == view.trains:
            found[member.node] = pace
    return found
