"""Each of chaos' faults that no signal brings about does what it says, and ends."""

import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scripts.chaos_lib.machine import (
    MADE,
    MEMORY,
    empty,
    end_shortages,
    no_descriptor,
    no_process,
    remove_memory,
    reset_links,
)
from tests.support.processes import MARK

# For each line it tries once, and says what came of it.
TRYING = """
import os, sys
def try_once():
    if sys.argv[1] == "fork":
        pid = os.fork()
        os.waitpid(pid, 0) if pid else os._exit(0)
    else:
        os.close(os.open("/dev/null", os.O_RDONLY))
for _ in sys.stdin:
    try:
        try_once()
        print("done", flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
"""

# It calls at a port, and says what comes from there.
CALLING = """
import socket, sys
link = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
try:
    while said := link.recv(1):
        print(said, flush=True)
except ConnectionError:
    print("reset", flush=True)
"""


class Trying:
    """A process that tries something whenever it is asked."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def __call__(self) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@contextmanager
def trying(what: str, mark: str = "") -> Iterator[Trying]:
    with subprocess.Popen(
        [sys.executable, "-c", TRYING, what],
        env=os.environ | {MARK: mark},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Trying(process)


def test_no_process_is_to_be_had_for_a_while() -> None:
    mark = uuid.uuid4().hex
    with trying("fork", mark) as attempt, trying("fork") as other:
        assert attempt() == "done"
        said, undo = no_process(mark)
        if undo is None:
            pytest.skip(said)
        try:
            assert attempt() == "Resource temporarily unavailable"
            assert other() == "done"
        finally:
            undo()
        assert attempt() == "done"


def test_no_process_of_a_node_that_is_gone() -> None:
    no_process(uuid.uuid4().hex)
    end_shortages()
    assert not MADE


def test_no_descriptor_is_to_be_had_for_a_while() -> None:
    with trying("open") as attempt:
        assert attempt() == "done"
        undo = no_descriptor(attempt.process.pid)
        assert attempt() == "Too many open files"
        undo()
        assert attempt() == "done"
        undo = no_descriptor(attempt.process.pid)
    undo()  # it is gone


def test_links_to_other_agents_are_reset_and_nothing_else() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        subprocess.Popen(
            [sys.executable, "-c", CALLING, str(server.getsockname()[1])], stdout=subprocess.PIPE
        ) as agent,
        server.accept()[0] as link,
    ):
        assert agent.stdout is not None
        assert reset_links(agent.pid, []) in ("0 of them", "left out: it takes ss, of iproute2")
        link.sendall(b"x")
        assert agent.stdout.readline() == b"b'x'\n"
        said = reset_links(agent.pid, [os.getpid()])
        if said.startswith("left out"):
            pytest.skip(said)
        assert said == "1 of them"
        assert agent.stdout.readline() == b"reset\n"
        with pytest.raises(ConnectionError):
            link.recv(1)


def test_directories_are_emptied_and_removed(tmp_path: Path) -> None:
    memory, temporary = tmp_path / f"{MEMORY}x", tmp_path / "tmp"
    (memory / "step-1").mkdir(parents=True)
    (temporary / "agent").mkdir(parents=True)
    (temporary / "agent" / "socket").touch()
    (temporary / "file").touch()
    (temporary / "link").symlink_to(tmp_path)
    empty(temporary)
    assert list(temporary.iterdir()) == []
    lock = os.open(memory, os.O_RDONLY)
    remove_memory(os.getpid())
    os.close(lock)
    assert list(tmp_path.iterdir()) == [temporary]
