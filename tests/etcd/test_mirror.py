"""Rule 4: the copy is what etcd holds, whatever happens to the watch."""

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from elastic_etcd.core.txn import Delete, Get, Put, Snapshot, Txn
from elastic_etcd.etcd.access import EtcdConfig
from elastic_etcd.etcd.client import Client, Listing
from elastic_etcd.etcd.connection import Stream
from elastic_etcd.etcd.embedded import find_program, free_ports
from elastic_etcd.etcd.mirror import Mirror
from elastic_etcd.etcd.pb import elastic_etcd_rpc_pb2 as pb
from elastic_etcd.etcd.session import Session
from tests.support.aio import Copy, asynchronous, attached, elapse, put
from tests.support.etcd import EtcdCluster, EtcdServer
from tests.support.proxy import proxy


class Recording(Mirror):
    """Remembers the events that it received, and the lists that it adopted."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.events: list[tuple[int, str]] = []
        self.lists = 0

    def _apply(self, event: pb.Event) -> None:
        self.events.append((event.kv.mod_revision, event.kv.value.decode()))
        super()._apply(event)

    def _adopt(self, *args: object) -> None:
        self.lists += 1
        super()._adopt(*args)  # type: ignore[arg-type]


def recording(copy: Copy) -> Recording:
    assert isinstance(copy.mirror, Recording)
    return copy.mirror


@asynchronous
async def test_list_then_events(etcd: EtcdServer, prefix: str) -> None:
    async with Client(etcd.config) as client:
        await put(client, f"{prefix}/many/a", "1")
        await put(client, f"{prefix}/one", "1")
        await put(client, f"{prefix}/one-not", "1")
        ranges = Get(f"{prefix}/many/", prefix=True), Get(f"{prefix}/one")
        copy = Copy(client, *ranges)
        assert copy.mirror.snapshot() is None
        async with copy:
            first = await copy.until(lambda _: True)
            assert set(copy.values) == {f"{prefix}/many/a", f"{prefix}/one"}
            revision = await put(client, f"{prefix}/many/b", "2")
            second = await copy.until(lambda values: f"{prefix}/many/b" in values)
            assert second.revision == revision
            await client.txn(Txn((), (Delete(f"{prefix}/", prefix=True),)))
            await copy.until(lambda values: not values)
        assert len(first.kvs) == 2  # later events leave a snapshot alone
        assert copy.mirror.snapshot() is not None


@asynchronous
async def test_snapshots_are_immutable(etcd: EtcdServer, prefix: str) -> None:
    async with Client(etcd.config) as client, Copy(client, Get(prefix)) as copy:
        snapshot = await copy.until(lambda _: True)
        with pytest.raises(TypeError):
            snapshot.kvs["x"] = None  # type: ignore[index]
        assert copy.mirror.snapshot() is snapshot


@pytest.mark.nightly(part="jobs")  # it asks how fast the machine is
@asynchronous
async def test_an_event_comes_within_milliseconds(etcd: EtcdServer, prefix: str) -> None:
    times = []
    async with Client(etcd.config) as client, Copy(client, Get(prefix)) as copy:
        for i in range(50):
            start = time.monotonic()
            await put(client, prefix, str(i))
            await copy.until(lambda values, i=i: values.get(prefix) == str(i))  # type: ignore[misc]
            times.append(time.monotonic() - start)
    assert sorted(times)[25] < 0.02


@asynchronous
async def test_resumed_without_loss_or_repetition(etcd: EtcdServer, prefix: str) -> None:
    """Sixteen cut connections under continuous writing: each event once, in order."""
    async with (
        proxy(etcd.endpoint) as way,
        Client(EtcdConfig((way.endpoint,))) as client,
        Client(etcd.config) as writer,
        Copy(client, Get(prefix), kind=Recording) as copy,
    ):
        await copy.until(lambda _: True)
        done = asyncio.Event()
        written: list[tuple[int, str]] = []

        async def write() -> None:
            while not done.is_set():
                value = str(len(written))
                written.append((await put(writer, prefix, value), value))

        async with asyncio.TaskGroup() as group:
            group.create_task(write())
            for _ in range(16):
                seen = len(written)
                way.cut()
                await copy.until(lambda v, n=seen: int(v.get(prefix, -1)) > n + 5)  # type: ignore[misc]
            done.set()
        last = written[-1][1]
        await copy.until(lambda values: values[prefix] == last)
        assert recording(copy).events == written
        assert recording(copy).lists == 1
        assert way.accepted >= 17


@asynchronous
async def test_member_frozen_under_a_watch(cluster: EtcdCluster, prefix: str) -> None:
    """etcd#8980"""
    frozen = cluster.members[0]
    others = EtcdConfig(tuple(member.endpoint for member in cluster.members[1:]))
    async with (
        await attached(cluster.config, frozen.endpoint) as client,
        Client(others) as writer,
        Session(client, 4) as session,
        Copy(client, Get(prefix)) as copy,
    ):
        await copy.until(lambda _: True)
        frozen.freeze()
        await put(writer, prefix, "after")
        await copy.until(lambda values: prefix in values, timeout=8)
        assert client.endpoint != frozen.endpoint
        assert not session.lost.done()


