"""The nodes of a job that are checked at the same time, or were lately: they judge each other.

Each has a key with its speeds, and listens while it is checked. It calls the next two nodes in the
order of names, once each. A node is unfit where nobody reaches it, though those who tried reach
others, or where it is far slower than the others' median. With too few others it passes.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from statistics import median
from typing import Any, TypeAlias

from msgspec import structs

from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.agent.fitness import CheckedKey
from elastic_etcd.agent.store import bind
from elastic_etcd.core.schema import Checked, Measured, PeerCall, decode, hexed
from elastic_etcd.core.txn import Get
from elastic_etcd.etcd.client import Client
from elastic_etcd.etcd.mirror import Mirror

Others: TypeAlias = dict[int, Checked]  # by the lease of their keys

_ENOUGH = 3  # others with a speed, for a median
_MET, _CALLED = 2.0, 1.0  # seconds for others to come, and to tell whom they have reached
_CALL = 1.5  # for a call
_ROUNDS = 2  # calls of each node
_SENT, _SENDING = 16 << 20, 0.5  # bytes of a call with --preflight pairs, and seconds at most
_CHUNK = 1 << 18
_TIMES_SLOWER = {"disk": 10.0, "network": 4.0}  # than the median, by the first word; others 2.0
_GREETING = 16  # bytes: the lease of who is called, by which its caller knows it


class Neighbours:
    """`await Neighbours(...).compare()`: this node among the others."""

    def __init__(
        self, client: Client, config: AgentConfig, address: str, speeds: tuple[Measured, ...]
    ) -> None:
        self._client = client
        self._config = config
        self._key = CheckedKey(client, config)
        self._own = Checked(config.node, address, speeds=speeds)
        self._changed = asyncio.Event()
        self._mirror: Mirror

    async def compare(self) -> list[str]:
        """The faults of this node that only show beside others. Raises EtcdError, OSError."""
        sock, port = bind(self._own.address)
        server = await asyncio.start_server(self._answer, sock=sock, limit=_CHUNK)
        folder = Get(self._key.path.removesuffix(self._config.node), prefix=True)
        try:
            async with Mirror(self._client, (folder,), self._changed.set) as self._mirror:
                await self._put(port=port)
                most = self._config.limits.max_nodes - 1
                await self._until(_MET, lambda here: len(here) >= most)
                calls = tuple([await self._call(*other) for other in self._next()])
                await self._put(calls=calls)
                await self._until(_CALLED, lambda here: all(o.calls for o in here))
                await self._put(port=0)
                others = self._others()
        finally:
            server.close()
        given = (self._key.lease, self._own, others)
        return [*unreached(*given), *slower(*given)]

    async def _put(self, **fields: Any) -> None:
        self._own = structs.replace(self._own, **fields)
        await self._key.put(self._own)

    def _others(self) -> Others:
        found, seen = Others(), self._mirror.snapshot()
        for kv in seen.kvs.values() if seen else ():
            with suppress(ValueError):
                other = decode(Checked, kv.value)
                if other.node != self._config.node:
                    found[kv.lease] = other
        return found

    async def _until(self, seconds: float, until: Callable[[list[Checked]], bool]) -> None:
        """Wait until the others that are there are as they should be, but no longer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not until([other for other in self._others().values() if other.port]):
                    await self._changed.wait()
                    self._changed.clear()

    def _next(self) -> list[tuple[int, Checked]]:
        """The nodes that this one calls: all nodes that are there are on a ring by their names."""
        here = [(other.node, lease, other) for lease, other in self._others().items() if other.port]
        ring = sorted(here, key=lambda each: (each[0] < self._config.node, each[0]))
        return [(lease, other) for _, lease, other in ring[:_ROUNDS]]

    async def _call(self, lease: int, other: Checked) -> PeerCall:
        """Call another node, and measure the way to it where that is asked for."""
        writer = None
        try:
            async with asyncio.timeout(_CALL):
                reader, writer = await asyncio.open_connection(other.address, other.port)
                if await reader.readexactly(_GREETING) != hexed(lease).encode():
                    return PeerCall(lease, "another program answers there")
                if self._config.preflight != "pairs":
                    return PeerCall(lease)
                sending = asyncio.create_task(_send(writer))
                try:
                    return PeerCall(lease, speed=float(await reader.readline()))
                finally:
                    sending.cancel()
        except TimeoutError:
            return PeerCall(lease, f"no answer within {_CALL:g} s")
        except (OSError, EOFError, ValueError) as error:
            return PeerCall(lease, getattr(error, "strerror", None) or str(error))
        finally:
            if writer:
                writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Say who is here, and how many megabytes a second then came."""
        loop, size = asyncio.get_running_loop(), 0
        with suppress(OSError):  # the caller is gone, or takes too long
            async with asyncio.timeout(_CALL):
                writer.write(hexed(self._key.lease).encode())
                began = loop.time()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_SENDING):
                        while size < _SENT and (chunk := await reader.read(_CHUNK)):
                            size += len(chunk)
                writer.write(b"%f\n" % (size / (loop.time() - began) / 1e6))
                while await reader.read(_CHUNK):  # who closes first may take the answer back
                    pass
        writer.close()


async def _send(writer: asyncio.StreamWriter) -> None:
    chunk = bytes(_CHUNK)
    with suppress(OSError):
        for _ in range(_SENT // _CHUNK):
            writer.write(chunk)
            await writer.drain()


def unreached(lease: int, own: Checked, others: Others) -> Iterator[str]:
    """The fault of a node that no other reaches.

    At least one who has tried reaches another node, or is reached: else that one may be to blame.
    """
    calls = _calls({lease: own, **others})
    connected = {each for caller, call in calls if not call.error for each in (caller, call.lease)}
    mine = {caller: call.error for caller, call in calls if call.lease == lease}
    if all(mine.values()):
        for caller in sorted(mine.keys() & connected)[:1]:
            found = f"{others[caller].node} can't connect to {own.address}: {mine[caller]}"
            yield f"{found}: open all ports between nodes, or give another --advertise"


def slower(lease: int, own: Checked, others: Others) -> Iterator[str]:
    """The faults of a node that is far slower than the median of the others."""
    for each in own.speeds:
        theirs = [m.speed for other in others.values() for m in other.speeds if m.what == each.what]
        yield from _slow(each.what, each.speed, theirs)
    calls = [(caller, call) for caller, call in _calls({lease: own, **others}) if call.speed]
    mine = [call.speed for caller, call in calls if lease in (caller, call.lease)]
    theirs = [call.speed for caller, call in calls if lease not in (caller, call.lease)]
    if len(mine) >= _ROUNDS:
        yield from _slow("network (MB/s)", max(mine), theirs)


def _slow(what: str, own: float, theirs: list[float]) -> Iterator[str]:
    times = _TIMES_SLOWER.get(what.partition(" ")[0], 2.0)
    if len(theirs) >= _ENOUGH and own < median(theirs) / times:
        found = f"{what}: {own:.4g}, and the median of {len(theirs)} others is {median(theirs):.4g}"
        yield f"{found}, of which 1/{times:g} is asked for: look for heat, errors, what else runs"


def _calls(nodes: Others) -> list[tuple[int, PeerCall]]:
    """All calls, with who has made them."""
    return [(caller, call) for caller, node in nodes.items() for call in node.calls]
