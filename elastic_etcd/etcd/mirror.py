"""Some ranges of etcd as a local copy: listed once at a revision, then followed by a watch.

The watch resumes from the last event's revision + 1. The copy is made anew when etcd has
compacted that revision, or shows another history (a restored backup). etcd has lost DELETE
events (etcd#18089, #19179), so a fresh list is compared with the copy now and then.
"""

import asyncio
import logging
from collections.abc import Callable
from types import MappingProxyType
from typing import Never, Self

from tenacity import RetryCallState

from elastic_etcd.core.txn import Get, KeyValue, Snapshot
from elastic_etcd.etcd import channel, faults, wire
from elastic_etcd.etcd.channel import Stream
from elastic_etcd.etcd.client import Client, Listing
from elastic_etcd.etcd.faults import Compacted, TokenRefused, Unanswered
from elastic_etcd.etcd.pb import elastic_etcd_rpc_pb2 as pb
from elastic_etcd.etcd.retry import growing, jitter, now, retrying, start_over

log = logging.getLogger(__name__)

# Without it a watch on a member that has lost the quorum is silent instead of failing.
HAS_LEADER = (("hasleader", "true"),)
OPEN_TIMEOUT = 2.0
RECONCILE_TRIES = 3  # a list that events have overtaken is not compared