@asynchronous
async def test_a_watch_without_quorum_fails_instead_of_being_silent(
    cluster: EtcdCluster, prefix: str
) -> None:
    """Without `hasleader` nothing would tell, and the client would stay where it is."""
    survivor, *rest = cluster.members
    async with (
        await attached(cluster.config, survivor.endpoint) as client,
        Copy(client, Get(prefix)) as copy,
    ):
        await copy.until(lambda _: True)
        for member in rest:
            member.freeze()
        async with asyncio.timeout(10):
            while client.endpoint == survivor.endpoint:
                await asyncio.wait({copy.mirror.failed}, timeout=0.05)
        for member in rest:
            member.thaw()
        await put(client, prefix, "after")
        await copy.until(lambda values: prefix in values, timeout=15)


@asynchronous
async def test_compacted_watch(own_etcd: EtcdServer, prefix: str) -> None:
    own_etcd.start()
    async with proxy(own_etcd.endpoint) as way:
        config = EtcdConfig((way.endpoint,))
        async with Client(config) as client, Client(own_etcd.config) as writer:
            await put(writer, f"{prefix}/old", "1")
            async with Copy(client, Get(prefix, prefix=True), kind=Recording) as copy:
                await copy.until(lambda _: True)
                way.cut(refuse=True)
                await writer.txn(Txn((), (Delete(f"{prefix}/old"),)))
                revision = await put(writer, f"{prefix}/new", "2")
                own_etcd.ctl("compact", str(revision))
                way.thaw()
                await copy.until(lambda values: values == {f"{prefix}/new": "2"})
                assert recording(copy).lists == 2
                await put(writer, f"{prefix}/next", "3")
                await copy.until(lambda values: f"{prefix}/next" in values)


class Forgetful(Mirror):
    """Loses the next DELETE, as servers did: etcd#18089, etcd#19179."""

    def _receive(self, response: pb.WatchResponse) -> None:
        kept = [event for event in response.events if event.type != pb.Event.DELETE]
        if len(kept) < len(response.events):
            return
        super()._receive(response)


@asynchronous
async def test_missed_delete_event(etcd: EtcdServer, prefix: str) -> None:
    ranges = Get(prefix, prefix=True)
    async with Client(etcd.config) as client:
        await put(client, f"{prefix}/stays")
        await put(client, f"{prefix}/goes")
        async with Copy(client, ranges, reconcile=0.5, kind=Forgetful) as copy:
            await copy.until(lambda values: len(values) == 2)
            await client.txn(Txn((), (Delete(f"{prefix}/goes"),)))
            await copy.until(lambda values: set(values) == {f"{prefix}/stays"}, timeout=3)
            assert copy.mirror.repairs == 1
            await put(client, f"{prefix}/later")
            await copy.until(lambda values: len(values) == 2)


@asynchronous
async def test_a_reconcile_never_goes_back(etcd: EtcdServer, prefix: str) -> None:
    """Lists and events race all the time; no value is ever seen to return."""
    seen: list[int] = []

    class Watched(Mirror):
        def _publish(self) -> None:
            super()._publish()
            snapshot = self.snapshot()
            assert snapshot is not None
            if prefix in snapshot.kvs:
                seen.append(int(snapshot.kvs[prefix].value))

    async with (
        Client(etcd.config) as client,
        Copy(client, Get(prefix), reconcile=0.001, kind=Watched) as copy,
    ):
        for i in range(500):
            await put(client, prefix, str(i))
        await copy.until(lambda values: values.get(prefix) == "499")
    assert seen == sorted(seen)


@asynchronous
async def test_a_progress_answer_proves_nothing(etcd: EtcdServer, prefix: str) -> None:
    """etcd#15220: its revision may be ahead of events that are still to come."""
    async with Client(etcd.config) as client, Copy(client, Get(prefix)) as copy:
        mirror = copy.mirror
        await copy.until(lambda _: True)
        before = list(mirror._next), mirror._revision
        cluster, term = mirror._history or (0, 0)
        header = pb.Header(cluster_id=cluster, raft_term=term, revision=mirror._revision + 1000)
        mirror._receive(pb.WatchResponse(header=header, watch_id=0))
        assert (mirror._next, mirror._revision) == before


