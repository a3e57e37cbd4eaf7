"""The jobs under a prefix, as `elastic-etcd serve` shows them: a copy of etcd that follows it.

All that is kept has a bound: the keys of the copy, the jobs with a chart, a chart's points.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from array import array
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Never, Self

from msgspec import Struct

from elastic_etcd.cli import status
from elastic_etcd.cli.live.viewers import Looker, pace_as_json, paces
from elastic_etcd.cli.query import MOST_KEYS, by_job, is_known
from elastic_etcd.core.schema import Keys
from elastic_etcd.core.txn import Get, Snapshot
from elastic_etcd.core.view import Everything, view_of
from elastic_etcd.errors import EtcdError
from elastic_etcd.etcd.mirror import Mirror

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from elastic_etcd.core.txn import KeyValue
    from elastic_etcd.etcd.client import Client

MOST_CHARTS = 1000  # jobs that have one
MOST_POINTS = 400  # of a chart
_SAMPLE = 2.0  # seconds between two points, as long as there is room
_ASK = 2.0  # seconds between two questions whether etcd is there
_AGAIN = 30.0  # seconds until what etcd has refused is tried again
_RECONCILE = 120.0  # there may be many keys
_PATIENCE = 1.0  # with an etcd that is to be told that nobody looks any more


class Series:
    """The world sizes and steps/s of a job, since this program knows it.

    When there are MOST_POINTS every other one goes, and from then on half as many are taken.
    """

    def __init__(self) -> None:
        self._times, self._sizes, self._rates = array("d"), array("d"), array("d")
        self._every, self._turn = 1, 0

    def add(self, at: float, size: int, rate: float | None) -> None:
        """At `at`, in seconds, so many ranks train so fast, None: nobody knows how fast."""
        self._turn += 1
        if self._turn % self._every:
            return
        self._times.append(at)
        self._sizes.append(size)
        self._rates.append(-1.0 if rate is None else rate)
        if len(self._times) == MOST_POINTS:
            self._every *= 2
            for kept in (self._times, self._sizes, self._rates):
                del kept[::2]

    def points(self) -> list[tuple[int, int, float | None]]:
        """Of each the milliseconds since 1970, the ranks, and steps/s."""
        every = zip(self._times, self._sizes, self._rates, strict=True)
        return [
            (int(at * 1000), int(size), rate if rate >= 0 else None) for at, size, rate in every
        ]


class Known(Struct, frozen=True):
    """What a job is, and of which keys: how many, the newest one's revision, and what was noted."""

    mark: tuple[int, int, str]
    state: dict[str, Any]
    text: bytes  # the same as JSON


class Looking:
    """How many look at a job, and what tells its nodes so."""

    def __init__(self, task: asyncio.Task[Never]) -> None:
        self.people = 0
        self.task = task


