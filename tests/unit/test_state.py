"""What a script sees of a state in one process: values, codecs, commits, files."""

import asyncio
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

import elastic_etcd.train.channel
from elastic_etcd.agent.channel import ChannelServer, WorkerChannel
from elastic_etcd.errors import MalformedState, StaleGeneration, UsageError
from elastic_etcd.protocol import AskCurrent, Current, Disconnected, FromWorker
from elastic_etcd.train import sync_point
from elastic_etcd.train.snapshot import Version
from elastic_etcd.train.state import ElasticState
from tests.support.forked import Child, group


def network() -> nn.Module:
    tied = nn.Linear(4, 4)
    return nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.Flatten(), tied, tied)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for step in range(steps):

        def loss(step: int = step) -> Any:
            optimizer.zero_grad()
            made = model(torch.full((3, 4, 1), step + 1.0)).square().mean()
            made.backward()
            return made

        optimizer.step(loss)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return bool(torch.equal(one, other)) and one.dtype == other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    return [copied(v) for v in value] if type(value) is list else value


def test_values_are_attributes() -> None:
    state = ElasticState(epoch=0, best={"loss": 1.5})
    state.epoch += 1
    state.best["loss"] = 0.5
    assert (state.epoch, state.best) == (1, {"loss": 0.5})
    assert {"epoch", "best", "commit"} <= set(dir(state))
    with pytest.raises(AttributeError, match="epcoh"):
        state.epcoh = 3
    with pytest.raises(AttributeError, match="no value named 'rounds'"):
        print(state.rounds)
    for name in ("commit", "sync", "_x", "__class__"):
        with pytest.raises(UsageError, match=name):
            ElasticState(**{name: 1})  # type: ignore[arg-type]


def test_restore_goes_back_to_the_last_commit_and_again() -> None:
    weights = torch.ones(3)
    state = ElasticState(epoch=0, log=[(1, "a")], none=None, ema=weights)
    with pytest.raises(UsageError, match="nothing to restore"):
        state.restore()
    state.commit()
    for _ in range(2):
        state.epoch, state.none = 7, 8
        state.log.append((2, "b"))
        state.ema.add_(5)
        state.restore()
        assert (state.epoch, state.log, state.none) == (0, [(1, "a")], None)
        assert state.ema.tolist() == [1, 1, 1]
    state.epoch = 3
    state.commit()
    state.restore()
    assert state.epoch == 3


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 0.1, amsgrad=True),
    "adamw-tensor-lr": lambda p: torch.optim.AdamW(p, torch.tensor(0.1), foreach=False),
    "adafactor": torch.optim.Adafactor,
    "lbfgs": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=4),
    "rmsprop": torch.optim.RMSprop,
    "groups": lambda p: torch.optim.Adagrad([{"params": list(p), "lr": 0.3}], 0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_after_a_restore_as_if_nothing_had_been(name: str) -> None:
    torch.manual_seed(0)
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    state = ElasticState(model=model, optimizer=optimizer)
    trained(model, optimizer, 2)
    state.commit()
    ends = []
    for _ in range(3):
        trained(model, optimizer, 3)
        ends.append(copied([dict(model.state_dict()), optimizer.state_dict()]))
        state.restore()
    assert same(ends[0], ends[1])
    assert same(ends[0], ends[2])


def test_a_restored_optimizer_keeps_its_tensors_and_not_the_snapshot_s() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    state = ElasticState(model=model, optimizer=optimizer)
    state.commit()  # no moments yet
    trained(model, optimizer)
    state.commit()
    places = [t.data_ptr() for row in optimizer.state.values() for t in row.values()]
    state.restore()
    assert places == [t.data_ptr() for row in optimizer.state.values() for t in row.values()]
    newcomer = torch.optim.Adam(model.parameters())
    state.optimizer = newcomer
    state.restore()
    newest = state._open_memfds().newest_intact()
    assert newest is not None
    trained(model, newcomer, 2)
    assert newest.is_intact()


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: schedules.StepLR(o, 2),
    "milestones": lambda o: schedules.MultiStepLR(o, [2, 3]),
    "cosine": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3),
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.5, total_steps=20),
    "cyclic": lambda o: schedules.CyclicLR(o, 0.01, 0.1),
    "plateau": schedules.ReduceLROnPlateau,
    "lambda": lambda o: schedules.LambdaLR(o, lambda epoch: 0.9**epoch),
    "sequence": lambda o: schedules.SequentialLR(
        o, [schedules.ConstantLR(o), schedules.ExponentialLR(o, 0.5)], [2]
    ),
    "chained": lambda o: schedules.ChainedScheduler([schedules.LinearLR(o)]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_where_it_was(name: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1, momentum=0.9)
    scheduler = SCHEDULES[name](optimizer)
    state = ElasticState(optimizer=optimizer, scheduler=scheduler)

    def rates(steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step(*([1.0] if name == "plateau" else []))
            found.append(float(optimizer.param_groups[0]["lr"]))
        return found

    rates(2)
    state.commit()
    once = rates(5)
    state.restore()
    assert rates(5) == once


def test_a_generator_and_a_scaler_go_on_where_they_were() -> None:
    generator = torch.Generator()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    state = ElasticState(generator=generator, scaler=scaler)
    state.commit()
    first = torch.rand(5, generator=generator)
    scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0})
    state.restore()
    assert torch.equal(torch.rand(5, generator=generator), first)
    assert scaler.state_dict()["scale"] == 8.0