@asynchronous
async def test_ranges_are_not_mixed_up_behind_a_proxy(
    own_etcd: EtcdServer, prefix: str, tmp_path: Path
) -> None:
    """`etcd grpc-proxy` numbers watches itself, and each resumes where its own range ended."""
    own_etcd.start()
    endpoint = f"127.0.0.1:{free_ports(1)[0]}"
    program = [own_etcd.program or find_program(), "grpc-proxy", "start"]
    flags = [f"--endpoints={own_etcd.endpoint}", f"--listen-addr={endpoint}"]
    with (tmp_path / "log").open("wb") as log:
        way = subprocess.Popen([*program, *flags], stdout=log, stderr=log)
    try:
        ranges = [Get(f"{prefix}/{name}") for name in "abc"]
        async with Client(EtcdConfig((endpoint,))) as client, Copy(client, *ranges) as copy:
            listed = (await copy.until(lambda _: True)).revision
            revision = await put(client, f"{prefix}/a")
            await copy.until(lambda values: f"{prefix}/a" in values)
            assert copy.mirror._next == [revision + 1, listed + 1, listed + 1]
    finally:
        way.kill()
        way.wait()


@asynchronous
async def test_a_range_that_is_confirmed_late_is_no_other_history(
    etcd: EtcdServer, prefix: str
) -> None:
    """etcd confirms the second range after an event of the first, at the revision before it."""
    ranges = Get(f"{prefix}/a"), Get(f"{prefix}/b")
    async with Client(etcd.config) as client, Copy(client, *ranges) as copy:
        listed = (await copy.until(lambda _: True)).revision
        await put(client, f"{prefix}/a")
        await copy.until(lambda values: f"{prefix}/a" in values)
        cluster, term = copy.mirror._history or (0, 0)
        header = pb.Header(cluster_id=cluster, raft_term=term, revision=listed)
        copy.mirror._receive(pb.WatchResponse(header=header, watch_id=1, created=True))
        assert copy.mirror._history == (cluster, term)


@asynchronous
async def test_etcd_killed_and_restarted_with_its_data(own_etcd: EtcdServer, prefix: str) -> None:
    own_etcd.start()
    async with (
        Client(own_etcd.config) as client,
        Copy(client, Get(prefix), kind=Recording) as copy,
    ):
        await copy.until(lambda _: True)
        await put(client, prefix, "before")
        await copy.until(lambda values: prefix in values)
        own_etcd.kill()
        await own_etcd.start_async()
        await put(client, prefix, "after")
        await copy.until(lambda values: values[prefix] == "after")
        assert [value for _, value in recording(copy).events] == ["before", "after"]
        assert recording(copy).lists == 1


@pytest.mark.parametrize("sign", ["revision", "term", "none"])
@asynchronous
async def test_restored_backup(own_etcd: EtcdServer, prefix: str, sign: str) -> None:
    """The same cluster id, an older history: its revisions mean other things now.

    Revision or raft term go back; when both have been overtaken, the reconcile finds out.
    """
    own_etcd.start()
    if sign == "term":
        own_etcd.kill()
        own_etcd.start()
    backup = own_etcd.directory / "backup"
    async with Client(own_etcd.config) as writer:
        await put(writer, f"{prefix}/kept")
        await asyncio.to_thread(own_etcd.ctl, "snapshot", "save", str(backup))
        for i in range(5):
            await put(writer, f"{prefix}/lost", str(i))
        async with (
            proxy(own_etcd.endpoint) as way,
            Client(EtcdConfig((way.endpoint,))) as client,
            Copy(
                client,
                Get(f"{prefix}/", prefix=True),
                reconcile=0.5 if sign == "none" else 1000,
                kind=Recording,
            ) as copy,
        ):
            await copy.until(lambda values: values.get(f"{prefix}/lost") == "4")
            way.cut(refuse=True)
            own_etcd.restore(backup)
            await own_etcd.start_async()
            if sign != "revision":
                for i in range(10):
                    await put(writer, f"{prefix}/other", str(i))
            way.thaw()
            await copy.until(
                lambda values: f"{prefix}/lost" not in values and f"{prefix}/kept" in values
            )
            assert recording(copy).repairs == (sign == "none")
            assert recording(copy).lists == 2
            await put(writer, f"{prefix}/next")
            await copy.until(lambda values: f"{prefix}/next" in values)