class Jobs:
    """`async with Jobs(client, prefix, timeout) as jobs`: as they are in etcd, while this is open.

    only: the one job that is meant; "" all under the prefix.
    `news` is set when something changes, and is another event from then on; `over` is set once
    nobody is to be told any more. `keeper` ends with a fault of this program only. Raises EtcdError
    where etcd does not serve the prefix at first.
    """

    def __init__(self, client: Client, prefix: str, timeout: float, only: str = "") -> None:
        self.prefix = prefix
        self._root = f"{prefix}/{only}/" if only else f"{prefix}/"
        self.news, self.over = asyncio.Event(), asyncio.Event()
        self._client, self._timeout = client, timeout
        self._snapshot = Snapshot(0, {})
        self._jobs: dict[str, dict[str, KeyValue]] = {}
        self._known: dict[str, Known] = {}
        self._series: dict[str, Series] = {}
        self._looking: dict[str, Looking] = {}
        self._notes: dict[str, str] = {}  # by job, why its nodes are not told that somebody looks
        self._tellers: set[asyncio.Task[Never]] = set()
        self._teller_failed: asyncio.Future[Never] = asyncio.get_running_loop().create_future()
        self._charts: dict[str, bytes] = {}
        self._overview = b""
        self._answered = _timestamp()
        self._away: dict[str, str] | None = None
        self._refused: dict[str, str] | None = None

    async def __aenter__(self) -> Self:
        some = Get(self._root, prefix=True, limit=1)
        await self._client.range(some, timeout=self._timeout)
        self.keeper = asyncio.create_task(self._keep(), name="jobs")
        read = asyncio.create_task(self.news.wait())
        await asyncio.wait({self.keeper, read}, return_when=asyncio.FIRST_COMPLETED)
        read.cancel()
        if self.keeper.done():
            self.keeper.result()
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = {self.keeper, *self._tellers}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=_PATIENCE)

    def end(self) -> None:
        """Nobody is to be told any more."""
        self.over.set()
        self._tell_news()

    # --- what they are --------------------------------------------------------------------

    def overview(self) -> bytes:
        """All jobs as JSON, in short."""
        if not self._overview:
            self._overview = _json({"prefix": self.prefix, "jobs": self.in_short()})
        return self._overview

    def in_short(self) -> list[dict[str, Any]]:
        """All jobs, each in short."""
        found = [known.state for known in map(self.known, self._jobs) if known]
        return [_in_short(state) for state in found]

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
            known = self._known[job] = Known(mark, state, _json(state))
        return known if known.state["known"] else None

    def chart(self, job: str) -> bytes:
        """World size and steps/s of a job over time, as JSON."""
        if job not in self._series:
            return b'{"points":[]}'
        if job not in self._charts:
            self._charts[job] = _json({"points": self._series[job].points()})
        return self._charts[job]

    def etcd(self) -> bytes:
        """Whether etcd is there, as JSON: since when not, and what is wrong."""
        return _json({"away": self.away})

    @property
    def away(self) -> dict[str, str] | None:
        """Since when etcd is not there, and why, if so."""
        return self._away or self._refused

    def _keys(self, job: str) -> Keys:
        return Keys(f"{self.prefix}/{job}")

    # --- following etcd -------------------------------------------------------------------

    async def _keep(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for work in (self._follow_etcd, self._ask, self._sample, self._heed_tellers):
                    tasks.create_task(work(), name=work.__name__)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _follow_etcd(self) -> Never:
        """Keep the copy; begin anew what etcd refuses later. Raises EtcdError at first."""
        everything = (Get(self._root, prefix=True),)
        read = False
        while True:
            changed = asyncio.Event()

            def ended(_: object, changed: asyncio.Event = changed) -> None:
                changed.set()

            mirror = Mirror(self._client, everything, changed.set, _RECONCILE, MOST_KEYS)
            mirror.failed.add_done_callback(ended)
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
            self._refused = {"since": _timestamp(), "why": str(error)}
            self._tell_news()
            await asyncio.sleep(_AGAIN)

    def _see(self, snapshot: Snapshot) -> None:
        self._refused = None
        self._snapshot = snapshot
        self._jobs = by_job(snapshot.kvs, self.prefix)
        self._known = {job: known for job, known in self._known.items() if job in self._jobs}
        self._series = {job: kept for job, kept in self._series.items() if job in self._jobs}
        self._tell_news()

    def _tell_news(self) -> None:
        self._overview = b""
        news, self.news = self.news, asyncio.Event()
        news.set()

    async def _ask(self) -> Never:
        """Find out whether etcd is there; a watch alone may be silent for long."""
        some = Get(self._root, prefix=True, limit=1)
        while True:
            was = self._away
            try:
                await self._client.range(some, timeout=self._timeout)
                self._answered, self._away = _timestamp(), None
            except EtcdError as error:
                why = str(error).partition("\n")[0]
                self._away = was or {"since": self._answered, "why": why}
            if was is not self._away:
                self._tell_news()
            await asyncio.sleep(_ASK)

    async def _sample(self) -> Never:
        """Add a point to each chart again and again."""
        while True:
            await asyncio.sleep(_SAMPLE)
            for job in self._jobs:
                known = self.known(job)
                if known and (job in self._series or len(self._series) < MOST_CHARTS):
                    series = self._series.setdefault(job, Series())
                    series.add(
                        time.time(), known.state["world_size"], known.state["steps_per_second"]
                    )
            self._charts.clear()
            self._tell_news()

    # --- telling the nodes ----------------------------------------------------------------

    @asynccontextmanager
    async def looking(self, job: str) -> AsyncIterator[None]:
        """While this is open the job's nodes know that somebody looks."""
        if job not in self._looking:
            task = asyncio.create_task(self._tell_nodes(job), name=f"look at {job}")
            self._looking[job] = Looking(task)
            self._tellers.add(task)
            task.add_done_callback(self._teller_ended)
        looking = self._looking[job]
        looking.people += 1
        try:
            yield
        finally:
            looking.people -= 1
            if not looking.people:
                del self._looking[job]
                looking.task.cancel()

    def _teller_ended(self, teller: asyncio.Task[Never]) -> None:
        self._tellers.discard(teller)
        error = None if teller.cancelled() else teller.exception()
        if error and not self._teller_failed.done():
            self._teller_failed.set_exception(error)

    async def _heed_tellers(self) -> None:
        """Raise what ends one of them: a fault of this program."""
        await self._teller_failed

    async def _tell_nodes(self, job: str) -> Never:
        keys = self._keys(job)
        while True:
            looker = Looker(self._client, keys, self._timeout)
            try:
                while not looker.refused:
                    news = self.news
                    if (known := self.known(job)) and known.state["nodes"]:
                        await looker.look(Snapshot(self._snapshot.revision, self._jobs[job]))
                    await news.wait()
                self._notes[job] = looker.refused
                self._tell_news()
                await asyncio.sleep(_AGAIN)
            finally:
                self._notes.pop(job, None)
                await looker.end()


def _state_of(job: str, seen: Snapshot, keys: Keys, note: str) -> dict[str, Any]:
    """A job as `status --json` has it, and what `top` adds to that."""
    view = view_of(seen, keys, Everything())
    state = status.describe(job, view)
    told = paces(seen, keys, view)
    for node in state["nodes"]:
        pace = told.get(node["node"])
        node["pace"] = pace_as_json(pace) if pace else None
    rates = [pace.per_second for pace in told.values()]
    return state | {
        "known": is_known(view),
        "steps_per_second": statistics.median(rates) if rates else None,
        "summary": [*status.summary(state), *filter(None, [note])],
        "events": status.events(state),
    }


def _in_short(state: dict[str, Any]) -> dict[str, Any]:
    return status.in_short(state) | {"steps_per_second": state["steps_per_second"]}


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