def test_a_scaler_that_is_disabled() -> None:
    """As a script has it that also runs without a GPU."""
    state = ElasticState(scaler=torch.amp.GradScaler("cpu", enabled=False), step=0)
    state.commit()
    state.step = 1
    state.restore()
    assert state.step == 0


def test_an_unfinished_step_leaves_nothing() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    state = ElasticState(model=model, optimizer=optimizer, scaler=scaler)

    def half_a_step() -> None:
        scaler.scale(model(torch.ones(3, 4, 1)).sum()).backward()
        scaler.unscale_(optimizer)

    state.sync()
    half_a_step()
    state.restore()
    assert all(parameter.grad is None for parameter in model.parameters())
    half_a_step()  # a scaler that remembers the other half would refuse
    state._rewind()
    half_a_step()
    state.sync()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_wrapped_module_has_the_snapshot_of_the_module(tmp_path: Path) -> None:
    with group(0, 1, tmp_path):
        model = nn.Linear(2, 3)
        wrapped = nn.parallel.DistributedDataParallel(model)
        state = ElasticState(model=wrapped)
        state.commit()
        before = model.weight.detach().clone()
        state.model = other = nn.Linear(2, 3)
        state.restore()
        assert torch.equal(other.weight, before)
        state.model = torch.compile(wrapped, backend="eager")
        nn.init.zeros_(model.weight)
        state.restore()
        assert torch.equal(model.weight, before)


class Counted:
    def __init__(self, count: int) -> None:
        self.count = count


class More(Counted):
    pass


class CountedCodec:
    def save(self, value: Counted) -> Any:
        return {"count": torch.tensor(value.count)}

    def load(self, value: Counted, saved: Any) -> Counted:
        value.count = int(saved["count"])
        return value


def test_users_register_codecs_and_subclasses_have_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("elastic_etcd.train.codecs._codecs", {})
    state = ElasticState(counted=More(3))
    with pytest.raises(UsageError, match=r"counted is a .*More"):
        state.commit()
    ElasticState.register(Counted, CountedCodec())
    state.commit()
    kept = state.counted
    kept.count = 9
    state.restore()
    assert state.counted is kept
    assert kept.count == 3
    with pytest.raises(UsageError, match="save"):
        ElasticState.register(Counted, object())  # type: ignore[arg-type]


def test_pickle_is_an_option() -> None:
    state = ElasticState(allow_pickle=True, path=Path("a"))
    state.commit()
    state.path = Path("b")
    state.restore()
    assert state.path == Path("a")


