"""Clients in asynchronous tests: an event loop for each, and waiting for what etcd tells."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, Self

from elastic_etcd.core.txn import Get, Put, Snapshot, Txn
from elastic_etcd.etcd.access import EtcdConfig
from elastic_etcd.etcd.client import Client
from elastic_etcd.etcd.mirror import Mirror

P = ParamSpec("P")


def asynchronous(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run the test in an event loop of its own; it must leave no task behind."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def checked() -> None:
            await test(*args, **kwargs)
            left = asyncio.all_tasks() - {asyncio.current_task()}
            if left:  # gRPC's own tasks for a cancelled call take one more moment
                _, left = await asyncio.wait(left, timeout=1)
            assert not left, f"left behind: {left}"

        asyncio.run(checked())

    return run


class Copy:
    """A mirror whose changes a test can wait for."""

    def __init__(
        self,
        client: Client,
        *ranges: Get,
        reconcile: float = 1000,
        kind: type[Mirror] = Mirror,
    ) -> None:
        self._event = asyncio.Event()
        self.mirror = kind(client, ranges, self._event.set, reconcile)
        self.mirror.failed.add_done_callback(lambda _: self._event.set())

    async def __aenter__(self) -> Self:
        await self.mirror.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.mirror.__aexit__(None, None, None)

    @property
    def values(self) -> dict[str, str]:
        snapshot = self.mirror.snapshot()
        return {} if snapshot is None else {kv.key: kv.value for kv in snapshot.kvs.values()}

    async def until(
        self, condition: Callable[[dict[str, str]], bool], timeout: float = 60
    ) -> Snapshot:
        """The first snapshot whose values satisfy the condition."""
        try:
            async with asyncio.timeout(timeout):
                while (snapshot := self.mirror.snapshot()) is None or not condition(self.values):
                    if self.mirror.failed.done():
                        self.mirror.failed.result()
                    self._event.clear()
                    await self._event.wait()
                return snapshot
        except TimeoutError:
            raise AssertionError(f"not within {timeout} s: {self.values}") from None


async def attached(config: EtcdConfig, endpoint: str) -> Client:
    """A client whose connection to `endpoint` is established."""
    first = (endpoint, *(other for other in config.endpoints if other != endpoint))
    client = Client(EtcdConfig(first))
    client._at = 0
    await client.range(Get("/"), timeout=10)
    assert client.endpoint == endpoint
    return client


async def put(client: Client, key: str, value: str = "", lease: int = 0) -> int:
    """Write one key; the revision."""
    return (await client.txn(Txn((), (Put(key, value, lease),)), timeout=10)).revision


async def elapse(seconds: float) -> None:
    """Let time pass, where time itself is what the test is about (a TTL)."""
    never = asyncio.get_running_loop().create_future()
    await asyncio.wait({never}, timeout=seconds)
