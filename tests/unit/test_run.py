"""ee.run in a world of one: what it does with each message and each exception."""

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.nn.parallel import DistributedDataParallel

import elastic_etcd as ee
from elastic_etcd.agent.channel import Channels, Peer
from elastic_etcd.errors import AgentGone, UsageError
from elastic_etcd.train import boundary, channel
from elastic_etcd.train.boundary import WorldChanged
from elastic_etcd.train.ddp import forget
from elastic_etcd.train.failures import is_communication_failure
from elastic_etcd.train.world import World

RESET = "Read error [127.0.0.1]:9: Connection reset by peer"
GLOO = f"[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] {RESET}"


class State:
    """Remembers what was asked of it. `comes_from` is the world that its snapshot is of."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.comes_from = ""

    def sync(self) -> bool:
        here = os.environ.get("ELASTIC_ETCD_GENERATION", "")
        self.asked.append("sync")
        other, self.comes_from = self.comes_from not in ("", here), here
        return other

    def _rewind(self) -> None:
        self.asked.append("rewind")

    def _reset(self) -> None:
        self.asked.append("reset")


class Agent:
    """An agent with one worker, and the store of its generations."""

    def __init__(self) -> None:
        self.channels = Channels(self._hear, print)
        self.path = self.channels.open()
        self.heard: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.trains = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def _hear(self, _: Peer, message: dict[str, Any]) -> None:
        self.heard.put_nowait(message)

    def worker_trains(self) -> None:
        """From the worker's thread."""
        self._loop.call_soon_threadsafe(self.trains.set)

    def says(self, kind: str, generation: int = 1, **fields: Any) -> None:
        (peer,) = self.channels.peers
        assert peer.send({"type": kind, "generation": generation, "reason": "a test", **fields})

    async def hears(self, kind: str) -> dict[str, Any]:
        async with asyncio.timeout(20):
            message = await self.heard.get()
        assert message["type"] == kind, message
        return message

    def goes_on(self, generation: int) -> None:
        self.trains.clear()
        self.says("world", generation, env={"ELASTIC_ETCD_GENERATION": str(generation)})


@pytest.fixture
async def agent(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Agent]:
    agent = Agent()
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": str(agent.server.port), "ELASTIC_ETCD_GENERATION": "1"}
    for name, value in (place | {"ELASTIC_ETCD_SOCKET": agent.path}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(channel, "_channel", None)
    yield agent
    if channel._channel:
        channel._channel._socket.close()
    agent.channels.close()
    gc.collect()  # a group that were freed in a process forked from this one would end it


def begin(state: State, body: Callable[[State], Any]) -> "asyncio.Task[Any]":
    """The worker, in a thread; what ends it comes as a pair (type of exception, its text)."""

    def live() -> Any:
        try:
            return ee.run(body)(state)
        except BaseException as error:
            if isinstance(error, Exception):
                raise
            return type(error), str(error)  # a future would make it the loop's end

    return asyncio.create_task(asyncio.to_thread(live))


def steps(agent: Agent) -> Callable[[State], None]:
    """A training that goes on until it is stopped."""

    def train(_: State) -> None:
        agent.worker_trains()
        while not boundary.check():
            dist.all_reduce(torch.ones(1))
        raise WorldChanged

    return train


async def test_a_planned_change_and_an_interrupt(agent: Agent) -> None:
    state = State()
    worker = begin(state, steps(agent))
    await agent.hears("elastic")
    await agent.trains.wait()
    agent.says("interrupt", 0)  # of a generation that is long over
    agent.says("change", leaving=False)
    assert (await agent.hears("parked"))["error"] == ""
    assert not dist.is_initialized()
    agent.says("interrupt")  # too late
    agent.goes_on(2)
    await agent.trains.wait()
    assert state.asked == ["sync", "sync", "reset"]
    agent.says("interrupt", 2)
    parked = await agent.hears("parked")
    assert (parked["generation"], parked["error"]) == (2, "")
    agent.goes_on(3)
    await agent.trains.wait()
    assert state.asked[3:] == ["rewind", "sync", "reset"]
    agent.says("change", 3, leaving=True)
    await agent.hears("parked")
    assert await worker == (SystemExit, "0")
    assert not [t for t in threading.enumerate() if t.name.startswith("elastic_etcd")]


def devices() -> int:
    """How many epoll instances there are: one of gloo's for each process group."""
    links = [
        str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()
    ]
    return links.count("anon_inode:[eventpoll]")


async def test_a_world_leaves_nothing_open(agent: Agent) -> None:
    """Gloo's sockets and threads go with it, also those of the process's first DDP module."""
    model = torch.nn.Linear(2, 1)
    counts: list[int] = []

    class Counting(State):
        def sync(self) -> bool:
            counts.append(devices())  # this world's, and what the ones before it have left
            return super().sync()

    def train(state: State) -> None:
        ddp = DistributedDataParallel(model)
        ddp(torch.ones(1, 2)).sum().backward()
        steps(agent)(state)

    before = devices()
    worker = begin(Counting(), train)
    await agent.hears("elastic")
    for generation in (1, 2, 3):
        await agent.trains.wait()
        agent.says("change", generation, leaving=False)
        await agent.hears("parked")
        agent.goes_on(generation + 1)
    await agent.trains.wait()
    agent.says("change", 4, leaving=True)
    assert await worker == (SystemExit, "0")
    assert counts == [before + 1] * 4


async def test_a_group_is_freed_after_its_modules(agent: Agent) -> None:
    """A module with the last reference keeps the GIL from gloo's threads, which may need it."""
    world = World(1, os.environ)
    world.form("gloo", {})
    module = DistributedDataParallel(torch.nn.Linear(2, 1))
    module.__dict__["itself"] = module
    world.drop(broken=False)
    group = weakref.ref(world._group)
    freed: list[bool] = []
    weakref.finalize(module, lambda: freed.append(group() is None))
    del module
    world.collect()
    assert (freed, group()) == ([False], None)


async def test_an_interrupt_before_the_process_group_stands(agent: Agent) -> None:
    """What the agent says right after `world` is about that world."""
    state = State()
    worker = begin(state, steps(agent))
    await agent.trains.wait()
    agent.says("change", leaving=False)
    for kind in ("elastic", "parked"):
        await agent.hears(kind)
    agent.goes_on(2)
    agent.says("interrupt", 2)
    assert (await agent.hears("parked"))["generation"] == 2
    agent.says("bye")
    assert await worker == (SystemExit, "0")


async def test_a_peer_that_is_gone(agent: Agent) -> None:
    """The worker parks by itself, and says why; then the job is over."""

    def train(_: State) -> None:
        raise RuntimeError(GLOO)

    state = State()
    worker = begin(state, train)
    await agent.hears("elastic")
    assert (await agent.hears("parked"))["error"] == f"RuntimeError: {GLOO}"
    agent.says("bye")
    assert await worker == (SystemExit, "0")
    assert state.asked == ["sync", "rewind"]


@pytest.mark.parametrize("error", [ValueError("mine"), RuntimeError("mine"), KeyboardInterrupt()])
async def test_the_user_s_own_errors(agent: Agent, error: BaseException) -> None:
    def train(_: State) -> None:
        raise error

    worker = begin(State(), train)
    if isinstance(error, Exception):
        with pytest.raises(type(error), match="mine"):
            await worker
    else:
        assert await worker == (KeyboardInterrupt, "")
    assert not dist.is_initialized()
    await agent.hears("elastic")
    assert agent.heard.empty()


async def test_what_train_returns_ends_it(agent: Agent) -> None:
    """And a second one in the same generation finds no keys of the first."""
    for _ in range(2):
        seen = await begin(
            State(), lambda _: dist.distributed_c10d._get_default_store().add("seen", 1)
        )
        assert seen == 1
        assert not dist.is_initialized()


async def test_the_agent_ends(agent: Agent) -> None:
    worker = begin(State(), steps(agent))
    await agent.trains.wait()
    agent.says("change", leaving=False)
    for kind in ("elastic", "parked"):
        await agent.hears(kind)
    agent.channels.close()
    with pytest.raises(AgentGone, match="has hung up"):
        await worker


async def test_a_group_of_the_user_s_own(agent: Agent) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match="there is a process group already"):
            await begin(State(), steps(agent))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize("torchrun", [False, True])
