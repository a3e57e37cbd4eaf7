"""ee.run in a world of one: what it does with each message and each exception."""

import asyncio
import copy
import gc
import os
import pickle
import re
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import elastic_etcd as ee
from elastic_etcd.agent.channel import ChannelServer, WorkerChannel
from elastic_etcd.errors import AgentGone, MalformedState, UsageError
from elastic_etcd.protocol.messages import (
    Bye,
    Change,
    Disconnected,
    Elastic,
    FromAgent,
    FromWorker,
    Interrupt,
    NextWorld,
    Parked,
    TrainingDone,
)
from elastic_etcd.train import abort, agent_channel, sync_point
from elastic_etcd.train.collectives import World
from elastic_etcd.train.ddp import ElasticDDP, make
from elastic_etcd.train.process_group import ProcessGroup, teardown_agentless
from elastic_etcd.train.run import _Ended, is_communication_failure
from elastic_etcd.train.state.elastic_state import ElasticState
from elastic_etcd.train.state.snapshot_store import Snapshots
from elastic_etcd.train.sync_point import WorldChanged

Heard = TypeVar("Heard", Elastic, Parked, TrainingDone, Disconnected)

RESET = "Read error [127.0.0.1]:9: Connection reset by peer"
GLOO = f"[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] {RESET}"


class State(ElasticState):
    """Remembers what was asked of it. `comes_from` is the world that its snapshot is of."""

    asked: list[str]
    comes_from: str
    worlds: list[int]

    def __init__(self) -> None:
        super().__init__(asked=[], comes_from="", worlds=[])

    def sync(self) -> bool:
        here = os.environ.get("ELASTIC_ETCD_GENERATION", "")
        self.asked.append("sync")
        other, self.comes_from = self.comes_from not in ("", here), here
        return other

    def _rewind(self) -> None:
        self.asked.append("rewind")

    def _reset(self, new: World) -> None:
        self.asked.append("reset")
        self.worlds.append(new.generation)

    def _leave(self, *, leaves: bool = False) -> None:  # noqa: ARG002
        self.asked.append("leave")

    def _uncommitted(self) -> int:
        return 7

    def _position(self) -> str:
        return "commit 120"


class Agent:
    """An agent with one worker, and the store of its generations."""

    def __init__(self) -> None:
        self.channels = ChannelServer(self._hear)
        self.name = self.channels.open()
        self.heard: asyncio.Queue[FromWorker | Disconnected] = asyncio.Queue()
        self.server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.trains = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def _hear(self, _: WorkerChannel, message: FromWorker | Disconnected) -> None:
        self.heard.put_nowait(message)

    def worker_trains(self) -> None:
        """From the worker's thread."""
        self._loop.call_soon_threadsafe(self.trains.set)

    def says(self, message: FromAgent) -> None:
        (worker,) = self.channels.channels
        assert worker.send(message)

    async def hears(self, kind: type[Heard]) -> Heard:
        async with asyncio.timeout(20):
            message = await self.heard.get()
        assert isinstance(message, kind), message
        return message

    async def parks(self) -> None:
        """The first world trains, and then a change of world is under way."""
        await self.hears(Elastic)
        await self.trains.wait()
        self.says(Change(1, "a test", leaving=False))
        await self.hears(Parked)

    async def breaks(self) -> None:
        """The first world trains, and is broken then."""
        await self.hears(Elastic)
        await self.trains.wait()
        self.says(Interrupt(1, "n2 is lost"))
        await self.hears(Parked)

    def goes_on(self, generation: int, reason: str = "a test") -> None:
        self.trains.clear()
        env = {"ELASTIC_ETCD_GENERATION": str(generation)}
        self.says(NextWorld(generation, reason, env))


@pytest.fixture
async def agent(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Agent]:
    agent = Agent()
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    variables |= {"MASTER_PORT": str(agent.server.port), "ELASTIC_ETCD_GENERATION": "1"}
    variables |= {"ELASTIC_ETCD_SOCKET": agent.name, "ELASTIC_ETCD_WORKER_PID": ""}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(agent_channel, "_channel", None)
    gc.collect()
    monkeypatch.setattr(Snapshots, "_kept", set())
    monkeypatch.setattr(Snapshots, "_closed", [])
    yield agent
    if agent_channel._channel:
        agent_channel._channel._socket.close()
    agent.channels.close()
    gc.collect()  # a group that were freed in a process forked from this one would end it


