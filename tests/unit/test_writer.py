"""Outputs that stand still. A job that nobody ends stands in for a disk that does."""

import asyncio
import os
import re
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_etcd.agent.output.writer import FULL, LOST, STILL, Output, OutputWriter
from elastic_etcd.system.threads import in_thread

DEADLINE = 30.0
LINE = b"x" * 1023 + b"\n"


@pytest.fixture
async def writer() -> AsyncIterator[OutputWriter]:
    writer = OutputWriter()
    yield writer
    await writer.close(DEADLINE)


@contextmanager
def standing_still(writer: OutputWriter) -> Iterator[None]:
    released = threading.Event()
    writer.put(lambda: released.wait(DEADLINE))
    try:
        yield
    finally:
        released.set()


def file_at(path: Path, writer: OutputWriter) -> Output:
    def failed(error: OSError) -> None:
        raise AssertionError(error)

    return Output(writer, path.name, lambda: os.open(path, os.O_WRONLY | os.O_CREAT), failed)


async def test_r1_each_byte_is_written_or_counted(
    writer: OutputWriter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "out"
    file = file_at(path, writer)
    with standing_still(writer):
        for _ in range(2 * LOST // len(LINE)):
            file.write(LINE)
        file.write(b"no line end")
        file.say(b"an agent's line\n")
    assert await writer.written(DEADLINE)
    file.write(b"later\n")
    file.close()
    assert await writer.written(DEADLINE)
    text = path.read_bytes()
    (dropped,) = map(int, re.findall(rb"\.\.\. (\d+) bytes dropped: the disk stood still\n", text))
    assert text.count(LINE) * len(LINE) == LOST
    assert dropped == LOST + len(b"no line end")
    head, _, tail = text.partition(b"... ")
    assert head.endswith(b"\n")
    assert tail.endswith(b"still\nan agent's line\nlater\n")
    assert f"{dropped} bytes of the workers' output dropped" in caplog.text
    assert caplog.text.count("stands still") == 1


async def test_a_file_that_can_not_be_opened_is_tried_again(
    writer: OutputWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_etcd.agent.output.writer.STILL", 0.01)
    refused: list[OSError] = []
    path = tmp_path / "folder" / "out"
    file = Output(writer, "out", lambda: os.open(path, os.O_WRONLY | os.O_CREAT), refused.append)
    file.write(b"lost\n")
    assert await writer.written(DEADLINE)
    assert refused
    path.parent.mkdir()
    await asyncio.sleep(0.02)
    file.write(b"there\n")
    file.close()
    file.write(b"after its end\n")
    assert await writer.written(DEADLINE)
    assert path.read_bytes() == b"there\n"


async def test_r1_nobody_waits_for_a_disk_that_stands_still(
    writer: OutputWriter, tmp_path: Path
) -> None:
    file = file_at(tmp_path / "out", writer)
    resumed = asyncio.Event()
    with standing_still(writer):
        file.write(b"x" * FULL)
        at_first = file.writer.full
        file.writer.when_room(resumed.set)
        async with asyncio.timeout(DEADLINE):
            await resumed.wait()
        assert (at_first, file.writer.full) == (True, False), (
            "whoever can waits while it may be slow only"
        )
        assert not await writer.written(patience=0.01)
    assert await writer.written(DEADLINE)


async def test_who_waits_for_room_goes_on_when_there_is_some(
    writer: OutputWriter, tmp_path: Path
) -> None:
    path = tmp_path / "out"
    file = file_at(path, writer)
    async with asyncio.timeout(DEADLINE):
        for _ in range(8):
            file.write(b"x" * LOST)
            resumed = asyncio.Event()
            file.writer.when_room(resumed.set)
            await resumed.wait()
            assert await writer.written(DEADLINE)
    assert path.stat().st_size == 8 * LOST, "a disk that is only slow costs nothing"


@pytest.mark.parametrize("blocking", [True, False], ids=["", "whose O_NONBLOCK somebody has set"])
async def test_a_pipe_that_nobody_reads_is_waited_for(
    blocking: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Up to the same bound, from where on bytes are dropped and counted."""
    r, w = os.pipe()
    os.set_blocking(w, blocking)
    writer = OutputWriter(patient=True)
    pipe = Output(writer, "stdout", lambda: w)
    resumed = asyncio.Event()
    for _ in range(2 * LOST // len(LINE)):
        pipe.write(LINE)
    pipe.say(b"an agent's line\n")
    pipe.writer.when_room(resumed.set)
    assert not await writer.written(patience=2 * STILL)
    assert pipe.writer.full, "however long that takes"
    with os.fdopen(r, "rb") as file:
        reading = asyncio.get_running_loop().run_in_executor(None, file.read)
        async with asyncio.timeout(DEADLINE):
            await resumed.wait()
        pipe.close()
        await writer.close(DEADLINE)
        text = await reading
    (dropped,) = map(int, re.findall(rb"\.\.\. (\d+) bytes dropped: nobody read it\n", text))
    assert text.count(LINE) * len(LINE) + dropped == 2 * LOST
    assert text.count(b"an agent's line\n") == 1
    assert f"{dropped} bytes of the workers' output dropped, which stdout misses" in caplog.text
    assert caplog.text.count("nobody reads stdout") == 1


async def test_a_reader_that_paused_before_the_end_has_all_of_the_patience() -> None:
    r, w = os.pipe()
    writer = OutputWriter(patient=True)
    pipe = Output(writer, "stdout", lambda: w)
    pipe.write(LINE * 256)
    assert not await writer.written(patience=0.2)
    writer.moved -= DEADLINE  # so long ago
    ending = asyncio.create_task(writer.close(patience=DEADLINE))
    await asyncio.sleep(0.2)
    assert not ending.done(), "nobody writes any more when the agent has ended"
    with os.fdopen(r, "rb") as file:
        assert await in_thread(lambda: file.read(len(LINE) * 256), DEADLINE) == LINE * 256
    await ending


async def test_what_takes_too_long_in_a_thread_is_left_to_itself() -> None:
    released = threading.Event()
    with pytest.raises(TimeoutError):
        await in_thread(lambda: released.wait(DEADLINE), timeout=0.01)
    released.set()
    assert await in_thread(lambda: 7, DEADLINE) == 7
    with pytest.raises(ValueError, match="x"):
        await in_thread(lambda: int("x"), DEADLINE)
