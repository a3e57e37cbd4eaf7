"""For a moment no process and no thread is to be had; M10."""

import os
import subprocess
import sys

from tests.support.job import ROOT

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
    done = subprocess.run(
        [sys.executable, "-c", HEAD + M10],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