def begin(state: Any, body: Callable[[Any], Any], **options: Any) -> "asyncio.Task[Any]":
    """The worker, in a thread; what ends it comes as a pair (type of exception, its text)."""

    def live() -> Any:
        try:
            return ee.run(**options)(body)(state)
        except BaseException as error:
            if isinstance(error, Exception):
                raise
            return type(error), str(error)  # a future would make it the loop's end

    return asyncio.create_task(asyncio.to_thread(live))


def steps(agent: Agent) -> Callable[[State], None]:
    """A training that goes on until it is stopped."""

    def train(_: State) -> None:
        agent.worker_trains()
        while not sync_point.current().check():
            dist.all_reduce(torch.ones(1))
        raise WorldChanged

    return train


async def test_a_planned_change_and_an_interrupt(agent: Agent) -> None:
    state = State()
    worker = begin(state, steps(agent))
    await agent.hears(Elastic)
    await agent.trains.wait()
    agent.says(Interrupt(0, "a test"))  # of a generation that is long over
    agent.says(Change(1, "a test", leaving=False))
    assert (await agent.hears(Parked)).error == ""
    assert not dist.is_initialized()
    agent.says(Interrupt(1, "a test"))  # too late
    agent.goes_on(2)
    await agent.trains.wait()
    assert state.asked == ["sync", "leave", "sync", "reset"]
    agent.says(Interrupt(2, "a test"))
    parked = await agent.hears(Parked)
    assert (parked.generation, parked.error) == (2, "")
    agent.goes_on(3)
    await agent.trains.wait()
    assert state.asked[4:] == ["rewind", "sync", "reset"]
    assert state.worlds == [2, 3]
    agent.says(Change(3, "a test", leaving=True))
    assert await worker == (SystemExit, "0")
    assert not [t for t in threading.enumerate() if t.name.startswith("elastic_etcd")]