class Mirror:
    """`async with Mirror(client, ranges, changed) as mirror`.

    `changed()` is called in the event loop after the first list and after each batch of
    events; `snapshot()` then gives the copy. Keys of different ranges that one Txn wrote may
    arrive in two batches. etcd's absence is waited for; what cannot heal (a permission) is the
    exception of the future `failed`.
    """

    def __init__(
        self,
        client: Client,
        ranges: tuple[Get, ...],
        changed: Callable[[], None],
        reconcile: float = 30.0,
    ) -> None:
        self.failed: asyncio.Future[Never] = asyncio.get_running_loop().create_future()
        self.repairs = 0
        self._client = client
        self._ranges = ranges
        self._changed = changed
        self._period = reconcile
        self._what = ", ".join(get.key for get in ranges)
        self._kvs: dict[str, KeyValue] = {}
        self._revision = 0  # of the newest list or event
        self._next: list[int] = []  # for each range, the revision from which to watch
        self._history: tuple[int, int] | None = None  # cluster id and raft term; None: list
        self._snapshot: Snapshot | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        for work, name in ((self._follow(), "mirror"), (self._reconcile(), "reconcile")):
            task = asyncio.create_task(work, name=name)
            task.add_done_callback(self._ended)
            self._tasks.append(task)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    def snapshot(self) -> Snapshot | None:
        """The copy, which later events leave alone; None before the first list."""
        if self._snapshot is None and self._next:
            self._snapshot = Snapshot(self._revision, MappingProxyType(dict(self._kvs)))
        return self._snapshot

    async def _follow(self) -> None:
        async for attempt in retrying():
            with attempt:
                try:
                    await self._watch(attempt.retry_state)
                except Compacted as error:
                    self._history = None
                    log.info("etcd has compacted the events of %s: listing again", self._what)
                    raise Unanswered(str(error), move=False) from error
                except Unanswered as error:
                    log.debug("watch of %s: %s", self._what, error)
                    raise

    async def _watch(self, attempts: RetryCallState) -> Never:
        """List if need be, then follow one stream to its end: Unanswered, Compacted, EtcdError."""
        if self._history is None:
            self._adopt(await self._client.list(*self._ranges))
        patience = growing(OPEN_TIMEOUT, attempts)
        async with self._client.stream(channel.WATCH, self._what, HAS_LEADER) as stream:
            try:
                async with asyncio.timeout(patience):
                    await self._open(stream)
            except TimeoutError:
                raise Unanswered(f"no watch within {patience} s") from None
            stream.began = now()
            start_over(attempts)
            while True:
                self._take(await stream.read())

    async def _open(self, stream: Stream[pb.WatchRequest, pb.WatchResponse]) -> None:
        """Watch every range; returns when etcd has confirmed all of them."""
        for index, get in enumerate(self._ranges):
            create = pb.WatchCreateRequest(
                key=wire.encode(get.key),
                range_end=wire.range_end(get.key, get.prefix),
                start_revision=self._next[index],
                watch_id=index + 1,
            )
            await stream.write(pb.WatchRequest(create=create))
        missing = len(self._ranges)
        while missing:
            response = await stream.read()
            self._take(response)
            missing -= response.created

    def _take(self, response: pb.WatchResponse) -> None:
        """Apply one response. Raises Unanswered or Compacted when the watch has ended."""
        if response.canceled:  # before `created`, which may be set as well
            raise _canceled(response)
        self._check_history(response.header)
        if not response.events:  # also a progress answer, which proves nothing: etcd#15220
            return
        index = response.watch_id - 1
        start = self._next[index]
        for event in response.events:
            if event.kv.mod_revision >= start:  # older: a reconcile was faster
                self._apply(event)
        last = response.events[-1].kv.mod_revision
        self._next[index] = max(start, last + 1)
        self._revision = max(self._revision, last)
        self._publish()

    def _apply(self, event: pb.Event) -> None:
        kv = wire.key_value(event.kv)
        if event.type == pb.Event.DELETE:
            self._kvs.pop(kv.key, None)
        else:
            self._kvs[kv.key] = kv

    def _check_history(self, header: pb.Header) -> None:
        """Another cluster, or one that knows less than it did (a restored backup): list again.

        A member that lags behind looks the same for a moment; then the list is harmless.
        """
        if self._history is None:
            raise Unanswered("to be listed again", move=False)
        cluster, term = self._history
        if (
            header.cluster_id != cluster
            or header.raft_term < term
            or header.revision < self._revision
        ):
            self._history = None
            log.info("etcd shows another history of %s: listing again", self._what)
            raise Unanswered("etcd shows another history", move=False)

    def _adopt(self, listing: Listing) -> None:
        """Take a list as the copy."""
        self._history = (listing.cluster, listing.term)
        self._kvs = dict(listing.snapshot.kvs)
        self._revision = listing.snapshot.revision
        self._next = [self._revision + 1] * len(self._ranges)
        self._publish()

    def _publish(self) -> None:
        self._snapshot = None
        self._changed()

    async def _reconcile(self) -> None:
        while True:
            period = self._period * jitter.uniform(0.75, 1.25)
            await asyncio.wait({self.failed}, timeout=period)
            for _ in range(RECONCILE_TRIES):
                # Without values: a round of a thousand nodes is long, and all compare it.
                if await self._agrees(values=False) or await self._agrees(values=True):
                    break

    async def _agrees(self, *, values: bool) -> bool:
        """Whether the copy is as etcd's list, by revisions; one with values corrects it."""
        listing = await self._client.list(*self._ranges, values=values)
        if self._history is None:
            return True  # about to be listed anyway
        if listing.snapshot.revision < self._revision:
            return False
        fresh = {key: kv.mod for key, kv in listing.snapshot.kvs.items()}
        if fresh == {key: kv.mod for key, kv in self._kvs.items()}:
            return True
        if values:
            self._correct(listing)
        return values

    def _correct(self, listing: Listing) -> None:
        """Take a list that is not older than the copy and differs from it."""
        self.repairs += 1
        text = "the copy of %s is mended: an event before revision %d was missed, or is late"
        log.info(text, self._what, self._revision)
        self._adopt(listing)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """What ends a task for good is for the owner to see, a fault of this program as well."""
        if not task.cancelled() and (error := task.exception()) and not self.failed.done():
            self.failed.set_exception(error)


def _canceled(response: pb.WatchResponse) -> Exception:
    """Why etcd ended the watch. The watch id is not to be trusted here: it may be -1."""
    reason = response.cancel_reason
    if response.compact_revision:
        return Compacted(reason)
    if any(text in reason for text in faults.TOKEN_ERRORS):
        return TokenRefused(reason, applied=False, move=False)
    return Unanswered(reason or "etcd cancelled the watch")
