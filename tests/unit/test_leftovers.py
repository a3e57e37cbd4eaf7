"""Who is an orphan of a worker's, and who only has its environment: schedulers copy that."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_etcd.system import leftovers
from elastic_etcd.system.leftovers import MARK
from tests.support.job import ROOT

FORMER = "4000000:12345:n1@chain"  # no process has so high a number
ORPHAN = "setsid sleep 600 > /dev/null & echo $!"
ENDS = {
    "a worker": "asyncio.run(end())",
    "a former agent": 'asyncio.run(end_former_agents_leftovers(Mark.own("n1", "chain"), 20))',
    "a guardian's agent": "kill_marked(mark)",
}


AGENT = """
import asyncio, sys
from elastic_etcd.system import leftovers
from elastic_etcd.system.leftovers import *
leftovers.LEFTOVERS, mark = 0.1, sys.argv[1]
async def end():
    own = Mark.parse(mark)
    await end_late(own, 1, await end_leftovers(own, 1))
"""


def agent(end: str) -> tuple[str, ...]:
    """A program that ends what was left as an agent does, or its guardian."""
    return (sys.executable, "-c", AGENT + end, FORMER)


def run(*command: str, **more: str) -> str:
    env = {k: v for k, v in os.environ.items() if k != MARK} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env | more, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def lives(pid: int) -> bool:
    try:
        return b") Z" not in Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError:
        return False


@contextmanager
def submitted() -> Iterator[int]:
    """A process with the mark that a scheduler has started, which nobody marked."""
    command = ("sh", "-c", f"{MARK}={FORMER} sleep 600 & echo $!; wait")
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as scheduler:
        assert scheduler.stdout
        try:
            yield int(scheduler.stdout.readline())
        finally:
            os.killpg(scheduler.pid, 9)


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_an_orphan_is_ended(end: str) -> None:
    pid = int(run("sh", "-c", ORPHAN, **{MARK: FORMER}))
    assert lives(pid)
    run(*agent(end))
    assert not lives(pid)


async def test_no_patience_is_enough_where_nothing_was_left() -> None:
    """As with --kill-timeout 0: it is for what is there, and not for the look at all processes."""
    await leftovers.end_former_agents_leftovers(leftovers.Mark.own("n1", "nothing"), 0)


def test_f1_what_removes_shared_memory_is_left_to_its_work() -> None:
    """As torch_shm_manager, which begins with its work when its process has ended."""
    code = "import time; time.sleep(600)  # from multiprocessing.resource_tracker import main;"
    orphan = f'setsid {sys.executable} -c "{code}" > /dev/null & echo $!'
    pid = int(run("sh", "-c", orphan, **{MARK: FORMER}))
    try:
        run(*agent(ENDS["a worker"]))
        assert lives(pid)
    finally:
        os.kill(pid, 9)


@pytest.mark.parametrize("kept", ["", "memory = mmap(device, 4096); os.close(device);"])
def test_f2_an_accelerator_that_is_open_or_mapped_is_seen(
    kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens = "import os; from mmap import mmap; device = os.open('/dev/zero', os.O_RDWR); "
    code = f"{opens} {kept} print(flush=True); input()"
    command, pipe = (sys.executable, "-c", code), subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe) as process:
        assert process.stdout
        process.stdout.readline()
        assert not leftovers._has_device(process.pid)
        monkeypatch.setattr(leftovers, "_DEVICES", ("/dev/zero",))
        assert leftovers._has_device(process.pid)
        process.communicate("\n")
    assert not leftovers._has_device(process.pid), "it is gone"


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_m3_an_agent_that_has_the_mark_ends_neither_itself_nor_who_has_started_it(end: str) -> None:
    """A worker submits the next job of its chain."""
    script = 'sleep 600 > /dev/null & monitor=$!; "$@" && kill $monitor && echo the script goes on'
    told = run("sh", "-c", script, "sh", *agent(end), **{MARK: FORMER})
    assert told == "the script goes on\n"


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_m4_a_job_that_a_worker_has_submitted_is_left(end: str) -> None:
    with submitted() as pid:
        run(*agent(end))
        assert lives(pid)
