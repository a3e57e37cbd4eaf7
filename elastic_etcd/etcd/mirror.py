"""Some ranges of etcd as a local copy: listed once at a revision, then followed by a watch.

The watch resumes from the last event's revision + 1. The copy is made anew when etcd has
compacted that revision, or shows another history (a restored backup). etcd has lost DELETE
events (etcd#18089, #19179), so a fresh list is compared with the copy now and then.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Never, Self, TypeVar

from elastic_etcd.core.txn import Get, KeyValue, Snapshot
from elastic_etcd.errors import EtcdError
from elastic_etcd.etcd import faults, wire
from elastic_etcd.etcd._grpc import WATCH
from elastic_etcd.etcd.client import Client, Listing
from elastic_etcd.etcd.connection import Stream
from elastic_etcd.etcd.faults import Compacted, Unanswered
from elastic_etcd.etcd.pb import elastic_etcd_rpc_pb2 as pb
from elastic_etcd.etcd.retry import Attempts, jitter, now
from elastic_etcd.times import OPEN_TIMEOUT

log = logging.getLogger(__name__)

# Without it a watch on a member that has lost the quorum is silent instead of failing.
HAS_LEADER = (("hasleader", "true"),)
RECONCILE_TRIES = 3  # a list that events have overtaken is not compared

T = TypeVar("T")


class Mirror:
    """`async with Mirror(client, ranges, changed) as mirror`.

    `changed()` is called in the event loop after the first list and after each batch of
    events; `snapshot()` then gives the copy. Keys of different ranges that one Txn wrote may
    arrive in two batches. While etcd is away the mirror waits, and also while it refuses what it
    has served before. A refusal at first becomes the exception of the future `failed`, as does
    TooLarge where there are more than `most` keys.
    """

    def __init__(
        self,
        client: Client,
        ranges: tuple[Get, ...],
        changed: Callable[[], None],
        reconcile: float = 30.0,
        most: int | None = None,
    ) -> None:
        self.failed: asyncio.Future[Never] = asyncio.get_running_loop().create_future()
        self.repairs = 0
        self._client = client
        self._refusals = client.refusals
        self._ranges = ranges
        self._changed = changed
        self._period = reconcile
        self._most = most
        more = f" and {len(ranges) - 1} more" if len(ranges) > 1 else ""
        self._what = f"{ranges[0].key}{more}"
        self._kvs: dict[str, KeyValue] = {}
        self._revision = 0  # of the newest list or event
        self._next: list[int] = []  # for each range, the revision from which to watch
        self._history: tuple[int, int] | None = None  # cluster id and raft term; None: list
        self._snapshot: Snapshot | None = None
        self._attempts = Attempts()
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._keeper = asyncio.create_task(self._keep(), name="mirror")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})

    def snapshot(self) -> Snapshot | None:
        """The copy, which later events leave alone; None before the first list."""
        if self._snapshot is None and self._next:
            self._snapshot = Snapshot(self._revision, MappingProxyType(dict(self._kvs)))
        return self._snapshot

    async def _keep(self) -> None:
        """Keep the copy, and give what ends that for good to the owner: also our own faults."""
        try:
            async with asyncio.TaskGroup() as tasks:
                follow = partial(self._attempts.run, self._follow_stream)
                tasks.create_task(self._refusals.wait_out(follow), name="follow")
                tasks.create_task(self._reconcile(), name="reconcile")
        except ExceptionGroup as errors:
            if not self.failed.done():
                self.failed.set_exception(errors.exceptions[0])

    async def _follow_stream(self) -> Never:
        """List if need be, then follow one stream to its end. Raises Unanswered, EtcdError."""
        try:
            await self._watch()
        except Compacted as error:
            self._history = None
            log.info("etcd has compacted the events of %s: listing again", self._what)
            raise Unanswered(str(error), move=False) from error
        except Unanswered as error:
            log.debug("watch of %s: %s", self._what, error)
            raise
        except EtcdError:
            self._history = None  # a list is refused without another login
            raise

    async def _watch(self) -> Never:
        """List if need be, then follow one stream. Raises Compacted, Unanswered, EtcdError."""
        if self._history is None:
            self._adopt(await self._client.list(*self._ranges, most=self._most))
        patience = self._attempts.growing(OPEN_TIMEOUT)
        async with self._client.stream(WATCH, self._what, HAS_LEADER) as stream:
            try:
                async with asyncio.timeout(patience):
                    await self._open_watches(stream)
            except TimeoutError:
                raise Unanswered(f"no watch within {patience} s") from None
            stream.began = now()
            self._attempts.start_over()
            while True:
                self._receive(await stream.read())

    async def _open_watches(self, stream: Stream[pb.WatchRequest, pb.WatchResponse]) -> None:
        """Watch every range, until etcd has confirmed all of them.

        Its news meanwhile count only then: those of one range may come before the answer of
        another that shows another history. The ids are 0, 1, ...: grpc-proxy takes no others.
        """
        for index, get in enumerate(self._ranges):
            create = pb.WatchCreateRequest(
                key=wire.encode(get.key),
                range_end=wire.range_end(get.key, get.prefix),
                start_revision=self._next[index],
            )
            await stream.write(pb.WatchRequest(create=create))
        missing = len(self._ranges)
        told = []
        while missing:
            response = await stream.read()
            self._check(response)
            told.append(response)
            missing -= response.created
        for response in told:
            self._receive(response)

    def _receive(self, response: pb.WatchResponse) -> None:
        """Apply one response; raises as `_check`."""
        self._check(response)
        if not response.events:  # also a progress answer, which proves nothing: etcd#15220
            return
        index = response.watch_id
        start = self._next[index]
        for event in response.events:
            if event.kv.mod_revision >= start:  # older: a reconcile was faster
                self._apply(event)
        if self._most and len(self._kvs) > self._most:
            raise faults.too_many(self._what, self._most)
        last = response.events[-1].kv.mod_revision
        self._next[index] = max(start, last + 1)
        self._revision = max(self._revision, last)
        self._publish()

    def _check(self, response: pb.WatchResponse) -> None:
        """Raises Unanswered or Compacted when the watch has ended."""
        if response.canceled:  # before `created`, which may be set as well
            raise faults.canceled(response.cancel_reason, response.compact_revision)
        known = self._next[response.watch_id] - 1
        self._check_history(response.header, known)

    def _apply(self, event: pb.Event) -> None:
        kv = wire.key_value(event.kv)
        if event.type == pb.Event.DELETE:
            self._kvs.pop(kv.key, None)
        else:
            self._kvs[kv.key] = kv

    def _check_history(self, header: pb.Header, known: int) -> None:
        """Another cluster, or one that knows less than it did (a restored backup): list again.

        `known` is what this range has been told already: the answer of one range may come after a
        newer event of another. A member that lags behind looks the same as a restored one for a
        moment; then the list is harmless.
        """
        if self._history is None:
            raise Unanswered("to be listed again", move=False)
        cluster, term = self._history
        if header.cluster_id != cluster or header.raft_term < term or header.revision < known:
            self._history = None
            log.info("etcd shows another history of %s: listing again", self._what)
            raise Unanswered("etcd shows another history", move=False)

    def _adopt(self, listing: Listing) -> None:
        """Take a list as the copy."""
        self._history = (listing.cluster, listing.term)
        self._kvs = dict(listing.snapshot.kvs)
        self._revision = listing.snapshot.revision
        self._next = [self._revision + 1] * len(self._ranges)
        self._refusals.succeeded()
        self._publish()

    def _publish(self) -> None:
        self._snapshot = None
        self._changed()

    async def _reconcile(self) -> None:
        while True:
            period = self._period * jitter.uniform(0.75, 1.25)
            await asyncio.wait({self.failed}, timeout=period)
            for _ in range(RECONCILE_TRIES):
                if await self._refusals.wait_out(self._agrees_or_is_mended):
                    break

    async def _agrees_or_is_mended(self) -> bool:
        # Without values: a round of a thousand nodes is long, and all compare it.
        return await self._agrees(values=False) or await self._agrees(values=True)

    async def _agrees(self, *, values: bool) -> bool:
        """Whether the copy is as etcd's list, by revisions; one with values corrects it."""
        listing = await self._client.list(*self._ranges, values=values, most=self._most)
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


async def first(client: Client, ranges: tuple[Get, ...], look: Callable[[Snapshot], T | None]) -> T:
    """Wait until `look` makes something of the ranges that is not None; gives that.

    Raises EtcdError when etcd refuses them at first.
    """
    changed = asyncio.Event()
    async with Mirror(client, ranges, changed.set) as mirror:
        mirror.failed.add_done_callback(lambda _: changed.set())
        while True:
            await changed.wait()
            changed.clear()
            if mirror.failed.done():
                mirror.failed.result()
            snapshot = mirror.snapshot()
            found = look(snapshot) if snapshot else None
            if found is not None:
                return found
