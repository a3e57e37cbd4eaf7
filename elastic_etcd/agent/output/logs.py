"""Workers' output: to the console with a prefix, and to one file per generation, rank and stream.

The agent reads the workers' pipes itself, so that a full disk or a terminal that nobody reads
never reaches the training, and so that the last traceback is at hand when a worker fails.
"""

import asyncio
import contextlib
import logging
import os
import tempfile
import termios
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import rmtree
from string import Template
from typing import Self

from elastic_etcd.agent.config import LogConfig, StreamChoice, Streams
from elastic_etcd.agent.inbox import Timer
from elastic_etcd.agent.output.writer import Output, OutputWriter, open_consoles
from elastic_etcd.errors import UsageError

DEFAULT_TEMPLATE = "[${node} ${rank}]: "

_LONGEST_LINE = 1 << 16
_CHUNK = 1 << 15
_TAIL = 1 << 16
_DRAIN = 1 << 21
_OUTPUT = 1  # among a terminal's attributes
_SILENCE = 1.0  # seconds until an unfinished line is shown: a prompt, or a bar's newest state

log = logging.getLogger(__name__)


class WorkerStream:
    """An output pipe of a worker, read whenever there is something in it.

    With `terminal` it is a terminal to the worker. All is shown as it is then, also text without a
    line end: a debugger's prompt. `file` is closed with it. Raises OSError when no descriptor is
    free.
    """

    def __init__(
        self,
        prefix: bytes,
        console: Output | None,
        file: Output | None,
        *,
        terminal: bool = False,
    ) -> None:
        self._console = console
        self._file = file
        self._lines = LinePrefixer(prefix)
        self._as_it_is = terminal
        self._silence = Timer()
        self._tail = bytearray()
        try:
            self._read, self.child_fd = _terminal() if terminal else os.pipe()
        except OSError:
            if file is not None:
                file.close()
            raise
        os.set_blocking(self._read, False)

    def begin(self) -> None:
        """Close our copy of the worker's end, which the worker has by now, and begin to read."""
        os.close(self.child_fd)
        asyncio.get_running_loop().add_reader(self._read, self._readable)

    def tail(self) -> bytes:
        """The last 64 KiB that were read."""
        return bytes(self._tail[-_TAIL:])

    def move(self, prefix: bytes, file: Output | None) -> None:
        """Output that comes from here on is another generation's."""
        self.drain()
        if self._read < 0:
            return
        if self._console is not None:
            self._console.write(self._lines.finish())
        self._lines.prefix = prefix
        if self._file is not None:
            self._file.close()
        self._file = file

    def drain(self) -> None:
        """Take what lies in the pipe now, however full the console is.

        Bounded, because a process that left the group may hold the pipe open and go on writing.
        """
        taken = 0
        while self._read >= 0 and taken < _DRAIN:
            size = self._take_chunk()
            if not size:
                return
            taken += size

    def close(self) -> None:
        """Stop reading, whoever still holds the other end, and write out the last line."""
        if self._read < 0:
            return
        asyncio.get_running_loop().remove_reader(self._read)
        os.close(self._read)
        self._read = -1
        self._silence.cancel()
        if self._console is not None:
            self._console.write(self._lines.finish())
        if self._file is not None:
            self._file.close()

    def _readable(self) -> None:
        self._take_chunk()
        outputs = [output for output in (self._console, self._file) if output is not None]
        full = next((output.writer for output in outputs if output.writer.full), None)
        if self._read >= 0 and full is not None:
            asyncio.get_running_loop().remove_reader(self._read)
            full.when_room(self._resume)

    def _resume(self) -> None:
        if self._read >= 0:
            asyncio.get_running_loop().add_reader(self._read, self._readable)

    def _take_chunk(self) -> int:
        try:
            chunk = os.read(self._read, _CHUNK)
        except BlockingIOError:
            return 0
        except OSError:  # a terminal that nobody has any more
            chunk = b""
        if not chunk:
            self.close()
            return 0
        self._tail += chunk
        del self._tail[: -2 * _TAIL]
        if self._file is not None:
            self._file.write(chunk)
        if self._console is not None and self._as_it_is:
            self._console.write(chunk)
        elif self._console is not None:
            self._console.write(self._lines.feed(chunk))
            if self._lines.unfinished:
                self._silence.start(_SILENCE, self._show_unfinished, self._console)
        return len(chunk)

    def _show_unfinished(self, console: Output) -> None:
        console.write(self._lines.show())


def _terminal() -> tuple[int, int]:
    """Our end and the worker's of a terminal as large as our own, which changes no bytes."""
    ours, theirs = os.openpty()
    attributes = termios.tcgetattr(theirs)
    attributes[_OUTPUT] &= ~termios.OPOST
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    with contextlib.suppress(OSError):
        termios.tcsetwinsize(theirs, termios.tcgetwinsize(1))
    return ours, theirs


