"""An agent's end of the channel, for tests of what workers ask of it."""

import asyncio
import threading
from typing import Self

from elastic_etcd.agent.channel import ChannelServer, WorkerChannel
from elastic_etcd.protocol.messages import AskCurrent, Current, Disconnected, FromWorker


class Job:
    """The agent's end of the channel, real, in a thread; `is_current` is what etcd would say."""

    def __init__(self) -> None:
        self.is_current = True
        self.name = ""  # of its socket
        self._open = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._open.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        async def begin() -> ChannelServer:
            channels = ChannelServer(self._answer)
            self.name = channels.open()
            return channels

        channels = self._loop.run_until_complete(begin())
        self._open.set()
        self._loop.run_forever()

        async def closed() -> None:
            channels.close()

        self._loop.run_until_complete(closed())

    def _answer(self, channel: WorkerChannel, message: FromWorker | Disconnected) -> None:
        if isinstance(message, AskCurrent):
            reason = "" if self.is_current else "n2 is lost"
            channel.send(Current(message.id, self.is_current, reason))