def test_a_failed_commit_leaves_the_one_before() -> None:
    state = ElasticState(epoch=1, thing=None)
    state.commit()
    state.epoch, state.thing = 2, object()
    with pytest.raises(UsageError, match="thing is a"):
        state.commit()
    state.restore()
    assert state.epoch == 1


def test_every_nth_call_commits() -> None:
    state = ElasticState(step=0)
    committed = []
    for step in range(1, 10):
        state.step = step
        state.commit(every=4)
        committed.append(state._open_memfds().version())
    assert [v.counter if v else 0 for v in committed] == [0, 0, 0, 1, 1, 1, 1, 2, 2]
    state.restore()
    assert state.step == 8
    with pytest.raises(UsageError, match="at least 1"):
        state.commit(every=0)


def test_alone_in_the_world_sync_is_the_first_commit_and_then_a_restore() -> None:
    state = ElasticState(step=3)
    state.sync()
    state.step = 4
    state.sync()
    assert state.step == 3
    state.step = 5
    state.commit()
    state.sync()
    assert state.step == 5


def test_a_planned_change_commits_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    state = ElasticState(step=3)
    state.check()
    assert state._open_memfds().version() is None
    monkeypatch.setattr(sync_point, "check", lambda: True)
    with pytest.raises(sync_point.WorldChanged):
        state.check()
    loads: list[Any] = []
    monkeypatch.setattr(state, "_load_snapshot", loads.append)
    state.sync()  # what was committed needs no loading
    assert loads == []
    state.sync()
    assert len(loads) == 1


@pytest.mark.parametrize("between", ["check", "set", "nothing"])
def test_only_a_rewound_state_is_not_loaded_by_sync(
    between: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = ElasticState(step=3)
    state.commit()
    state._rewind()
    if between == "check":
        state.check()
    elif between == "set":
        state.step = 4
    loads: list[Any] = []
    monkeypatch.setattr(state, "_load_snapshot", loads.append)
    state.sync()
    assert len(loads) == (between != "nothing")


def test_callbacks_are_called_in_order() -> None:
    state = ElasticState(lr=1.0)
    called = []

    @state.on_reset
    def first() -> None:
        called.append("first")

    state.on_reset(lambda: called.append("second"))
    state._reset()
    assert called == ["first", "second"]


def test_a_file_has_the_last_commit_and_is_loaded_by_another_state(tmp_path: Path) -> None:
    path = tmp_path / "state"
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer)
    state = ElasticState(model=model, optimizer=optimizer, epoch=4)
    with pytest.raises(UsageError, match=r"commit\(\) first"):
        state.save(path)
    state.commit()
    saved = copied([dict(model.state_dict()), optimizer.state_dict()])
    trained(model, optimizer)
    state.save(path)
    assert list(tmp_path.iterdir()) == [path]
    other = network()
    fresh = ElasticState(model=other, optimizer=torch.optim.Adam(other.parameters()), epoch=0)
    fresh.load(str(path))
    assert same([dict(other.state_dict()), fresh.optimizer.state_dict()], saved)
    assert fresh.epoch == 4
    fresh.sync()
    assert fresh.epoch == 4


def test_any_commit_of_this_job_is_newer_than_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTIC_ETCD_GENERATION", "5")
    state = ElasticState(epoch=0)
    for epoch in (1, 2, 3):
        state.epoch = epoch
        state.commit()
    state.save(tmp_path / "state")
    monkeypatch.setenv("ELASTIC_ETCD_GENERATION", "1")  # of another job
    again = ElasticState(epoch=0)
    again.commit()
    again.load(tmp_path / "state")
    assert again.epoch == 3
    version = again._open_memfds().version()
    assert version is not None
    assert version.age() == Version(1, 1, 0).age()