@dataclass(frozen=True)
class WorkerLog:
    """The standard output and error of one worker."""

    out: WorkerStream
    err: WorkerStream

    def begin(self) -> None:
        """Begin to read both: the worker has its ends, or could not be started."""
        self.out.begin()
        self.err.begin()

    def drain(self) -> None:
        """Take what lies in both pipes."""
        self.out.drain()
        self.err.drain()

    def close(self) -> None:
        """Stop reading both."""
        self.out.close()
        self.err.close()


class Logs:
    """The destinations of the output of an agent's workers, for its whole life.

    `async with Logs.open(...) as logs`; leaving it writes out what waits, and gives up on what does
    not move for a second.
    """

    def __init__(
        self,
        config: LogConfig,
        prefix: Callable[..., str],
        directory: Path | None,
    ) -> None:
        self._config = config
        self._prefix = prefix
        self.directory = directory
        self._disk = OutputWriter()
        self.stdout, self.stderr = open_consoles()
        self._warned = self._has_evidence = False

    @classmethod
    def open(
        cls, config: LogConfig, *, job: str, node: str, role: str, template: str | None = None
    ) -> Self:
        """Make this run's own directory `<log_dir>/<job>_<random>`.

        `template` is torchrun's TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE: `${role_name}`, `${rank}`,
        `${local_rank}`, and here also `${node}` and `${generation}`. Raises UsageError when the
        directory can't be made.
        """
        text = DEFAULT_TEMPLATE if template is None else template
        prefix = partial(Template(text).safe_substitute, node=node, role_name=role)
        logs = cls(config, prefix, _make_directory(config.log_dir, job))
        if logs.directory is not None and logs._keeps_files:
            log.info("the workers' output is kept in %s", logs.directory)
        return logs

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.directory is not None and not (self._keeps_files or self._has_evidence):
            self._disk.put(partial(rmtree, self.directory, ignore_errors=True))
        await self._disk.close(patience=1)  # first: the console may have to tell of it
        for console in (self.stdout, self.stderr):
            console.close()
            await console.writer.close(patience=1)

    @property
    def to_be_removed(self) -> str:
        """The directory, if only the evidence of a hang would be kept of it; else ""."""
        return "" if self.directory is None or self._keeps_files else str(self.directory)

    @property
    def _keeps_files(self) -> bool:
        """Without --log-dir, --redirects or --tee the directory only holds error files."""
        config = self._config
        nothing = StreamChoice()
        return config.log_dir is not None or config.redirects != nothing or config.tee != nothing

    def error_file(self, generation: int, rank: int) -> str:
        """The worker's TORCHELASTIC_ERROR_FILE, whose folder is soon made; "" without a folder."""
        folder = self._folder(generation, rank)
        if folder is None:
            return ""
        self._disk.put(partial(self._make_folder, folder))
        return str(folder / "error.json")

    def keep(self) -> None:
        """Leave the error files where they are at the end, for who has started this agent."""
        self._has_evidence = True

    def evidence_file(self, generation: int, rank: int) -> Path | None:
        """For what is found out about a worker that hangs; None without a folder. It is kept."""
        folder = self._folder(generation, rank)
        if folder is None:
            return None
        self._has_evidence = True
        return folder / "hang.txt"

    def worker(
        self, generation: int, rank: int, local_rank: int, *, at_terminal: bool = False
    ) -> WorkerLog:
        """Pipes for one worker, and the files and consoles that they lead to.

        A worker that is `at_terminal` has a terminal as stdout. Raises OSError when no descriptor
        is free.
        """
        prefix = self._prefix_of(generation, rank, local_rank)

        def stream(which: Streams, console: Output, *, terminal: bool = False) -> WorkerStream:
            file = self._file_of(which, generation, rank, local_rank)
            shown = console if self._destinations(which, local_rank)[0] else None
            return WorkerStream(prefix, shown, file, terminal=terminal)

        out = stream(Streams.OUT, self.stdout, terminal=at_terminal)
        try:
            err = stream(Streams.ERR, self.stderr)
        except OSError:
            out.begin()
            out.close()
            raise
        return WorkerLog(out, err)

    def move(self, output: WorkerLog, generation: int, rank: int, local_rank: int) -> None:
        """The worker behind `output` goes on in another generation."""
        prefix = self._prefix_of(generation, rank, local_rank)
        output.out.move(prefix, self._file_of(Streams.OUT, generation, rank, local_rank))
        output.err.move(prefix, self._file_of(Streams.ERR, generation, rank, local_rank))

    def _prefix_of(self, generation: int, rank: int, local_rank: int) -> bytes:
        return self._prefix(generation=generation, rank=rank, local_rank=local_rank).encode()

    def _file_of(
        self, which: Streams, generation: int, rank: int, local_rank: int
    ) -> Output | None:
        folder = self._folder(generation, rank)
        if folder is None or not self._destinations(which, local_rank)[1]:
            return None
        path = folder / ("stdout.log" if which is Streams.OUT else "stderr.log")
        failed = partial(self._tell_file_error, path)
        return Output(self._disk, str(path), partial(self._open_file, path), failed)

    def _destinations(self, which: Streams, local_rank: int) -> tuple[bool, bool]:
        """Whether a stream goes to (the console, a file)."""
        config = self._config
        teed = bool(config.tee[local_rank] & which)
        redirected = bool(config.redirects[local_rank] & which)
        shown = config.local_ranks_filter is None or local_rank in config.local_ranks_filter
        to_file = teed or redirected or config.log_dir is not None
        return shown and (teed or not redirected), to_file

    def _folder(self, generation: int, rank: int) -> Path | None:
        if self.directory is None:
            return None
        return self.directory / f"generation_{generation}" / str(rank)

    # --- in the writer's thread

    def _make_folder(self, folder: Path) -> None:
        try:
            self._make(folder)
        except OSError as error:
            self._tell_file_error(folder, error)

    def _make(self, folder: Path) -> None:
        assert self.directory
        self.directory.mkdir(0o700, parents=True, exist_ok=True)  # somebody may have removed it
        folder.mkdir(parents=True, exist_ok=True)

    def _open_file(self, path: Path) -> int:
        self._make(path.parent)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def _tell_file_error(self, path: Path, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            cure = "make room there, or name another --log-dir at the next start"
            text = "can't write %s (%s): training goes on without log files; %s"
            log.warning(text, path, error.strerror, cure)


def _make_directory(log_dir: str | None, job: str) -> Path | None:
    if log_dir == os.devnull:
        return None
    base = Path(tempfile.gettempdir() if log_dir is None else log_dir).absolute()
    try:
        base.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{job}_", dir=base))
    except OSError as error:
        raise UsageError(
            f"can't write logs under {base}: {error.strerror}. "
            "Name a directory that can be written with --log-dir, or --log-dir /dev/null for none."
        ) from error


class LogHandler(logging.Handler):
    """Sends the agent's own log lines to its stderr, in order with the workers' lines there."""

    def __init__(self, stderr: Output) -> None:
        super().__init__()
        self._stderr = stderr

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record and its line end."""
        self._stderr.say(self.format(record).encode(errors="replace") + b"\n")


class LinePrefixer:
    r"""Turns the chunks of one stream into whole lines that each begin with the prefix.

    A line ends with \n, \r\n or \r; a progress bar's \r stays as it is, so that the bar shows. A
    line longer than 64 KiB is cut into pieces, each a line of its own.
    """

    def __init__(self, prefix: bytes) -> None:
        self.prefix = prefix
        self._rest = bytearray()
        self._after_return = False
        self._open = False  # what stands in the console's line has no end yet

    @property
    def unfinished(self) -> bool:
        """Whether a part of a line waits for its end."""
        return bool(self._rest)

    def feed(self, chunk: bytes) -> bytes:
        """The lines that are complete with this chunk, prefixed; may be empty."""
        cut = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
        if not cut:
            self._rest += chunk
            return self._cut_long()
        lines = bytes(self._rest) + chunk[:cut]
        self._rest = bytearray(chunk[cut:])
        head = b""
        if self._after_return and lines.startswith(b"\n"):  # the other half of a \r\n
            head, lines = b"\n", lines[1:]
        self._after_return = chunk[cut - 1 : cut] == b"\r"
        shown = self._prefixed(lines)
        self._open = False
        return head + shown + self._cut_long()

    def show(self) -> bytes:
        """The unfinished line: a bar's has no end yet, any other is a line of its own."""
        if not self._after_return:
            return self.finish()
        shown = (b"" if self._open else self.prefix) + bytes(self._rest)
        self._rest.clear()
        self._open = True
        return shown

    def finish(self) -> bytes:
        """The last line if it had no line end, which it gets."""
        last = self.prefix + bytes(self._rest) if self._rest else b""
        ended = b"\n" if last or self._open else b""
        self._rest.clear()
        self._open = False
        return last + ended

    def _cut_long(self) -> bytes:
        if len(self._rest) < _LONGEST_LINE:
            return b""
        self._after_return = False
        return self.finish()

    def _prefixed(self, lines: bytes) -> bytes:
        prefix = self.prefix
        if not lines or not prefix:
            return lines
        out = lines if self._open else prefix + lines
        if b"\r" in lines:
            out = out.replace(b"\r", b"\r" + prefix).replace(b"\r" + prefix + b"\n", b"\r\n")
        out = out.replace(b"\n", b"\n" + prefix)
        if b"\r" in lines:  # the empty line before a bar that begins with \r needs no prefix
            out = out.replace(prefix + b"\r" + prefix, b"\r" + prefix)
        return out[: -len(prefix)]
