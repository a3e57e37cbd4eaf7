"""etcd's own history: a process that records every event under a prefix, and how it is read.

`python -m scripts.chaos_lib.history ENDPOINTS PREFIX FILE USER PASSWORD` writes a line of JSON for
each event from the first revision on. It outlives whatever happens to etcd's members; version
numbers in the lines prove that none is missing.
"""

import asyncio
import json
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Never, TextIO

from elastic_etcd.core.txn import Get
from elastic_etcd.etcd import wire
from elastic_etcd.etcd._grpc import WATCH
from elastic_etcd.etcd.access import EtcdConfig
from elastic_etcd.etcd.client import Client
from elastic_etcd.etcd.faults import Unanswered
from elastic_etcd.etcd.mirror import HAS_LEADER
from elastic_etcd.etcd.pb import elastic_etcd_rpc_pb2 as pb
from elastic_etcd.etcd.retry import Attempts, now

LOOK = 1.0  # seconds between two looks at whether the endpoint in use answers


@dataclass(frozen=True)
class Recorded:
    """One event of one key: a line of the file. `time`: when it was seen."""

    time: float
    revision: int
    deleted: bool
    key: str
    value: str
    version: int
    lease: int


def read(path: Path, root: str) -> Iterator[Recorded]:
    """The recorded events of the job whose keys are under `root`, without that."""
    with path.open() as file:
        for line in file:
            if line.endswith("\n") and (fields := json.loads(line))["key"].startswith(root):
                yield Recorded(**fields | {"key": fields["key"].removeprefix(root)})


class Recorder:
    """Follows `prefix` and writes its events to `file`."""

    def __init__(self, client: Client, prefix: str, file: TextIO) -> None:
        self._client, self._prefix, self._file = client, prefix, file
        self._next = 1
        self._attempts = Attempts()

    async def record(self) -> None:
        """Until cancelled."""
        await self._attempts.run(self._watch)

    async def _watch(self) -> Never:
        """Follow one stream to its end. Raises Unanswered."""
        async with self._client.stream(WATCH, self._prefix, HAS_LEADER) as stream:
            create = pb.WatchCreateRequest(
                key=wire.encode(self._prefix),
                range_end=wire.range_end(self._prefix, True),
                start_revision=self._next,
            )
            await stream.write(pb.WatchRequest(create=create))
            while True:
                self._take(await stream.read())
                stream.began = now()
                self._attempts.start_over()

    async def look(self, recording: asyncio.Task[None]) -> None:
        """Ask now and then: a frozen member's silence on the stream is no error by itself."""
        while not recording.done():
            await self._client.range(Get(self._prefix))
            await asyncio.wait({recording}, timeout=LOOK)

    def _take(self, response: pb.WatchResponse) -> None:
        if response.canceled:
            if response.compact_revision:
                raise RuntimeError(f"compacted at {response.compact_revision}, at {self._next}")
            raise Unanswered(response.cancel_reason or "cancelled")
        for event in response.events:
            kv = event.kv
            line = Recorded(
                time=time.time(),
                revision=kv.mod_revision,
                deleted=event.type == pb.Event.DELETE,
                key=wire.decode(kv.key),
                value=wire.decode(kv.value),
                version=kv.version,
                lease=kv.lease,
            )
            self._file.write(json.dumps(asdict(line)) + "\n")
            self._next = kv.mod_revision + 1
        self._file.flush()


async def main(endpoints: str, prefix: str, file: TextIO, user: str, password: str) -> None:
    config = EtcdConfig(tuple(endpoints.split(",")), user=user, password=password)
    async with Client(config) as client, asyncio.TaskGroup() as tasks:
        recorder = Recorder(client, prefix, file)
        recording = tasks.create_task(recorder.record())
        looking = tasks.create_task(recorder.look(recording))

        def stop() -> None:
            recording.cancel()
            looking.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)


if __name__ == "__main__":
    with Path(sys.argv[3]).open("a") as output:
        asyncio.run(main(sys.argv[1], sys.argv[2], output, *sys.argv[4:]))
