"""Lines, files and consoles, with real pipes, terminals and disks."""

import asyncio
import errno
import fcntl
import logging
import os
import pty
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_etcd.agent.config import LogConfig, StreamChoice, Streams
from elastic_etcd.agent.failures import failure_message, last_traceback
from elastic_etcd.agent.output.logs import LinePrefixer, LogHandler, Logs
from elastic_etcd.agent.output.writer import Output, open_console
from elastic_etcd.errors import UsageError
from tests.support.disks import small_disk
from tests.unit.watched import Watched

DEADLINE = 30.0


def prefixed(*chunks: bytes) -> bytes:
    lines = LinePrefixer(b"[p] ")
    return b"".join([*map(lines.feed, chunks), lines.finish()])


def test_each_line_gets_the_prefix_and_the_last_one_an_end() -> None:
    assert prefixed(b"a\nb", b"c\n\nd") == b"[p] a\n[p] bc\n[p] \n[p] d\n"
    assert prefixed(b"") == b""
    assert prefixed(b"\xff\x00\xfe\n") == b"[p] \xff\x00\xfe\n"


def test_a_progress_bar_keeps_its_carriage_returns() -> None:
    assert prefixed(b"\r 10%", b"\r 20%", b"\r 30%\n") == b"\r[p]  10%\r[p]  20%\r[p]  30%\n"
    assert prefixed(b"10%\r20%\r") == b"[p] 10%\r[p] 20%\r"


def test_a_windows_line_end_is_one_line_end_however_it_is_cut() -> None:
    for chunks in ([b"a\r\nb\r\n"], [b"a\r", b"\nb\r", b"\n"], [b"a", b"\r\n", b"b\r\n"]):
        assert prefixed(*chunks) == b"[p] a\r\n[p] b\r\n"


def test_f9_an_unfinished_line_is_shown_after_a_while() -> None:
    lines = LinePrefixer(b"[p] ")
    assert lines.feed(b"a\nContinue? ") + lines.show() == b"[p] a\n[p] Continue? \n"
    assert lines.show() == b""
    assert lines.feed(b"yes\n") == b"[p] yes\n"
    bar = [lines.feed(b"\r 10%"), lines.show(), lines.feed(b"\r 20%"), lines.show()]
    assert b"".join([*bar, lines.feed(b"\n"), lines.feed(b"b\n")]) == (
        b"\r[p]  10%\r[p]  20%\n[p] b\n"
    )
    bar = [lines.feed(b"\r 10%"), lines.show(), lines.feed(b".."), lines.show(), lines.finish()]
    assert b"".join([*bar, lines.feed(b"b\n")]) == b"\r[p]  10%..\n[p] b\n"


async def test_f9_a_prompt_is_shown_while_its_worker_waits(tmp_path: Path) -> None:
    answer, shown = tmp_path / "answer", tmp_path / "o"
    os.mkfifo(answer)
    text = f"print('Continue? ', end='', flush=True); open({str(answer)!r}).read()"
    with shown.open("wb") as o:
        async with running(LogConfig(), o.fileno()) as run:
            run.start(text)
            await until(shown.read_bytes)
            answer.write_text("y")
            await run.watched.emptied()
    assert shown.read_text() == "[node0 4]: Continue? \n"


def test_a_very_long_line_is_passed_on_in_pieces() -> None:
    lines = LinePrefixer(b"[p] ")
    assert lines.feed(b"x" * 70_000) == b"[p] " + b"x" * 70_000 + b"\n"
    assert lines.feed(b"y\n") == b"[p] y\n"


@given(st.lists(st.binary(max_size=20) | st.sampled_from([b"\n", b"\r", b"\r\n", b"a\n"])))
def test_no_byte_is_lost_however_the_stream_is_cut(chunks: list[bytes]) -> None:
    whole = b"".join(chunks).replace(b"[p] ", b"")
    out = prefixed(*chunks).replace(b"[p] ", b"")
    assert out.removesuffix(b"\n") == whole.removesuffix(b"\n")
    for line in re.split(rb"[\r\n]+", prefixed(*chunks)):
        assert not line or line.startswith(b"[p] ")


def test_the_last_traceback_is_found() -> None:
    block = 'Traceback (most recent call last):\n  File "a", line 1\nValueError: x\nmore of it'
    older = block.replace("ValueError", "KeyError")
    assert last_traceback(f"noise\n{older}\n\nThen:\n\n{block}\n\nW0000 after")[0] == block
    assert last_traceback("Traceback of nothing\n")[0] == ""
    ignored = block.replace("ValueError", "OSError")
    assert last_traceback(f"{block}\n\nException ignored in: <x>\n{ignored}\n")[0] == block