async def test_an_error_has_its_rank_once_in_any_world(
    agent: Agent, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    worker = begin(State(), steps(agent))
    await agent.parks()
    agent.goes_on(2)
    await agent.trains.wait()
    sys.excepthook(ValueError, ValueError("x"), None)
    agent.says(Change(2, "a test", leaving=True))
    assert await worker == (SystemExit, "0")
    assert capsys.readouterr().err == "[rank0]: ValueError: x\n"


async def test_a_change_is_one_line_of_rank_0(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    state, agent.channels.reason = State(), "n1 is lost"
    state.comes_from = "0"
    worker = begin(state, steps(agent))
    await agent.hears(Elastic)
    await agent.trains.wait()
    agent.says(Change(1, "n2 joins", leaving=False))
    await agent.hears(Parked)
    agent.goes_on(2, "n2 joins")
    await agent.trains.wait()
    agent.says(Interrupt(2, "n2 is lost"))
    await agent.hears(Parked)
    agent.goes_on(3, "n2 is lost")
    await agent.trains.wait()
    agent.says(Change(3, "a test", leaving=True))
    await worker
    told = [r.getMessage() for r in caplog.records if "goes on from" in r.getMessage()]
    anew, joined, lost = (re.sub(r"\d+\.\d\d s", "T", line) for line in told)
    here = "rank 0 of 1 goes on from commit 120"
    where = f"{here} after T; trained again:"
    assert anew == f"generation 1 (n1 is lost): {here} in a new process"
    assert joined == f"generation 2 (n2 joins): {where} nothing"
    assert lost == f"generation 3 (n2 is lost): {where} 7 steps and the one under way"


@pytest.mark.parametrize(
    ("again", "told"),
    [
        (-1, "nothing"),
        (0, "the step under way"),
        (1, "1 step and the one"),
        (7, "7 steps and the one"),
    ],
)
def test_n8_what_is_trained_again_has_the_right_number(again: int, told: str) -> None:
    cost = _Ended(here=True, at=time.monotonic_ns(), again=again).cost()
    assert f"; trained again: {told}" in cost


async def test_g8_what_fails_before_the_state_is_there_is_a_broken_world_s(agent: Agent) -> None:
    """What an abort leaves in a transfer is no snapshot, and no mistake of the user's."""

    class Garbage(State):
        def sync(self) -> bool:
            if len(self.asked) == 1:
                agent.worker_trains()
                while not any(t.name == "elastic_etcd abort" for t in threading.enumerate()):
                    time.sleep(0.01)
                broken.set()
                raise MalformedState("rank 1 sent no header of a snapshot")
            return super().sync()

    broken = threading.Event()
    state = Garbage()
    state.asked.append("begun")
    worker = begin(state, steps(agent))
    await agent.hears(Elastic)
    await agent.trains.wait()
    agent.says(Interrupt(1, "n2 is lost"))
    await asyncio.to_thread(broken.wait, 20)
    assert (await agent.hears(Parked)).generation == 1
    agent.says(Bye("a test"))
    assert await worker == (SystemExit, "0")
    assert state.asked == ["begun"], "there is no commit to go back to"


def after_the_break(agent: Agent, then: Callable[[], Any]) -> Callable[[Any], Any]:
    """A training that does this once its first world is broken, and then has trained."""
    worlds: list[int] = []

    def train(state: Any) -> Any:
        worlds.append(1)
        agent.worker_trains()
        while len(worlds) == 1:
            if any(t.name == "elastic_etcd abort" for t in threading.enumerate()):
                return then()
            time.sleep(0.01)
        return "trained"

    return train


async def test_g8_a_training_that_returns_in_a_broken_world_is_not_done(agent: Agent) -> None:
    """A collective of NCCL's that is aborted may have told it so."""
    worker = begin(State(), after_the_break(agent, lambda: "told by garbage"))
    await agent.breaks()
    agent.goes_on(2)
    assert await worker == "trained"


@pytest.mark.parametrize("error", [FloatingPointError("the loss is nan"), SystemExit(0)])
async def test_g8_what_nccl_s_garbage_leads_to_is_no_mistake_of_the_user_s(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(abort, "has_nccl", lambda: True)

    def raises() -> None:
        raise error

    worker = begin(State(), after_the_break(agent, raises))
    await agent.breaks()
    agent.goes_on(2)
    assert await worker == "trained"


async def test_g8_what_fails_so_in_a_world_that_is_whole_is_told(agent: Agent) -> None:
    class Garbage(State):
        def sync(self) -> bool:
            raise MalformedState("rank 1 sent no header of a snapshot")

    with pytest.raises(MalformedState, match="no header"):
        await begin(Garbage(), steps(agent))


async def test_t8_what_finally_blocks_do_is_in_the_commit_of_a_planned_change(
    agent: Agent,
) -> None:
    state = ee.ElasticState(epoch=0, step=0)
    seen: list[tuple[int, int]] = []

    def train(state: Any) -> None:
        state.restore()  # what a newcomer gets
        seen.append((state.step, state.epoch))
        try:
            while True:
                agent.worker_trains()
                dist.all_reduce(torch.ones(1))
                state.step += 1
                state.check()
        finally:
            state.epoch += 1

    worker = begin(state, train)
    await agent.parks()
    agent.goes_on(2)
    await agent.trains.wait()
    agent.says(Change(2, "a test", leaving=True))
    assert await worker == (SystemExit, "0")
    (_, first), (step, second) = seen
    assert step > 0
    assert (first, second) == (0, 1)


async def test_t9_a_group_that_finally_has_destroyed_is_no_failure(agent: Agent) -> None:
    """As torch's own tutorials do."""
    state = ee.ElasticState(step=0)

    def train(state: Any) -> None:
        try:
            while True:
                agent.worker_trains()
                dist.all_reduce(torch.ones(1))
                state.step += 1
                state.check()
        finally:
            dist.destroy_process_group()

    worker = begin(state, train)
    await agent.parks()
    agent.goes_on(2)
    await agent.trains.wait()
    agent.says(Change(2, "a test", leaving=True))
    assert await worker == (SystemExit, "0")
    assert state.step > 1


class Trainer:
    @ee.run
    def train(self, epochs: int, state: ee.ElasticState) -> tuple[Any, ...]:
        return self, epochs, state


def test_t12_training_may_be_a_method() -> None:
    trainer, state = Trainer(), ee.ElasticState(step=0)
    assert trainer.train(3, state=state) == (trainer, 3, state)
    with pytest.raises(UsageError, match=r"Trainer\.train needs its ElasticState as an argument"):
        trainer.train(3, state={})  # type: ignore[arg-type]


def test_t12_a_call_that_would_train_nothing_is_refused() -> None:
    def generator(state: Any) -> Iterator[Any]:
        yield state

    async def coroutine(state: Any) -> None:
        await state

    for train in (generator, coroutine):
        with pytest.raises(UsageError, match=f"{train.__name__} only makes a generator or coro"):
            ee.run(train)


async def test_t11_states_that_are_gone_are_dropped_by_the_agent(agent: Agent) -> None:
    def one_after_the_other() -> set[str]:
        for number in range(12):
            state = ee.ElasticState(number=number)
            state.commit()
            state.restore()
            del state
        return {name for _, name in agent.channels.kept}

    assert len(await asyncio.to_thread(one_after_the_other)) == 2


async def test_t11_more_states_than_the_agent_keeps_are_an_error_of_the_script(
    agent: Agent,
) -> None:
    def all_at_once() -> None:
        states = [ee.ElasticState(number=number) for number in range(9)]
        for each in states:
            each.commit()

    with pytest.raises(UsageError, match="8 ElasticStates"):
        await asyncio.to_thread(all_at_once)
    assert agent_channel._channel
    await asyncio.to_thread(ee.leaving)


async def test_t15_a_module_is_there_before_one_rank_alone_uses_it(agent: Agent) -> None:
    """Else an evaluation on rank 0 would wait for the others in DDP's constructor."""
    module = ee.ddp(torch.nn.Linear(2, 1))
    made = []

    def train(state: State) -> None:
        made.append(module._made is not None)
        steps(agent)(state)

    worker = begin(State(), train)
    await agent.parks()
    assert module._made is None
    agent.goes_on(2)
    await agent.trains.wait()
    agent.says(Change(2, "a test", leaving=True))
    assert await worker == (SystemExit, "0")
    assert made == [True, True]


def devices() -> int:
    """How many epoll instances there are: one of gloo's for each process group."""
    links = [
        str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()
    ]
    return links.count("anon_inode:[eventpoll]")


def devices_without_garbage() -> int:
    """Stores have epoll instances, too, and earlier tests' may not have been collected."""
    gc.collect()
    return devices()


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

    before = devices_without_garbage()
    worker = begin(Counting(), train)
    await agent.hears(Elastic)
    for generation in (1, 2, 3):
        await agent.trains.wait()
        agent.says(Change(generation, "a test", leaving=False))
        await agent.hears(Parked)
        agent.goes_on(generation + 1)
    await agent.trains.wait()
    agent.says(Change(4, "a test", leaving=True))
    assert await worker == (SystemExit, "0")
    assert counts == [before + 1] * 4


def gloo_threads() -> list[str]:
    names = []
    for thread in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):
            names.append((thread / "comm").read_text().strip())
    return [name for name in names if "gloo" in name]


@pytest.mark.parametrize("broken", [False, True])
async def test_g1_the_agent_hears_of_it_when_the_group_s_threads_are_gone(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    """What a group leaves, a DDP module in its cycles holds."""
    before, at_parked = len(gloo_threads()), list[int]()
    send = agent_channel.Channel.send

    def park(self: agent_channel.Channel, message: FromWorker, fd: int = -1) -> None:
        if isinstance(message, Parked):
            at_parked.append(len(gloo_threads()))
        send(self, message, fd)

    def train(state: State) -> None:
        module = DistributedDataParallel(torch.nn.Linear(2, 1))
        module(torch.ones(1, 2)).sum().backward()
        assert len(gloo_threads()) > before
        steps(agent)(state)

    monkeypatch.setattr(agent_channel.Channel, "send", park)
    worker = begin(State(), train)
    await agent.hears(Elastic)
    await agent.trains.wait()
    agent.says(Interrupt(1, "a test") if broken else Change(1, "a test", leaving=False))
    await agent.hears(Parked)
    assert at_parked == [before]
    agent.says(Bye("a test"))
    assert await worker == (SystemExit, "0")


async def test_g2_the_agent_is_told_what_nccl_has_met(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the cause, since nobody else has failed."""
    monkeypatch.setattr(abort, "uses_nccl", lambda: True)
    monkeypatch.setattr(abort, "nccl_error", lambda: "TIMEOUT")
    worker = begin(State(), steps(agent), backend="gloo")
    await agent.hears(Elastic)
    assert (await agent.hears(Parked)).error == "NCCL has met an error: TIMEOUT"
    agent.says(Bye("a test"))
    assert await worker == (SystemExit, "0")


async def test_a_group_is_freed_after_its_modules(agent: Agent) -> None:
    """A module with the last reference keeps the GIL from gloo's threads, which may need it."""
    group = ProcessGroup(1, os.environ)
    group.init("gloo", {})
    module = DistributedDataParallel(torch.nn.Linear(2, 1))
    module.__dict__["itself"] = module
    group.teardown(broken=False)
    torchs = weakref.ref(group._groups[0])
    freed: list[bool] = []
    weakref.finalize(module, lambda: freed.append(torchs() is None))
    del module
    group.release()
    assert (freed, torchs()) == ([False], None)


class Last:
    """In a module's fields after its reducer: notes what is open when that has gone."""

    def __init__(self, seen: list[int]) -> None:
        self.seen = seen

    def __del__(self) -> None:
        self.seen.append(devices())


def watched(seen: list[int], group: Any = None) -> DistributedDataParallel:
    module = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
    module.__dict__["last"] = Last(seen)
    return module


async def test_a_group_is_freed_after_a_module_that_outlives_its_world(agent: Agent) -> None:
    """Also one that the user has made; and both go with the next world."""
    before, seen = devices_without_garbage(), list[int]()
    group = ProcessGroup(1, os.environ)
    group.init("gloo", {})
    modules = [watched(seen), watched(seen, dist.new_group([0]))]
    group.teardown(broken=False)
    group.release()
    modules.clear()
    gc.collect()
    assert seen == [before + 2] * 2, "a module's end has freed a group"
    group = ProcessGroup(2, os.environ)
    group.init("gloo", {})
    group.teardown(broken=False)
    group.release()
    assert devices() == before


async def test_a_group_is_freed_after_a_module_in_a_traceback(agent: Agent) -> None:
    """The user's own error leaves ee.run with the frames of train, and all in them."""
    before, seen = devices_without_garbage(), list[int]()

    def train(_: State) -> None:
        module = watched(seen)
        raise ValueError(type(module))

    with pytest.raises(ValueError, match="Distributed") as error:
        await begin(State(), train)
    assert not seen
    error.value.__traceback__ = None
    del error
    gc.collect()
    assert seen == [before + 1], "a module's end has freed the group"


async def test_an_interrupt_before_the_process_group_stands(agent: Agent) -> None:
    """What the agent says right after `world` is about that world."""
    state = State()
    worker = begin(state, steps(agent))
    await agent.trains.wait()
    agent.says(Change(1, "a test", leaving=False))
    await agent.hears(Elastic)
    await agent.hears(Parked)
    agent.goes_on(2)
    agent.says(Interrupt(2, "a test"))
    assert (await agent.hears(Parked)).generation == 2
    agent.says(Bye("a test"))
    assert await worker == (SystemExit, "0")


async def test_a_peer_that_is_gone(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    """The worker parks by itself, and says why; then the job is over."""
    caplog.set_level("DEBUG", "elastic_etcd")

    def train(_: State) -> None:
        raise RuntimeError(GLOO)

    state = State()
    worker = begin(state, train)
    await agent.hears(Elastic)
    error = (await agent.hears(Parked)).error
    assert error.startswith(f"RuntimeError: {GLOO}\nTraceback")
    assert "in train" in error
    (debug,) = (record for record in caplog.records if record.exc_info)
    assert debug.levelname == "DEBUG"
    assert debug.exc_text and "in train" in debug.exc_text
    agent.says(Bye("a test"))
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
    await agent.hears(Elastic)
    await agent.hears(TrainingDone)
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
    agent.says(Change(1, "a test", leaving=False))
    await agent.hears(Elastic)
    await agent.hears(Parked)
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


def test_a_group_is_freed_after_a_module_that_outlives_it_without_an_agent() -> None:
    before, seen = devices_without_garbage(), list[int]()
    modules = ee.run(backend="gloo")(lambda _: [watched(seen)])(State())
    assert not dist.is_initialized()
    modules.clear()
    gc.collect()
    assert seen == [before + 1], "a module's end has freed the group"


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
        (RuntimeError(RESET), False, False),
        (
            RuntimeError(f"Caught RuntimeError in DataLoader worker process 0.\n{GLOO}"),
            False,
            False,
        ),
        (dist.DistBackendError("NCCL error\nncclInvalidUsage: This reflects"), False, False),
        (dist.DistBackendError("NCCL error\nCuda failure 2 'out of memory'"), False, False),
        (dist.DistBackendError("NCCL error\nncclInvalidUsage: This reflects"), True, True),
        (RuntimeError("anything"), True, True),
        (raised_from(RuntimeError("anything")), True, True),
        (ValueError(GLOO), False, False),
        (OfTheirOwn(GLOO), True, False),
        (KeyError("anything"), True, False),
        (KeyboardInterrupt(), True, False),
    ],
    ids=repr,
)
def test_t13_which_errors_are_the_world_s(error: BaseException, broken: bool, lost: bool) -> None:
    assert is_communication_failure(error, broken=broken) == lost


def test_a_module_that_is_wrapped_once() -> None:
    inner = torch.nn.Linear(2, 1)
    module = ee.ddp(inner, find_unused_parameters=True)
    assert list(module.state_dict()) == ["module.weight", "module.bias"]
    assert list(module.parameters()) == list(inner.parameters())
    made = []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        module(torch.ones(1, 2)).sum().backward()
        with module.no_sync():
            made.append(module.ddp)
        assert made[-1].find_unused_parameters
        assert module.ddp is made[-1]
        teardown_agentless()
    assert made[0] is not made[1]
    assert list(module.state_dict()) == ["module.weight", "module.bias"]


def test_a_copy_of_a_wrapped_module_is_of_no_world_that_is_over() -> None:
    """An average is never trained: DDP is not made for it, nor where one rank alone has it."""
    module = ee.ddp(torch.nn.Linear(2, 1))
    average, twin = AveragedModel(module), copy.deepcopy(module)
    average.requires_grad_(requires_grad=False)  # DDP would refuse it
    inputs = torch.ones(1, 2)
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        make()
        assert module._made
        for each in (module, twin):
            each(inputs).sum().backward()
            assert each.ddp.process_group is dist.group.WORLD
        copies: list[ElasticDDP] = [average.module, copy.deepcopy(twin)]
        copies.append(pickle.loads(pickle.dumps(module)))
        with torch.no_grad():
            for each in (average, *copies):
                assert each(inputs).shape == (1, 1)
        assert [each._made for each in copies] == [None] * 3
        teardown_agentless()
        assert not twin._made


def test_a_second_run_says_which_steps_it_undoes(caplog: pytest.LogCaptureFixture) -> None:
    state = ElasticState(step=0)

    @ee.run
    def train(state: ElasticState, steps: int) -> int:
        began = state.step
        for _ in range(steps):
            state.step += 1
            state.commit(every=2)
        return int(began)

    assert [train(state, steps) for steps in (2, 5, 0)] == [0, 2, 6]
    (told,) = [each for each in caplog.messages if "last commit" in each]
    assert "without the 1 step since then: call state.commit() at the end" in told
    state.step = 9
    state.commit()
    assert train(state, 0) == 9