def test_without_an_agent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, torchrun: bool
) -> None:
    if torchrun:
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        variables |= {"MASTER_PORT": str(server.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    @ee.run(backend="gloo")
    def train(state: State, more: int, *, named: int) -> Any:
        assert state.asked == ["sync"]
        return dist.get_world_size() + more + named

    assert train(State(), 10, named=100) == 111
    assert not dist.is_initialized()
    assert "python -m elastic_etcd.launch" in caplog.text


class OfTheirOwn(RuntimeError):
    pass


def raised_from(cause: BaseException) -> BaseException:
    error = ValueError("the loop failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "broken", "lost"),
    [
        (dist.DistBackendError("NCCL error"), False, True),
        (dist.DistNetworkError("closed"), False, True),
        (dist.DistStoreError("timeout"), False, True),
        (RuntimeError(GLOO), False, True),
        (RuntimeError("NCCL communicator was aborted on rank 0"), False, True),
        (raised_from(RuntimeError(GLOO)), False, True),
        (RuntimeError("shape '[3]' is invalid for input of size 4"), False, False),
        (RuntimeError("anything"), True, True),
        (raised_from(RuntimeError("anything")), True, True),
        (ValueError(GLOO), False, False),
        (OfTheirOwn(GLOO), True, False),
        (KeyError("anything"), True, False),
        (KeyboardInterrupt(), True, False),
    ],
    ids=repr,
)
def test_which_errors_are_the_world_s(error: BaseException, broken: bool, lost: bool) -> None:
    assert is_communication_failure(error, broken=broken) == lost


def test_a_module_that_is_wrapped_once() -> None:
    inner = torch.nn.Linear(2, 1)
    module = ee.ddp(inner, find_unused_parameters=True)
    assert list(module.state_dict()) == ["module.weight", "module.bias"]
    assert list(module.parameters()) == list(inner.parameters())
    groups: list[Any] = []
    made = []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        module(torch.ones(1, 2)).sum().backward()
        groups.append(dist.group.WORLD)  # to the end: no module's end may wait for gloo's threads
        with module.no_sync():
            made.append(module.ddp)
        assert made[-1].find_unused_parameters
        assert module.ddp is made[-1]
        forget()
        dist.destroy_process_group()
    assert made[0] is not made[1]
    assert list(module.state_dict()) == ["module.weight", "module.bias"]
