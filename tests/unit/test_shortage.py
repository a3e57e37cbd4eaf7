"""For a moment no process and no thread is to be had, or no memory for good."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_etcd.agent.config import LogConfig
from elastic_etcd.agent.output.logs import Logs
from elastic_etcd.system import limits as node_limits
from tests.support.etcd import EtcdServer
from tests.support.job import ROOT
from tests.unit.watched import Watched

# Root is refused none while it has its capabilities; another user's limit counts as one's own.
HEAD = """
import asyncio, ctypes, logging, os, resource, struct, sys, threading
from functools import partial
from elastic_etcd.agent.output.writer import OutputWriter
from elastic_etcd.system.child_process import exited, start
from elastic_etcd.system.threads import begin

def obey_limits():
    if os.getuid() == 0:
        os.setresuid(54321, 0, 0)
    head = struct.pack("Ii", 0x20080522, 0)
    sets = ctypes.create_string_buffer(24)
    libc = ctypes.CDLL(None)
    assert libc.capget(head, sets) == 0
    effective, *others = struct.unpack("6I", sets)
    admin, resources = 1 << 21, 1 << 24
    assert libc.capset(head, struct.pack("6I", effective & ~(admin | resources), *others)) == 0

def let_have(more):
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    resource.setrlimit(resource.RLIMIT_NPROC, (hard if more else 1, hard))

class Lines(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
        told.set()
"""


def run_with_limits(code: str) -> None:
    """Run it in a Python to which limits apply; it fails as that does."""
    done = subprocess.run(
        [sys.executable, "-c", HEAD + code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


M10 = """
async def main():
    await begin(int)
    writer, written, loop = OutputWriter(), asyncio.Event(), asyncio.get_running_loop()
    let_have(False)
    try:
        threading.Thread(target=int).start()
    except RuntimeError:
        pass
    else:
        sys.exit("there are threads")
    writer.put(partial(loop.call_soon_threadsafe, written.set))
    await asyncio.gather(written.wait(), begin(int))
    starting = [
        asyncio.create_task(start(["true"], os.environ, stdout=1, stderr=2)) for _ in range(3)
    ]
    await told.wait()
    await asyncio.sleep(0)
    assert not any(each.done() for each in starting)
    let_have(True)
    for each in starting:
        assert await exited(await each) == 0
    assert len(lines) == 1 and lines[0].startswith("no process or thread is to be had"), lines

lines, told = [], asyncio.Event()
logging.getLogger("elastic_etcd").addHandler(Lines())
obey_limits()
asyncio.run(asyncio.wait_for(main(), 60))
"""


def test_m10_threads_and_children_where_none_are_to_be_had_for_a_moment() -> None:
    run_with_limits(M10)


M10_START = """
from elastic_etcd.errors import ElasticEtcdError
from elastic_etcd.system import kernel
kernel.check()
obey_limits()
let_have(False)
try:
    kernel.check()
except ElasticEtcdError as error:
    assert str(error).startswith("can't start new thread: an agent and its first processes need 32")
    assert error.exit_code == 1
else:
    sys.exit("it is content")
"""


def test_m10_an_agent_that_starts_where_no_thread_is_to_be_had() -> None:
    run_with_limits(M10_START)


M10_ETCD = """
from elastic_etcd.core.txn import Get
from elastic_etcd.etcd.client import Client
from tests.support.aio import elapse

async def main():
    async with Client(config) as client:
        await client.range(Get("/"))
        let_have(False)
        client.give_up(await client.connected())
        asked = asyncio.create_task(client.range(Get("/")))
        await elapse(3)  # gRPC asks for threads, if it has to, all the time
        let_have(True)
        await asked

obey_limits()
asyncio.run(asyncio.wait_for(main(), 60))
"""


def test_m10_etcd_is_reached_again_where_no_thread_was_to_be_had(etcd: EtcdServer) -> None:
    head = f"from elastic_etcd.etcd.access import EtcdConfig\nconfig = {etcd.config!r}\n"
    run_with_limits(head + M10_ETCD)


MEMORY = 64 << 20
M18 = """
import subprocess, sys
from elastic_etcd.agent.failures import failure_message
from elastic_etcd.system.limits import oom_kills
before = oom_kills()
done = subprocess.run([sys.executable, "-c", "bytearray(256 << 20)"])
print(done.returncode, failure_message(done.returncode, "", b"", before))
"""


@pytest.fixture
def small() -> Iterator[Path]:
    """A cgroup with little memory."""
    name = f"elastic_etcd-{os.getpid()}"
    limits = {
        "memory.limit_in_bytes": MEMORY,
        "memory.memsw.limit_in_bytes": MEMORY,
        "memory.max": MEMORY,
        "memory.swap.max": 0,
    }
    for root in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")):
        folder = root / name
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            given = [file for file in limits if (folder / file).exists()]
            for file in given:
                (folder / file).write_text(str(limits[file]))
            if given:
                yield folder
                return
        finally:
            folder.rmdir()
    pytest.skip("no cgroup for memory can be made here")


def test_m18_the_kernel_counts_what_it_has_killed_for_want_of_memory(small: Path) -> None:
    enter = f'echo $$ > {small / "cgroup.procs"}; exec "$@"'
    told = subprocess.run(
        ["sh", "-c", enter, "sh", sys.executable, "-c", M18],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    assert told.startswith("-9 out of memory: the kernel has killed it")
    assert "has grown by 1)" in told


async def test_m18_who_was_killed_for_want_of_memory_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_limits, "_CGROUPS", tmp_path)
    events = tmp_path / "memory.events"
    events.write_text("low 0\noom 1\noom_kill 1\n")
    grow = f"printf 'oom 2\\noom_kill 2\\n' > {events}; kill -9 $$"
    async with (
        Logs.open(LogConfig(str(tmp_path)), job="j", node="n", role="r") as logs,
        Watched.open(logs) as watched,
    ):
        for generation, command in enumerate(("kill -9 $$", grow, "kill -9 $$", "exit 9"), 1):
            watched.launch(["sh", "-c", command], generation=generation)
            await watched.emptied()
            (failure,) = watched.failures
            assert failure.code in (-signal.SIGKILL, 9)
            assert failure.message.startswith("out of memory: ") == (command == grow)
