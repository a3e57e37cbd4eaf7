"""The jobs under a prefix, as `serve` and `top` show them: a copy of etcd's keys that follows them.

The keys of the copy have a bound. Nodes say how fast they are only while a job is viewed, which a
Viewer tells them.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Never, Self

from msgspec import Struct

from elastic_etcd.cli import events, query, status
from elastic_etcd.cli.query import MOST_KEYS, by_job, is_known
from elastic_etcd.core.schema import Keys, Pace, Watched, decode, encode
from elastic_etcd.core.txn import Get, Put, Snapshot, Txn
from elastic_etcd.core.view import Everything, view_of
from elastic_etcd.errors import EtcdDenied, EtcdError
from elastic_etcd.etcd.mirror import Mirror
from elastic_etcd.etcd.session import Session
from elastic_etcd.times import LOOK_PERIOD, LOOK_TTL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from elastic_etcd.core.txn import KeyValue
    from elastic_etcd.core.view import View
    from elastic_etcd.etcd.client import Client

_AGAIN = 30.0  # seconds until what etcd has refused is tried again
_RECONCILE = 120.0  # there may be many keys
_PATIENCE = 1.0  # with an etcd that is to know that nobody views a job any more


class Known(Struct, frozen=True):
    """A job as it was described."""

    mark: tuple[int, int, str]  # of its keys the number and the newest revision, and the note
    there: bool  # else there is only garbage
    state: dict[str, Any]
    text: bytes  # the same as JSON


class Jobs:
    """`async with Jobs(client, prefix, timeout) as jobs`: as they are in etcd, while this is open.

    `only` is the one job that is meant, "" all under the prefix. Raises EtcdError where etcd does
    not serve the prefix at first.
    """

    def __init__(self, client: Client, prefix: str, timeout: float, only: str = "") -> None:
        self.prefix = prefix
        self._root = f"{prefix}/{only}/" if only else f"{prefix}/"
        self.news = asyncio.Event()  # set by a change, which puts another one in its place
        self.over = asyncio.Event()  # set once nobody is to hear of news, or the keeper fails
        self._client, self._timeout = client, timeout
        self._snapshot = Snapshot(0, {})
        self._jobs: dict[str, dict[str, KeyValue]] = {}
        self._known: dict[str, Known] = {}
        self._viewers: Counter[str] = Counter()  # by job, how many people view it
        self._tellers: dict[str, asyncio.Task[Never]] = {}  # by job, what tells its nodes so
        self._notes: dict[str, str] = {}  # by job, why its nodes do not hear of viewers
        self._overview = b""
        self._away: query.Away | None = None
        self._refused: query.Away | None = None

    async def __aenter__(self) -> Self:
        some = Get(self._root, prefix=True, limit=1)
        await self._client.range(some, timeout=self._timeout)
        # It ends with a fault of this program only.
        self.keeper = asyncio.create_task(self._keep(), name="jobs")
        read = asyncio.create_task(self.news.wait())
        await asyncio.wait({self.keeper, read}, return_when=asyncio.FIRST_COMPLETED)
        read.cancel()
        if self.keeper.done():
            self.keeper.result()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.end()
        self.keeper.cancel()
        await asyncio.wait({self.keeper}, timeout=_PATIENCE)

    def end(self) -> None:
        """From here on nobody is to hear of news."""
        self.over.set()
        self._tell_news()

    # --- what they are --------------------------------------------------------------------

    def overview(self) -> bytes:
        """All jobs as JSON, in short."""
        if not self._overview:
            self._overview = _json({"prefix": self.prefix, "jobs": self.in_short()})
        return self._overview

    def in_short(self) -> list[dict[str, Any]]:
        """All jobs, each in short, those that go on first."""
        found = [known.state for known in map(self.known, self._jobs) if known]
        return status.by_urgency(
            status.in_short(s) | {"steps_per_second": s["steps_per_second"]} for s in found
        )

    def known(self, job: str) -> Known | None:
        """A job; None if there is none of that name."""
        kvs = self._jobs.get(job)
        if kvs is None:
            return None
        note = self._notes.get(job, "")
        mark = len(kvs), max(kv.mod for kv in kvs.values()), note
        known = self._known.get(job)
        if known is None or known.mark != mark:
            state = _state_of(job, Snapshot(self._snapshot.revision, kvs), self._keys(job), note)
            there = state.pop("known")
            known = self._known[job] = Known(mark, there, state, _json(state))
        return known if known.there else None

    def etcd(self) -> bytes:
        """Whether etcd is there, as JSON: since when not, and what is wrong."""
        return _json({"away": self.away})

    @property
    def away(self) -> query.Away | None:
        """Since when etcd is not there, and why, if so."""
        return self._away or self._refused

    def _keys(self, job: str) -> Keys:
        return Keys(f"{self.prefix}/{job}")

    # --- following etcd -------------------------------------------------------------------

    async def _keep(self) -> None:
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for work in (self._follow_etcd, self._ask):
                    self._tasks.create_task(self._until_it_fails(work), name=work.__name__)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _until_it_fails(self, work: Callable[..., Awaitable[Never]], *args: str) -> Never:
        try:
            await work(*args)
        except Exception:
            self.end()  # before anybody can ask the keeper for another task
            raise

    async def _follow_etcd(self) -> Never:
        """Keep the copy; begin anew what etcd refuses later. Raises EtcdError at first."""
        everything = (Get(self._root, prefix=True),)
        changed, read = asyncio.Event(), False
        while True:
            mirror = Mirror(self._client, everything, changed.set, _RECONCILE, MOST_KEYS)
            mirror.failed.add_done_callback(lambda _: changed.set())
            async with mirror:
                while not mirror.failed.done():
                    await changed.wait()
                    changed.clear()
                    if snapshot := mirror.snapshot():
                        self._see(snapshot)
                        read = True
            error = mirror.failed.exception()
            if not isinstance(error, EtcdError) or not read:
                mirror.failed.result()
            self._refused = {"since": query.timestamp(), "why": str(error)}
            self._tell_news()
            await asyncio.sleep(_AGAIN)

    def _see(self, snapshot: Snapshot) -> None:
        self._refused = None
        self._snapshot = snapshot
        self._jobs = by_job(snapshot.kvs, self.prefix)
        self._known = {job: known for job, known in self._known.items() if job in self._jobs}
        self._tell_news()

    def _tell_news(self) -> None:
        self._overview = b""
        news, self.news = self.news, asyncio.Event()
        news.set()

    async def _ask(self) -> Never:
        """Find out whether etcd is there."""

        def tell(away: query.Away | None) -> None:
            self._away = away
            self._tell_news()

        some = Get(self._root, prefix=True)
        await query.ask_whether_there(self._client, some, self._timeout, tell)

    # --- telling the nodes ----------------------------------------------------------------

    @asynccontextmanager
    async def viewed(self, job: str) -> AsyncIterator[None]:
        """While this is open the job's nodes know that they are viewed, unless all is over."""
        if self.over.is_set():
            yield
            return
        if not self._viewers[job]:
            work = self._until_it_fails(self._tell_nodes, job)
            self._tellers[job] = self._tasks.create_task(work, name=f"view {job}")
        self._viewers[job] += 1
        try:
            yield
        finally:
            self._viewers[job] -= 1
            if not self._viewers[job]:
                del self._viewers[job]
                teller = self._tellers.pop(job)
                teller.cancel()
                await asyncio.wait({teller}, timeout=_PATIENCE)

    async def _tell_nodes(self, job: str) -> Never:
        keys = self._keys(job)
        while True:
            async with Viewer(self._client, keys, self._timeout) as viewer:
                while not viewer.refused:
                    news = self.news
                    if (known := self.known(job)) and known.state["nodes"]:
                        await viewer.view(Snapshot(self._snapshot.revision, self._jobs[job]))
                    with suppress(TimeoutError):  # then etcd may have been in trouble
                        async with asyncio.timeout(LOOK_PERIOD):
                            await news.wait()
                self._notes[job] = viewer.refused
                self._tell_news()
                try:
                    await asyncio.sleep(_AGAIN)
                finally:
                    del self._notes[job]


