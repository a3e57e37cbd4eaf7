"""A TCP proxy in front of a real etcd: the network's faults, with the server's own answers."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager


class Proxy:
    """Forwards bytes. `freeze` is a cable pulled, `cut` a connection reset."""

    def __init__(self, target: str) -> None:
        self.endpoint = ""
        self.accepted = 0
        self._host, _, self._port = target.rpartition(":")
        self._flows: dict[asyncio.Task[None], Flow] = {}
        self._open = asyncio.Event()  # cleared: new connections hang
        self._open.set()
        self._refusing = False

    def freeze(self, *, new: bool = True) -> None:
        """Existing connections carry nothing any more; new ones neither, unless told."""
        for flow in self._flows.values():
            flow.up.clear()
            flow.down.clear()
        if new:
            self._open.clear()

    def lose_answers(self) -> None:
        """Requests of the existing connections arrive, their answers do not."""
        for flow in self._flows.values():
            flow.down.clear()

    def thaw(self) -> None:
        self._open.set()
        self._refusing = False
        for flow in self._flows.values():
            flow.up.set()
            flow.down.set()

    def cut(self, *, refuse: bool = False) -> None:
        """Close every connection; with `refuse` also each new one, until `thaw`."""
        self._refusing = refuse
        for task in self._flows:
            task.cancel()

    async def end(self) -> None:
        """Close every connection, and be done with them."""
        flows = list(self._flows)
        self.cut(refuse=True)
        if flows:
            await asyncio.wait(flows, timeout=5)

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.accepted += 1
        flow = self._flows[task] = Flow()
        try:
            if self._refusing:
                return
            await self._open.wait()
            far_reader, far_writer = await asyncio.open_connection(self._host, int(self._port))
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(pump(reader, far_writer, flow.up))
                    group.create_task(pump(far_reader, writer, flow.down))
            finally:
                far_writer.transport.abort()
        except (OSError, asyncio.CancelledError, ExceptionGroup):
            pass  # either end has gone, or `cut` was called
        finally:
            writer.transport.abort()
            del self._flows[task]


class Flow:
    """Whether each direction of a connection carries bytes."""

    def __init__(self) -> None:
        self.up, self.down = asyncio.Event(), asyncio.Event()
        self.up.set()
        self.down.set()


async def pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: asyncio.Event
) -> None:
    while data := await reader.read(65536):
        await way.wait()
        writer.write(data)
        await writer.drain()
    raise ConnectionResetError("one end has closed")


@asynccontextmanager
async def proxy(target: str) -> AsyncIterator[Proxy]:
    """A proxy to `target`, on a port of its own."""
    it = Proxy(target)
    server = await asyncio.start_server(it.accept, "127.0.0.1", 0, family=socket.AF_INET)
    it.endpoint = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield it
    finally:
        server.close()
        await it.end()


@contextmanager
def proxy_aside(target: str) -> Iterator[tuple[str, Callable[[Callable[[Proxy], None]], None]]]:
    """A proxy for a test without an event loop: its endpoint, and how to have things done to it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    way = proxy(target)
    try:
        it = asyncio.run_coroutine_threadsafe(way.__aenter__(), loop).result(10)

        def have(done: Callable[[Proxy], None]) -> None:
            loop.call_soon_threadsafe(done, it)

        yield it.endpoint, have
        asyncio.run_coroutine_threadsafe(way.__aexit__(None, None, None), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