@pytest.mark.parametrize("where", [0, 3000, 4096, 4200, -1])
def test_a_damaged_file_changes_nothing(where: int, tmp_path: Path) -> None:
    path = tmp_path / "state"
    state = ElasticState(epoch=4, data=torch.zeros(1000))
    state.commit()
    state.save(path)
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[where] ^= 1
    fresh = ElasticState(epoch=0, data=torch.ones(1))
    for content in (bytes(damaged), whole[:-1], whole + b"\0", whole[:100], b""):
        path.write_bytes(content)
        if content == damaged and where == 3000:
            continue  # between the header and the body there is nothing
        with pytest.raises(MalformedState, match=str(path)):
            fresh.load(path)
        assert fresh.epoch == 0
        assert fresh._open_memfds().newest() is None
    with pytest.raises(FileNotFoundError):
        fresh.load(tmp_path / "none")
    path.write_bytes(whole)
    with pytest.raises(UsageError, match="epoch, data; this state is of other"):
        ElasticState(other=0).load(path)


@contextmanager
def room_for_files(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_save_that_fails_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "state"
    state = ElasticState(data=torch.zeros(100_000))
    state.commit()
    path.write_bytes(b"old")
    with room_for_files(50_000), pytest.raises(OSError, match="too large"):
        state.save(path)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"old"


def save_for_ever(path: Path) -> None:
    state = ElasticState(count=0, data=torch.zeros(300_000))
    while True:
        state.count += 1
        state.data.fill_(state.count)
        state.commit()
        state.save(path)


def test_whoever_reads_while_a_file_is_replaced_and_its_writer_killed_finds_all_of_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state"
    reader = ElasticState(count=0, data=torch.zeros(1))
    child = Child(save_for_ever, path)
    try:
        seen: set[int] = set()
        while len(seen) < 20:
            if path.exists():
                reader.load(path)
                assert bool((reader.data == reader.count).all())
                seen.add(reader.count)
    finally:
        child.end()
    reader.load(path)
    assert bool((reader.data == reader.count).all())


class Job:
    """The agent's end of the channel, real, in a thread; `is_current` is what etcd would say."""

    def __init__(self) -> None:
        self.is_current = True
        self.path = ""
        self._open = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._open.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        async def opened() -> ChannelServer:
            channels = ChannelServer(self._answer)
            self.path = channels.open()
            return channels

        channels = self._loop.run_until_complete(opened())
        self._open.set()
        self._loop.run_forever()

        async def closed() -> None:
            channels.close()

        self._loop.run_until_complete(closed())

    def _answer(self, channel: WorkerChannel, message: FromWorker | Disconnected) -> None:
        if isinstance(message, AskCurrent):
            reason = "" if self.is_current else "n2 is lost"
            channel.send(Current(message.id, self.is_current, reason))


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    with Job() as job:
        monkeypatch.setenv("ELASTIC_ETCD_SOCKET", job.path)
        monkeypatch.setenv("ELASTIC_ETCD_GENERATION", "3")
        monkeypatch.setenv("LOCAL_RANK", "0")
        monkeypatch.setattr(elastic_etcd.train.channel, "_channel", None)
        monkeypatch.setattr(ElasticState, "_opened", 0)
        yield job
        if channel := elastic_etcd.train.channel._channel:
            channel._socket.close()


def test_only_a_current_generation_saves(job: Job, tmp_path: Path) -> None:
    path = tmp_path / "state"
    state = ElasticState(epoch=1)
    state.commit()
    state.save(path)
    first = path.read_bytes()
    job.is_current = False
    state.epoch = 2
    state.commit()
    with pytest.raises(StaleGeneration, match="n2 is lost"):
        state.save(path)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == first
    job.is_current = True
    state.save(path)
    assert path.read_bytes() != first


WORKER = """
import os, signal, sys, torch
from elastic_etcd.train.state import ElasticState
state = ElasticState(epoch=0, data=torch.zeros(1000))
state.sync()
print(state.epoch, int(state.data[0]), state._open_memfds().version().counter, flush=True)
for _ in range(3):
    state.epoch += 1
    state.data += 1
    state.commit()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_worker_committed_is_there_for_the_next(job: Job) -> None:
    said = [
        subprocess.run([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, check=False)
        for _ in range(2)
    ]
    assert [one.stdout.decode().strip() for one in said] == ["0 0 0", "3 3 3"]