class Viewer:
    """`async with Viewer(...) as viewer`: tells a job's nodes that it is viewed.

    They then say how fast they are. It is told by a key under a lease of its own, with which the
    key goes. `refused` says why etcd does not let it.
    """

    def __init__(self, client: Client, keys: Keys, timeout: float) -> None:
        self.refused = ""
        self._client, self._keys, self._timeout = client, keys, timeout
        self._session: Session | None = None
        self._scope = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._scope.aclose()

    async def view(self, seen: Snapshot) -> None:
        """Say so, if no other viewer does; next time, where etcd is in trouble."""
        if self._keys.watched in seen.kvs:
            return
        with suppress(EtcdError):
            await self._say()

    async def _say(self) -> None:
        try:
            if self._session is None or self._session.lost.done():
                session = Session(self._client, LOOK_TTL, timeout=self._timeout)
                self._session = await self._scope.enter_async_context(session)
            value = encode(Watched(LOOK_PERIOD, by=query.user()))
            put = Put(self._keys.watched, value, self._session.lease)
            await self._client.txn(Txn((), (put,)), self._timeout)
        except EtcdDenied as error:
            self.refused = f"steps are not shown: {error}"


def _paces(view: View, seen: Snapshot, keys: Keys) -> dict[str, dict[str, Any]]:
    """How fast the nodes' workers are in the world that trains, as JSON."""
    found = {}
    for member in view.members:
        kv = seen.kvs.get(keys.pace(member.lease))
        try:
            pace = decode(Pace, kv.value, lease=member.lease) if kv else None
        except ValueError:
            continue
        if pace and pace.generation == view.trains:
            doing = str(pace.doing)
            found[member.node] = {"step": pace.step, "per_second": pace.per_second, "doing": doing}
    return found


def _state_of(job: str, seen: Snapshot, keys: Keys, note: str) -> dict[str, Any]:
    """A job as pages and `top` show it: as status does, and each node's own word of its workers."""
    view = view_of(seen, keys, Everything())
    state = status.describe(job, view)
    paces = _paces(view, seen, keys)
    for node in state["nodes"]:
        node["pace"] = paces.get(node["node"])
    rates = [pace["per_second"] for pace in paces.values()]
    return state | {
        "known": is_known(view),
        "steps_per_second": statistics.median(rates) if rates else None,
        "summary": [*status.summary(state), *filter(None, [note])],
        "events": events.lines(job, view),
    }


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
