"""What one agent does about its workers that hang, and what it does not."""

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from elastic_etcd.agent.followers import evidence, hang_watch
from elastic_etcd.agent.followers.hang_watch import HangWatch
from elastic_etcd.core.lifecycle import Event, Finding, Published, State, Tick
from elastic_etcd.core.rules import Local
from elastic_etcd.core.schema import (
    Hang,
    Keys,
    Limits,
    Master,
    NodeSteps,
    Page,
    Participant,
    Phase,
    Round,
    decode,
)
from elastic_etcd.core.txn import Put, Txn
from elastic_etcd.core.view import Narrow, View
from elastic_etcd.protocol.activity import Activity, Doing

# What a thread of NCCL's does, for gloo: torch records that, too, but nobody of its own writes it.
RECORDS = """
import os, select, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
os.mkfifo(sys.argv[1] + "0.pipe")
pipe = os.open(sys.argv[1] + "0.pipe", os.O_RDONLY | os.O_NONBLOCK)
print("ready", flush=True)
poll = select.poll()
poll.register(pipe, select.POLLIN)
poll.poll()
if os.read(pipe, 128):
    record = torch._C._distributed_c10d._dump_fr_trace(True, False, False)
    with open(sys.argv[2] + "0", "wb") as file:
        file.write(record)
"""
DUMPS = """
import sys, threading
from elastic_etcd.children import entry

def come_and_go():
    while True:
        threads = [threading.Thread(target=str) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

entry.show_stacks()
threading.Thread(target=come_and_go, daemon=True).start()
print()
sys.stdin.read()
"""
NOW = Round(1, Phase.FINAL, 0xA, "why", "r", "n1", 1, 1, Master("n1", 80))
ASKED = Hang(1, 1, 70.0)
NOBODY = Hang(1, 2, 70.0, evidence=True, line="nobody has moved", alarm=True)
WAITS = Hang(1, 1, 70.0, line="rank 0 on n1 waits in step 7 for rank 1 on n2 (no answer)")
HUNG = Activity(Doing.STEP, 70.0, 6, 0.1)


@pytest.fixture
def pid() -> Iterator[int]:
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    ) as process:
        yield process.pid


@pytest.fixture
def dumping_pid(tmp_path: Path) -> Iterator[int]:
    """It has the handler of a worker for its stacks, and threads that come and go."""
    command = [sys.executable, "-u", "-c", DUMPS]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with (
        (tmp_path / "stderr").open("wb") as stderr,
        subprocess.Popen(command, stderr=stderr, **pipes) as process,
    ):
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


class Node:
    """A node with one worker, and what its agent asks for."""

    def __init__(
        self, pid: int, timeout: float | None = 60.0, start_timeout: float | None = None
    ) -> None:
        self.env: dict[str, str] = {}
        self.folder: Path | None = None
        self.evidence_of: list[int] = []  # generations
        self.tails = chain(repeat(b""))  # of its stderr, one look after the other
        output = SimpleNamespace(err=SimpleNamespace(tail=lambda: next(self.tails)))
        spec = SimpleNamespace(rank=0, env=self.env)
        self.worker = SimpleNamespace(pid=pid, spec=spec, output=output)
        self.at = HUNG
        self.generation = 1
        self.given_up: list[int | None] = []
        self.published: list[Txn] = []
        self.answers = True  # etcd does, else it refuses whatever is written
        self.inbox = self
        self.tasks: set[asyncio.Task[None]] = set()
        self.state = state(None)
        limits = timeout, start_timeout
        self.watch = HangWatch(limits, Keys("/elastic_etcd/j"), *3 * [self])  # type: ignore[arg-type]

    def activities(self) -> list[tuple[Any, Activity]]:
        return [(self.worker, self.at)]

    def give_up(self, rank: int | None, *_: str) -> None:
        self.given_up.append(rank)

    def evidence_file(self, generation: int, _: int) -> Path | None:
        self.evidence_of.append(generation)
        return self.folder / "hang.txt" if self.folder else None

    def suspects(self) -> bool:
        return self.watch._suspicion is not None

    def create(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.add(asyncio.create_task(work))

    def put(self, found: Finding) -> None:
        self.published.append(found.txn)
        if self.answers:
            self.see(self.state, Published(found.by, ok=True))
        else:
            self.watch._loop.call_soon(self.refuse, found)

    def refuse(self, found: Finding) -> None:
        self.see(self.state, found)
        self.see(self.state, Published(found.by, ok=False))

    def see(self, now: State, event: Event | None = None) -> None:
        """The agent is in that state."""
        before, self.state = self.state, now
        self.watch.see(before, event or Tick(), now)

    @property
    def said(self) -> list[int]:
        """The numbers of the steps that were published."""
        puts = [put for txn in self.published for put in txn.then if isinstance(put, Put)]
        return [decode(NodeSteps, put.value, lease=0xB).number for put in puts]

    async def seen(self, at: Activity, generation: int = 1) -> None:
        """The agent has looked at a worker there, more than once."""
        self.at, self.generation = at, generation
        await self.until(lambda: self.watch._generation == generation)
        await self.until(lambda: self.watch._seen.get(0, HUNG).seconds == at.seconds)
        await asyncio.sleep(0.1)

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 - a log is no event
                await asyncio.sleep(0.01)


def state(hang: Hang | None) -> State:
    part = Participant(0xB, "n1", 1, 0, 0)
    page = Page(1, (part,))
    view = View(9, Narrow(), round=NOW, round_mod=7, ledger_mod=4, page=page, hang=hang)
    local = Local("r", 0xB, 2, 2, acked=1, running=1, ran=1)
    return State(local, 1, view=view, limits=Limits(1, 2, hang_action="restart"))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_watch, "_PERIOD", 0.01)
    monkeypatch.setattr(hang_watch, "HANG_ALONE", 0.05)