def test_the_rank_prefix_of_torch_is_taken_off_and_ends_the_block() -> None:
    text = (
        "[rank3]: Traceback (most recent call last):\n"
        '[rank3]:   File "a", line 1\n'
        "[rank3]: ValueError: x\n"
        "[W1121 ProcessGroup.cpp] warning"
    )
    assert last_traceback(text)[0] == (
        'Traceback (most recent call last):\n  File "a", line 1\nValueError: x'
    )
    assert last_traceback(text.replace("[rank3]: ", "[rank3]: [rank0]: ")) == last_traceback(text)


def raised(text: str) -> str:
    """What Python says of the exception that `text` raises."""
    command = [sys.executable, "-c", textwrap.dedent(text)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    return run.stderr.rstrip("\n")


@pytest.mark.parametrize("ranked", [False, True], ids=["", "with ranks"])
@pytest.mark.parametrize(
    "text",
    [
        "raise ValueError('one\\n\\n\\ntwo\\n  three')",
        """
        try:
            1 / 0
        except ZeroDivisionError as error:
            try:
                raise KeyError('of it\\n\\nmore') from error
            except KeyError:
                raise ValueError('during')
        """,
        """
        try:
            raise ExceptionGroup('some', [KeyError('a\\n\\nb'), ExceptionGroup('n', [OSError()])])
        except ExceptionGroup:
            {}['b']
        """,
        "raise ExceptionGroup('some', [KeyError('a'), ValueError('b')])",
    ],
    ids=["a message with empty lines", "a chain", "a chain with a group", "a group"],
)
def test_a_traceback_is_whole(text: str, ranked: bool) -> None:
    whole = said = raised(text)
    older = raised("raise KeyError('older')")
    if ranked:  # as torch does it
        said = "\n".join(line and f"[rank0]: {line}" for line in whole.split("\n"))
    assert last_traceback(f"{older}\nmore\n\n{said}\n")[0] == whole
    assert last_traceback(f"{older}\n\n{said}\n\n[W1121 12:00 x.cpp] warning\n")[0] == whole
    ignored = raised(text)
    assert last_traceback(f"{said}\n\nException ignored in: <x>\n{ignored}\n")[0] == whole


def test_what_came_long_after_a_traceback_is_none_of_it() -> None:
    block = raised("raise KeyError('caught')")
    output = "a line of the training\n\n" * 1000
    assert last_traceback(f"{block}\n\n{output}")[0] == block


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"message": "plain", "timestamp": "1"}', "plain"),
        ('{"message": {"message": "E: m", "extraInfo": {"py_callstack": "stack"}}}', "stack"),
        ('{"message": {"message": "E: m", "extraInfo": {"py_callstack": ""}}}', "E: m"),
        ('{"message": {"message": ["odd"]}}', "x\nfrom stderr"),
        ('["odd"]', "x\nfrom stderr"),
        ('{"message": "cut o', "x\nfrom stderr"),
        ("", "x\nfrom stderr"),
    ],
)
def test_the_error_file_has_the_first_word(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "error.json"
    file.write_text(content)
    assert failure_message(127, str(file), b"x\nfrom stderr\n", 0) == message
    assert failure_message(0, str(file), b"", 0) == ""


def words_of(code: int, text: str) -> str:
    return failure_message(code, "", text.encode(), 0)


@pytest.mark.parametrize(
    "text",
    [
        "import sys; sys.exit('error: no data under /data')",
        "import argparse; argparse.ArgumentParser().parse_args(['--larning-rate'])",
        "exec('x = = 1')",
    ],
)
def test_n1_f10_a_death_without_traceback_is_told_by_its_last_words(text: str) -> None:
    run = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert words_of(run.returncode, f"step 1\n{run.stderr}").endswith(run.stderr.strip())


def test_f10_the_last_words_of_the_interpreter_and_of_c_plus_plus() -> None:
    text = "import faulthandler; faulthandler.enable(); faulthandler._sigsegv()"
    run = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    loaded = f"{run.stderr}\nExtension modules: {'numpy, ' * 90}\n" * 2 + "a\n" * 50
    assert words_of(run.returncode, f"a\n{loaded}").startswith("Fatal Python error: Segmentation")
    said = "terminate called after throwing an instance of 'E'\n  what():  no device"
    frames = "".join(f"\nframe #{number}: f()" for number in range(30))
    assert words_of(-6, f"a\n{said}{frames}").startswith(said)
    assert words_of(1, f"{said}{frames}\nb").endswith("frame #29: f()\nb")  # of a child's


def test_f10_an_older_traceback_hides_no_last_words() -> None:
    caught = raised("raise KeyError('caught')")
    output = "a line of the training\n\n" * 1000
    told = words_of(1, f"{caught}\n{output}error: no data\n")
    assert told.startswith(caught)
    assert told.endswith("error: no data")
    log = "[W1121 12:00 x.cpp] warning\n"
    assert words_of(1, f"{caught}\n{log}Exception ignored in: <x>\nb\n") == caught
    assert words_of(-9, " 1%\r 2%\r 3%\n\n" + log) == "3%"
    assert words_of(-9, "\n".join(map(str, range(100)))).split() == [str(n) for n in range(90, 100)]


class Run:
    """Commands run as workers, whose console is a pipe of the test's."""

    def __init__(self, watched: Watched) -> None:
        self.logs = watched.logs
        self.watched = watched

    @property
    def codes(self) -> list[int]:
        return [end.failure.code if end.failure else 0 for end in self.watched.ends]

    @property
    def over(self) -> bool:
        return bool(self.watched.empties)

    def start(self, *codes: str) -> None:
        commands = [(sys.executable, "-I", "-S", "-c", code) for code in codes]
        self.watched.launch(*commands, generation=7, first=4)

    async def run(self, *codes: str) -> None:
        self.start(*codes)
        await self.watched.emptied()


async def closed(console: Output) -> None:
    console.close()
    await console.writer.close(patience=1)


@contextmanager
def descriptor(number: int, fd: int) -> Iterator[None]:
    """Descriptor `number` of this process leads where `fd` does."""
    saved = os.dup(number)
    os.dup2(fd, number)
    try:
        yield
    finally:
        os.dup2(saved, number)
        os.close(saved)


@asynccontextmanager
async def running(config: LogConfig, out: int, err: int | None = None) -> AsyncIterator[Run]:
    with descriptor(1, out), descriptor(2, out if err is None else err):
        logs = Logs.open(config, job="job", node="node0", role="trainer")
    async with logs, Watched.open(logs) as watched:
        yield Run(watched)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not condition():  # noqa: ASYNC110 - turns of the loop, not time
            await asyncio.sleep(0)


BOTH = "import sys; print('out'); print('err', file=sys.stderr)"


async def files(logs: Logs) -> dict[str, str]:
    assert logs.directory is not None
    assert await logs._disk.written(DEADLINE)
    return {
        str(path.relative_to(logs.directory)): path.read_text()
        for path in logs.directory.rglob("*.log")
    }


def choice(everywhere: int = 0, **by_local_rank: int) -> StreamChoice:
    chosen = tuple((int(k.strip("r")), Streams(v)) for k, v in by_local_rank.items())
    return StreamChoice(Streams(everywhere), chosen)


@pytest.mark.parametrize(
    ("options", "out", "err", "kept"),
    [
        ({}, "45", "45", ""),
        ({"log_dir": "D"}, "45", "45", "4o 4e 5o 5e"),
        ({"redirects": choice(3)}, "", "", "4o 4e 5o 5e"),
        ({"redirects": choice(1)}, "", "45", "4o 5o"),
        ({"redirects": choice(0, r0=2, r1=1), "log_dir": "D"}, "4", "5", "4o 4e 5o 5e"),
        ({"tee": choice(0, r1=3)}, "45", "45", "5o 5e"),
        ({"tee": choice(3), "redirects": choice(3)}, "45", "45", "4o 4e 5o 5e"),
        ({"tee": choice(3), "local_ranks_filter": frozenset({1})}, "5", "5", "4o 4e 5o 5e"),
        ({"local_ranks_filter": frozenset({0})}, "4", "4", ""),
        ({"log_dir": os.devnull}, "45", "45", ""),
        ({"log_dir": os.devnull, "redirects": choice(3)}, "", "", ""),
    ],
)
async def test_where_output_goes(
    tmp_path: Path, options: dict[str, object], out: str, err: str, kept: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if options.get("log_dir") == "D":
        options = {**options, "log_dir": str(tmp_path / "new" / "logs")}
    with (tmp_path / "o").open("wb") as o, (tmp_path / "e").open("wb") as e:
        async with running(LogConfig(**options), o.fileno(), e.fileno()) as run:  # type: ignore[arg-type]
            await run.run(BOTH, BOTH)
            found = await files(run.logs) if run.logs.directory is not None else {}
    assert sorted((tmp_path / "o").read_text().splitlines()) == [f"[node0 {r}]: out" for r in out]
    assert sorted((tmp_path / "e").read_text().splitlines()) == [f"[node0 {r}]: err" for r in err]
    assert found == {
        f"generation_7/{k[0]}/std{n}.log": f"{n}\n"
        for k in kept.split()
        for n in ("out" if k[1] == "o" else "err",)
    }
    if kept:
        assert run.logs.directory is not None
        assert run.logs.directory.name.startswith("job_")
        assert run.logs.directory.is_dir()
    elif run.logs.directory is not None:
        assert not run.logs.directory.exists(), "it held error files only"


async def test_the_prefix_template_is_torchruns(tmp_path: Path) -> None:
    with (tmp_path / "o").open("wb") as o, descriptor(1, o.fileno()):
        template = "${role_name}/${rank}/${local_rank}/${generation}/${node}/$what|"
        logs = Logs.open(LogConfig(), job="j", node="n", role="trainer", template=template)
    async with logs, Watched.open(logs) as watched:
        await Run(watched).run("print('x')")
    assert (tmp_path / "o").read_text() == "trainer/4/0/7/n/$what|x\n"


async def test_a_worker_for_whose_second_pipe_none_is_left_keeps_no_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again and again, and each time would leave fewer."""
    pipe, pipes = os.pipe, iter([True, False])

    def one_pipe() -> tuple[int, int]:
        if next(pipes):
            return pipe()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def descriptors() -> int:
        return len([*Path("/proc/self/fd").iterdir()])

    async with Logs.open(LogConfig(log_dir=str(tmp_path)), job="j", node="n", role="r") as logs:
        await logs._disk.written(DEADLINE)
        before = descriptors()
        with monkeypatch.context() as patched:
            patched.setattr(os, "pipe", one_pipe)
            with pytest.raises(OSError, match="Too many open files"):
                logs.worker(1, 0, 0)
        await logs._disk.written(DEADLINE)
        assert descriptors() == before


async def test_lines_of_many_workers_stay_whole_on_one_pipe() -> None:
    code = "import sys\nfor i in range(20000): sys.STD.write(f'{i} ' + 'x' * (i % 300) + '\\n')"
    r, w = os.pipe()
    seen: dict[bytes, list[int]] = {}
    lines = asyncio.get_running_loop().run_in_executor(None, _read_all, r)
    async with running(LogConfig(), w) as run:
        os.close(w)
        await run.run(*[code.replace("STD", name) for name in ("stdout", "stderr", "stdout")])
    for line in (await lines).splitlines():
        who, number, x = re.fullmatch(rb"\[node0 (\d)\]: (\d+) (x*)", line).groups()  # type: ignore[union-attr]
        assert len(x) == int(number) % 300
        seen.setdefault(who, []).append(int(number))
    assert seen == {who: list(range(20000)) for who in (b"4", b"5", b"6")}


async def test_a_console_that_nobody_reads_holds_up_neither_the_loop_nor_an_exit() -> None:
    r, w = os.pipe()
    begin = asyncio.get_running_loop().time()
    try:
        async with running(LogConfig(), w) as run:
            os.close(w)
            endless = "while True: print('x' * 1000)"
            run.start(endless, "import sys; sys.exit('not stuck')")
            await until(lambda: run.logs.stdout.writer.full)
            await until(lambda: run.codes)
            assert not run.over
            run.watched.workers.stop(5)
            await run.watched.emptied()
            assert sorted(run.codes) == [-15, 1]
        # leaving the scope gives up on the console after its second, never later
        assert asyncio.get_running_loop().time() - begin < 10
    finally:
        os.close(r)


async def test_what_waits_is_written_when_the_reader_goes_on() -> None:
    r, w = os.pipe()
    async with running(LogConfig(), w) as run:
        os.close(w)
        run.start("for i in range(50000): print(f'{i:0100}')")
        await until(lambda: run.logs.stdout.writer.full)
        reading = asyncio.get_running_loop().run_in_executor(None, _read_all, r)
        await run.watched.emptied()
        assert not run.watched.pids
    lines = (await reading).splitlines()
    assert [int(line.split(b": ")[1]) for line in lines] == list(range(50000))


def _read_all(fd: int) -> bytes:
    with os.fdopen(fd, "rb") as file:
        return file.read()


async def test_a_reader_that_goes_away_ends_the_output_not_the_training(tmp_path: Path) -> None:
    r, w = os.pipe()
    async with running(LogConfig(log_dir=str(tmp_path)), w) as run:
        os.close(w)
        os.close(r)
        await run.run("for i in range(50000): print(i)")
        assert run.codes == [0]
        (text,) = filter(None, (await files(run.logs)).values())
        assert text.count("\n") == 50000


async def test_a_terminal_is_written_without_blocking_and_its_mode_is_left_alone() -> None:
    primary, terminal = pty.openpty()
    async with running(LogConfig(), terminal) as run:
        flags = fcntl.fcntl(terminal, fcntl.F_GETFL)
        assert not flags & os.O_NONBLOCK
        run.start("while True: print('x' * 100)")
        await until(lambda: run.logs.stdout.writer.full)  # nobody reads the terminal
        run.watched.kill()
        await run.watched.emptied()
        assert os.read(primary, 100).startswith(b"[node0 4]: xxx")
        assert fcntl.fcntl(terminal, fcntl.F_GETFL) == flags
    os.close(primary)
    os.close(terminal)


async def test_a_socket_as_stdout_gets_everything() -> None:
    import socket

    ours, theirs = socket.socketpair()
    with ours:
        async with running(LogConfig(), theirs.fileno()) as run:
            theirs.close()
            reading = asyncio.get_running_loop().run_in_executor(
                None, _read_all, os.dup(ours.fileno())
            )
            await run.run("for i in range(50000): print(i)")
        assert (await reading).count(b"\n") == 50000


async def test_a_closed_stdout_is_no_error() -> None:
    with (Path(os.devnull)).open("wb") as null, descriptor(1, null.fileno()):
        os.close(1)
        console = open_console(1)
        os.dup2(null.fileno(), 1)
    console.write(b"x\n")
    await closed(console)


async def test_full_disk_under_log_dir_is_told_once_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with small_disk(disk, "nr_inodes=16"), (tmp_path / "o").open("wb") as o:
        async with running(LogConfig(log_dir=str(disk)), o.fileno()) as run:
            talk = "for i in range(50000): print(i)"
            await run.run(talk, talk)
            assert run.codes == [0, 0]
            # The next generation can't even have a directory; it runs.
            error_files = [run.logs.error_file(n, 0) for n in range(100, 110)]
            assert await run.logs._disk.written(DEADLINE)
            assert not Path(error_files[-1]).parent.exists()
            await run.run(talk)
            assert run.codes == [0]
    assert (tmp_path / "o").read_text().count("\n") == 150_000
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "No space left on device" in caplog.text
    assert "--log-dir" in caplog.text, "what to do"


async def test_the_log_directory_must_be_writable(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for bad in (file, file / "below", Path("/proc/nothing")):
        with pytest.raises(UsageError, match="--log-dir"):
            Logs.open(LogConfig(log_dir=str(bad)), job="j", node="n", role="r")


async def test_what_workers_are_told_of_leads_there_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with Logs.open(LogConfig(log_dir="logs"), job="j", node="n", role="r") as logs:
        assert Path(logs.error_file(1, 0)).is_absolute()


async def test_log_records_go_through_the_console_in_order() -> None:
    r, w = os.pipe()
    with descriptor(2, w):
        console = open_console(2)
    os.close(w)
    handler = LogHandler(console)
    console.write(b"before\n")
    handler.emit(logging.makeLogRecord({"msg": "said %s", "args": ("ü",)}))
    console.write(b"after\n")
    await closed(console)
    assert _read_all(r).decode() == "before\nsaid ü\nafter\n"


async def test_a_hundred_megabytes_never_stall_the_loop(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    worst, last = 0.0, time.process_time()

    def tick() -> None:  # CPU time: the machine's other work is not ours to answer for
        nonlocal worst, last
        now = time.process_time()
        worst, last = max(worst, now - last), now
        if not run.over:
            loop.call_soon(tick)

    r, w = os.pipe()
    reader = subprocess.Popen(["wc", "-c"], stdin=r, stdout=subprocess.PIPE)
    os.close(r)
    async with running(LogConfig(log_dir=str(tmp_path)), w) as run:
        os.close(w)
        block = "import sys; block = b'x' * 99 + b'\\n'\n"
        run.start(block + "for _ in range(1000): sys.stdout.buffer.write(block * 1000)")
        tick()
        await run.watched.emptied()
        assert run.logs.directory is not None
        assert await run.logs._disk.written(DEADLINE)
        kept = run.logs.directory / "generation_7/4/stdout.log"
        assert kept.stat().st_size == 100_000_000
        kept.unlink()
    assert reader.communicate()[0].strip() == b"111000000"
    assert worst < 0.05, f"one turn of the loop took {worst:.3f} s"
