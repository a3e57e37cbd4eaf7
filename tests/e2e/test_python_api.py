"""A job that a Python program starts: what it gets, and what it leaves when it is killed."""

import asyncio
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest

import elastic_etcd as ee
from elastic_etcd.errors import UsageError
from elastic_etcd.launcher import LaunchConfig, elastic_launch
from tests.support.etcd import EtcdServer
from tests.support.job import PATIENCE, ROOT
from tests.support.processes import MARK, Changes, command, marked, send

pytestmark = pytest.mark.timeout(600)

PAGE = (ROOT / "docs" / "python.md").read_text()
TRAINING, _, FAILING, _ = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
LARGE = 1 << 20
WAITS = """
import sys, time
from pathlib import Path
from elastic_etcd.launcher import LaunchConfig, elastic_launch

def wait(folder):
    Path(folder, "waits").touch()
    time.sleep(600)

if __name__ == "__main__":
    try:
        elastic_launch(LaunchConfig(), wait)(sys.argv[1])
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    sys.stdin.readline()
    Path(sys.argv[1], "waits").unlink()
    elastic_launch(LaunchConfig(start_method="exec"), wait)(sys.argv[1])
"""

STOPPED = """
import asyncio, sys, time
from pathlib import Path
from elastic_etcd.errors import ElasticEtcdError
from elastic_etcd.launcher import LaunchConfig, elastic_launch

def wait(folder):
    Path(folder, "waits").touch()
    time.sleep(600)

def call(launch):
    try:
        launch(sys.argv[1])
    except ElasticEtcdError as error:
        print("raised:", error, flush=True)

async def main(launch):
    try:
        await asyncio.to_thread(call, launch)
    finally:
        launch.stop()

if __name__ == "__main__":
    launch = elastic_launch(LaunchConfig(start_method="exec"), wait)
    try:
        asyncio.run(main(launch))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    launch.stop()
    call(launch)
"""


def killed_once(much: bytes) -> tuple[str, int]:
    """Rank 1 dies in the first generation; in the next it hears from rank 0.

    M7: it removes the program's folder first, as a cleaner of temporary files may.
    """
    rank, store = os.environ["RANK"], ee.store()
    if rank == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        store.wait(["rank 0 is there"])
        shutil.rmtree(Path(os.environ["ELASTIC_ETCD_HELD_FUNCTION"]).readlink().parent)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == "0":
        store.set("rank 0 is there", os.environ["ELASTIC_ETCD_GENERATION"])
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            store.wait(["what nobody sets"])
    print("hello from", rank, flush=True)
    return store.get("rank 0 is there").decode() + rank, len(much)


async def test_a_killed_worker_is_restarted_and_the_last_values_count(tmp_path: Path) -> None:
    """In a thread beside a running loop, with functions of a module that pytest has imported."""
    config = LaunchConfig(nproc_per_node=2, log_dir=tmp_path, tee={1: 3}, redirects={0: 3})
    result = await asyncio.to_thread(elastic_launch(config, killed_once).run, b"x" * LARGE)
    assert result.outcome == "succeeded", result
    assert (result.generations, result.restarts, result.exit_code) == ((1, 2), 1, 0)
    assert result.return_values == {0: ("20", LARGE), 1: ("21", LARGE)}
    (failure,) = result.failures
    assert (failure.generation, failure.rank, failure.exitcode) == (1, 1, -signal.SIGKILL)
    assert (failure.error_file, result.cause) == ("", None)
    for rank in ("0", "1"):
        (log,) = tmp_path.glob(f"*/generation_2/{rank}/stdout.log")
        assert log.read_text() == f"hello from {rank}\n"


def test_p7_a_job_that_had_succeeded_before_is_an_error(etcd: EtcdServer, prefix: str) -> None:
    job = LaunchConfig(run_id="job", rdzv_endpoint=etcd.endpoint, flags=["--prefix", prefix])
    assert elastic_launch(job, "true")() == {}
    with pytest.raises(UsageError, match=r"true: job job had succeeded before: .*--rerun"):
        elastic_launch(job, "true")()
    assert elastic_launch(job, "true").run().outcome == "over"
    again = replace(job, flags=[*job.flags, "--rerun"])
    assert elastic_launch(again, "true").run().generations == (2,)