async def asked(pid: int) -> tuple[Node, asyncio.Task[None]]:
    """A node whose watch runs, after the coordinator's question where it stands."""
    node = Node(pid)
    task = asyncio.create_task(node.watch.run())
    node.see(state(None))
    await node.until(lambda: node.said)
    node.see(state(ASKED))
    return node, task


async def test_a_hang_that_was_found_without_etcd_is_asked_about_later(
    pid: int, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(pid)
    task = asyncio.create_task(node.watch.run())
    await node.until(lambda: "its stacks are in its stderr" in caplog.text)
    await asyncio.sleep(0.5)
    assert caplog.text.count("rank 0 is in step 7") == 1
    node.see(state(None))
    await node.until(lambda: node.said)
    assert node.said == [1]
    task.cancel()


async def test_a_hang_is_found_without_etcd_after_another_was_told(
    pid: int, quick: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer that etcd gives nothing is no news of a line that was there before."""
    node = Node(pid)
    loop = asyncio.get_running_loop()

    def fail_later(found: Finding) -> None:
        node.published.append(found.txn)
        failed = Published(found.by, ok=False)
        loop.call_later(0.05, lambda: node.see(node.state, failed))

    monkeypatch.setattr(node, "put", fail_later)
    task = asyncio.create_task(node.watch.run())
    node.see(state(WAITS))
    await node.until(lambda: "its stacks are in its stderr" in caplog.text)
    assert node.said[:2] == [2, 2]
    task.cancel()


@pytest.mark.parametrize(
    ("paths", "place"),
    [
        (["/home/ann/train.py", "/py/runpy.py"], "train.py:9 in f0"),
        (["/py/torch/nn/parallel/distributed.py", "/ann/train.py"], "train.py:9 in f1 (f0)"),
        (
            ["/py/torch/c10d.py", "/py/elastic_etcd/train/state/sync.py", "/ann/elastic_etcd/t.py"],
            "t.py:9 in f2 (f0)",
        ),
        (["/py/torch/c10d.py"], "c10d.py:9 in f0"),
        ([], ""),
    ],
)
def test_the_place_is_the_script_s(paths: list[str], place: str) -> None:
    """torch's own lines, in which all that wait for a collective stand, tell nobody's apart."""
    stack = "".join(f'  File "{path}", line 9 in f{n}\n' for n, path in enumerate(paths))
    assert evidence.Evidence(1, stack).place == place


async def test_evidence_is_gathered_once_and_belongs_to_its_generation(
    dumping_pid: int,
    quick: None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node may gather it alone when the coordinator asks, and the world may begin anew."""
    monkeypatch.setattr(evidence, "HANG_STACKS", 1.0)
    node = Node(dumping_pid)
    task = asyncio.create_task(node.watch.run())
    await node.until(lambda: node.tasks)
    node.see(state(Hang(1, 1, 70.0, evidence=True)))
    await asyncio.sleep(0.3)
    node.generation = 2
    await node.until(lambda: "its stacks are in its stderr" in caplog.text)
    assert node.evidence_of == [1]
    await node.until(lambda: node.said)
    assert caplog.text.count("rank 0 is in step 7") == 1
    task.cancel()


async def test_who_waits_for_what_may_last_is_asked_about_again_later(
    pid: int, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    node, task = await asked(pid)
    await node.until(lambda: node.watch._judged)
    node.see(state(WAITS))
    await node.until(lambda: "waits in step 7" in caplog.text)
    node.at = HUNG._replace(seconds=139.0)
    await asyncio.sleep(0.3)
    assert node.said == [1]
    node.at = HUNG._replace(seconds=140.0)
    await node.until(lambda: len(node.said) > 1)
    assert node.said == [1, 2]
    task.cancel()


async def test_an_etcd_that_refuses_an_answer_is_not_given_it_at_once_again(
    pid: int, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing new has come of it: it is given again at the next look."""
    monkeypatch.setattr(hang_watch, "_PERIOD", 0.1)
    node = Node(pid)
    node.answers = False
    task = asyncio.create_task(node.watch.run())
    node.see(state(ASKED))
    await asyncio.sleep(1.0)
    assert 2 <= len(node.published) <= 20
    task.cancel()


async def test_a_hang_is_seen_although_news_comes_all_the_time(
    pid: int, quick: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(pid)
    node.answers = False

    def refuse(found: Finding) -> None:
        Node.refuse(node, found)
        node.see(state(ASKED))

    monkeypatch.setattr(node, "refuse", refuse)
    task = asyncio.create_task(node.watch.run())
    node.see(state(ASKED))
    await node.until(lambda: "its stacks are in its stderr" in caplog.text)
    task.cancel()


@pytest.mark.parametrize("goes_on", [False, True])
async def test_a_world_that_goes_on_is_not_begun_anew(
    pid: int, quick: None, caplog: pytest.LogCaptureFixture, goes_on: bool
) -> None:
    node, task = await asked(pid)
    await asyncio.sleep(0.2)
    if goes_on:  # the storage was back before the coordinator's line was here
        node.at = Activity(Doing.STEP, 0.1, 900, 0.1)
    node.see(state(NOBODY))
    await node.until(lambda: "nobody has moved" in caplog.text)
    assert node.given_up == ([] if goes_on else [None])
    task.cancel()


@pytest.mark.parametrize("refused", [False, True])
async def test_a_rank_that_goes_on_after_it_was_told_to_hang_is_published(
    pid: int, quick: None, caplog: pytest.LogCaptureFixture, refused: bool
) -> None:
    """Under the number of the line, so that its coordinator can take that back; and once."""
    node, task = await asked(pid)
    node.see(state(replace(ASKED, number=2, evidence=True)))
    await node.until(lambda: node.said == [1, 2])
    node.see(state(NOBODY))
    await node.until(lambda: "nobody has moved" in caplog.text)
    await node.seen(HUNG)
    assert node.said == [1, 2]
    node.answers = not refused
    await node.seen(Activity(Doing.STEP, 0.1, 7, 0.1))
    await node.until(lambda: len(node.said) >= (4 if refused else 3))
    node.answers = True
    await node.until(lambda: not node.watch._published)
    put = node.published[-1].then[0]
    assert isinstance(put, Put)
    assert [(r.step, r.seconds) for r in decode(NodeSteps, put.value, lease=0xB).ranks] == [
        (8, 0.1)
    ]
    await node.seen(Activity(Doing.STEP, 0.1, 8, 0.1))
    told = len(node.said)
    await node.seen(Activity(Doing.STEP, 0.1, 9, 0.1))
    assert len(node.said) == told
    task.cancel()


async def test_f3_a_world_that_waits_for_one_at_its_end_is_not_begun_anew(
    pid: int, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    """What is done would be done again, and it would end so again."""
    node, task = await asked(pid)
    line = "rank 1 on n2 is at its end, 1 other waits in 7 for 70 s"
    node.see(state(replace(NOBODY, line=line, rank=1)))
    await node.until(lambda: f"{line}" in caplog.text)
    await node.seen(HUNG)
    assert node.given_up == []
    task.cancel()


def stands(seconds: float, steps: int = 6) -> Activity:
    """In a step; the recent ones were fast."""
    return Activity(Doing.STEP, seconds, steps, 0.1)


async def test_a_validation_that_was_given_up_has_twice_as_long_in_the_next_world(
    pid: int, quick: None
) -> None:
    node = Node(pid, timeout=None)
    task = asyncio.create_task(node.watch.run())
    await node.seen(stands(61.0))
    await node.until(node.suspects)
    await node.seen(stands(1.0), generation=2)
    await node.seen(stands(119.0))
    assert not node.suspects()
    await node.seen(stands(121.0))
    await node.until(node.suspects)
    task.cancel()


async def test_a_gap_between_steps_that_was_seen_once_is_no_hang_later(
    pid: int, quick: None
) -> None:
    node = Node(pid, timeout=None)
    task = asyncio.create_task(node.watch.run())
    await node.seen(stands(90.0))
    await node.seen(stands(0.1, 79))
    await node.seen(stands(170.0, 79))
    assert not node.suspects()
    await node.seen(stands(181.0, 79))
    await node.until(node.suspects)
    task.cancel()


async def test_a_commit_in_which_nothing_moves_is_a_hang_at_last(pid: int, quick: None) -> None:
    """It may wait for memory, and for others who copy; then somebody is behind."""
    node = Node(pid)
    task = asyncio.create_task(node.watch.run())
    await node.seen(Activity(Doing.COMMIT, 179.0, 6, 0.1))
    assert not node.suspects()
    await node.seen(Activity(Doing.COMMIT, 181.0, 6, 0.1))
    await node.until(node.suspects)
    await node.seen(Activity(Doing.COMMIT, 0.1, 6, 0.1))
    await node.until(lambda: not node.suspects())
    task.cancel()


@pytest.mark.parametrize("pipe", ["none", "a file", "nobody reads"])
async def test_a_pipe_that_nobody_reads_does_no_harm(
    pid: int, quick: None, caplog: pytest.LogCaptureFixture, tmp_path: Path, pipe: str
) -> None:
    """That of NCCL's flight recorder."""
    node = Node(pid)
    node.folder = tmp_path / "evidence"
    node.env["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] = f"{tmp_path}/pipe_"
    node.env["TORCH_FR_DUMP_TEMP_FILE"] = f"{tmp_path}/trace_"
    if pipe == "a file":
        (tmp_path / "pipe_0.pipe").write_text("mine")
    elif pipe == "nobody reads":
        os.mkfifo(tmp_path / "pipe_0.pipe")
    task = asyncio.create_task(node.watch.run())
    await node.until(lambda: "where it stands is in" in caplog.text)
    assert "flight recorder" not in caplog.text
    node.see(state(replace(ASKED, evidence=True)))
    await node.until(lambda: node.said)
    assert str(node.folder / "hang.txt") in str(node.published)
    if pipe == "a file":
        assert (tmp_path / "pipe_0.pipe").read_text() == "mine"
    task.cancel()


async def test_the_flight_recorder_is_with_the_evidence(
    pid: int,
    quick: None,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._C import _distributed_c10d

    if not hasattr(_distributed_c10d, "_dump_fr_trace"):
        pytest.skip("this torch writes no record of gloo's")
    monkeypatch.setattr(evidence, "HANG_EVIDENCE", 60.0)
    node = Node(pid)
    node.folder = tmp_path / "evidence"
    monkeypatch.setattr(evidence, "HANG_ASK", 60.0)
    pipe, trace = f"{tmp_path}/pipe_", f"{tmp_path}/trace_"
    node.env["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] = pipe
    node.env["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] = trace
    command = [sys.executable, "-c", RECORDS, pipe, trace]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
        task = asyncio.create_task(node.watch.run())
        try:
            await node.until(lambda: "NCCL's flight recorder is in" in caplog.text)
        finally:
            task.cancel()
            worker.kill()
    record = pickle.loads((node.folder / "nccl_trace").read_bytes())
    assert [entry["profiling_name"] for entry in record["entries"]] == ["gloo:all_reduce"]


async def test_stacks_that_come_late_are_waited_for(
    dumping_pid: int,
    quick: None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without them a rank that waits looks like one that is behind."""
    monkeypatch.setattr(evidence, "HANG_STACKS", 60.0)
    node = Node(dumping_pid)
    head = b"Stack (most recent call first):\n"
    stack = b'  File "torch/autograd/graph.py", line 829 in _engine_run_backward\n'
    node.tails = chain([b""] * 4, [head], repeat(head + stack))
    task = asyncio.create_task(node.watch.run())
    await node.until(lambda: "its stacks are in its stderr" in caplog.text)
    assert "_engine_run_backward" in node.watch._evidence[0].stack
    task.cancel()


def test_a_worker_outlives_being_asked(dumping_pid: int) -> None:
    """Its other threads run on: what a handler reads of theirs may be gone meanwhile."""
    for _ in range(2000):
        assert evidence._ask_for_stacks(dumping_pid)
        assert evidence.status(dumping_pid, "State") != "Z", "it has died"
        time.sleep(0.001)


async def test_it_is_the_main_thread_that_answers(dumping_pid: int, tmp_path: Path) -> None:
    """Whatever others begin and end."""
    for number in range(1, 51):
        evidence._ask_for_stacks(dumping_pid)
        async with asyncio.timeout(10):
            while (tmp_path / "stderr").read_text().count("in <module>\n") < number:  # noqa: ASYNC110 - a file
                await asyncio.sleep(0.001)


async def test_a_worker_that_is_stopped_is_not_asked(
    dumping_pid: int, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    """It would write when it goes on, whichever thread comes first, of what is no hang any more."""
    os.kill(dumping_pid, signal.SIGSTOP)
    node = Node(dumping_pid)
    task = asyncio.create_task(node.watch.run())
    await node.until(lambda: "its stacks are in its stderr" in caplog.text)
    assert int(evidence.status(dumping_pid, "ShdPnd"), 16) == 0
    task.cancel()