class Hesitant(Client):
    """Time passes between the requests of a stream, as it may on a busy machine."""

    @asynccontextmanager
    async def stream(self, *args: Any, **options: Any) -> AsyncIterator[Stream[Any, Any]]:
        async with super().stream(*args, **options) as stream:
            write = stream.write

            async def slowly(request: object) -> None:
                await write(request)
                await elapse(0.5)

            stream.write = slowly  # type: ignore[method-assign]  # nothing else tells it apart
            yield stream


@asynchronous
async def test_old_and_new_history_are_never_in_one_copy(own_etcd: EtcdServer, prefix: str) -> None:
    """News of a quiet range come before etcd says that another range was set back."""
    seen: list[set[str]] = []

    class Watched(Mirror):
        def _publish(self) -> None:
            super()._publish()
            snapshot = self.snapshot()
            assert snapshot is not None
            seen.append({key.removeprefix(f"{prefix}/") for key in snapshot.kvs})

    own_etcd.start()
    backup = own_etcd.directory / "backup"
    ranges = Get(f"{prefix}/quiet"), Get(f"{prefix}/busy")
    async with (
        Client(own_etcd.config) as writer,
        proxy(own_etcd.endpoint) as way,
        Hesitant(EtcdConfig((way.endpoint,))) as client,
        Copy(client, *ranges, kind=Watched) as copy,
    ):
        await copy.until(lambda _: True)
        await asyncio.to_thread(own_etcd.ctl, "snapshot", "save", str(backup))
        for i in range(5):
            await put(writer, f"{prefix}/busy", str(i))
        await copy.until(lambda values: values.get(f"{prefix}/busy") == "4")
        way.cut(refuse=True)
        own_etcd.restore(backup)
        await own_etcd.start_async()
        await put(writer, f"{prefix}/quiet")
        way.thaw()
        await copy.until(lambda values: set(values) == {f"{prefix}/quiet"})
    assert {"quiet", "busy"} not in seen


@asynchronous
async def test_another_cluster_at_the_same_address(own_etcd: EtcdServer, prefix: str) -> None:
    own_etcd.start()
    async with Client(own_etcd.config) as writer, proxy(own_etcd.endpoint) as way:
        await put(writer, f"{prefix}/first")
        async with (
            Client(EtcdConfig((way.endpoint,))) as client,
            Copy(client, Get(f"{prefix}/", prefix=True)) as copy,
        ):
            await copy.until(lambda values: f"{prefix}/first" in values)
            cluster = copy.mirror._history
            way.cut(refuse=True)
            own_etcd.kill()
            own_etcd.wipe()
            own_etcd.token = "another"
            await own_etcd.start_async()
            for i in range(5):
                await put(writer, f"{prefix}/second", str(i))
            way.thaw()
            await copy.until(lambda values: values == {f"{prefix}/second": "4"})
            assert copy.mirror._history != cluster


@asynchronous
async def test_many_keys_in_one_txn_are_one_change(etcd: EtcdServer, prefix: str) -> None:
    sizes = set()

    class Sized(Mirror):
        def _publish(self) -> None:
            super()._publish()
            snapshot = self.snapshot()
            assert isinstance(snapshot, Snapshot)
            sizes.add(len(snapshot.kvs))

    async with (
        Client(etcd.config) as client,
        Copy(client, Get(prefix, prefix=True), kind=Sized) as copy,
    ):
        await copy.until(lambda _: True)
        puts = tuple(Put(f"{prefix}/{i}", "") for i in range(100))
        await client.txn(Txn((), puts))
        await copy.until(lambda values: len(values) == 100)
    assert sizes == {0, 100}


@asynchronous
async def test_a_fault_of_the_owner_is_not_swallowed(etcd: EtcdServer, prefix: str) -> None:
    def changed() -> None:
        raise ZeroDivisionError

    async with Client(etcd.config) as client, Mirror(client, (Get(prefix),), changed) as mirror:
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(asyncio.shield(mirror.failed), 60)


@asynchronous
async def test_a_mirror_that_has_failed_asks_no_more(etcd: EtcdServer, prefix: str) -> None:
    """What compares the copy went on, without a pause, until the owner had ended."""

    class Counting(Client):
        lists = 0

        async def list(self, *ranges: Get, **options: Any) -> Listing:
            self.lists += 1
            return await super().list(*ranges, **options)

    def changed() -> None:
        raise ZeroDivisionError

    async with Counting(etcd.config) as client, Mirror(client, (Get(prefix),), changed) as mirror:
        await asyncio.wait({mirror.failed}, timeout=5)
        assert isinstance(mirror.failed.exception(), ZeroDivisionError)
        await elapse(0.3)
        assert client.lists == 1