class Program:
    """A Python program of a user's, what it prints, and all that it starts."""

    def __init__(self, text: str, folder: Path) -> None:
        self.mark, self.folder, self.temporary = uuid.uuid4().hex, folder, folder / "tmp"
        self.temporary.mkdir()
        file = folder / "program.py"
        file.write_text(text)
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        own = {MARK: self.mark, "PYTHONPATH": paths, "TMPDIR": str(self.temporary)}
        own["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")  # torch leaves it
        self.process = subprocess.Popen(
            [sys.executable, str(file), str(folder)],
            cwd=folder,
            env=os.environ | own,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def left(self) -> list[int]:
        """What it has started and is there still."""
        return [pid for pid in marked(self.mark) if pid != self.process.pid]

    def says(self) -> str:
        """All of it, until its end."""
        said, _ = self.process.communicate(timeout=PATIENCE)
        return str(said)

    def begins(self) -> None:
        """Wait for its worker."""
        changes = Changes(self.folder)
        changes.follow(self.process.pid)
        assert changes.wait(lambda: self.left() and (self.folder / "waits").exists(), PATIENCE)
        changes.close()

    def ends(self) -> None:
        """Wait until nothing of it is left."""
        for pid in iter(lambda: next(iter(self.left()), 0), 0):
            with suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
                ended = select.select([pidfd], [], [], PATIENCE)[0]
                os.close(pidfd)
                assert ended, command(pid)

    def residue(self) -> list[str]:
        """What it has left: processes, and temporary files."""
        return [*map(command, self.left()), *map(str, self.temporary.rglob("*"))]

    def close(self) -> None:
        send(signal.SIGKILL, marked(self.mark))
        self.process.communicate()


Begin = Callable[[str], Program]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    with ExitStack() as scope:

        def started(text: str) -> Program:
            program = Program(text, tmp_path)
            scope.callback(program.close)
            return program

        yield started


def test_the_pages_program_gives_values(begin: Begin) -> None:
    program = begin(TRAINING)
    found = re.search(r"^\{0: ([\d.e-]+), 1: ([\d.e-]+)\}$", program.says(), re.MULTILINE)
    assert found
    assert found[1] == found[2]
    assert program.residue() == []


@pytest.mark.nightly(part="jobs")
def test_the_pages_program_tells_of_a_failing_rank(begin: Begin) -> None:
    said = begin(FAILING).says()
    assert "rank 0 exited 1\n" in said
    assert "return number / int(os.environ" in said
    assert "ZeroDivisionError: division by zero" in said
    assert Path(said.splitlines()[-1]).read_text().startswith('{"message"')


def test_ctrl_c_and_sigterm_are_raised_when_the_workers_are_gone(begin: Begin) -> None:
    program = begin(WAITS)
    program.begins()
    assert program.left()
    program.process.send_signal(signal.SIGINT)
    assert program.process.stdout
    assert program.process.stdout.readline() == "interrupted\n"
    assert program.residue() == []
    assert program.process.stdin
    program.process.stdin.write("go on\n")
    program.process.stdin.flush()
    program.begins()
    program.process.terminate()
    program.says()
    assert program.process.returncode == 128 + signal.SIGTERM
    assert program.residue() == []


def test_a_call_in_a_thread_is_ended_by_stop(begin: Begin) -> None:
    program = begin(STOPPED)
    program.begins()
    program.process.send_signal(signal.SIGINT)
    left, interrupted, again = program.says().splitlines()
    assert left == "raised: wait: the job has not succeeded (left): this node has left"
    assert interrupted == "interrupted"
    assert again == "raised: wait: stop() was called before"
    assert program.residue() == []


def test_a_program_that_is_killed_leaves_nothing(begin: Begin) -> None:
    program = begin(WAITS)
    program.begins()
    program.process.kill()
    program.ends()
    assert program.residue() == []
