"""A worker's page: what the agent reads of scripts as users write them, started in both ways."""

import asyncio
import mmap
import os
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from elastic_etcd.agent.config import LogConfig
from elastic_etcd.agent.output.logs import Logs
from elastic_etcd.protocol import activity
from elastic_etcd.protocol.activity import Activity, ActivityPage, ActivityPages, Doing
from elastic_etcd.system.kernel import sealed_memfd
from tests.unit.prefork import BothWays, Outcome, python
from tests.unit.watched import Watched

pytestmark = pytest.mark.timeout(600)

# Plain: nothing of ours is imported; it waits for a line in a FIFO where a step would hang.
PLAIN = """
import os, sys
import torch

def main(gate):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in torch.utils.data.DataLoader(torch.ones(10, 2), batch_size=2, num_workers=1):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
    open(gate).read()

if __name__ == "__main__":
    main(sys.argv[1])
"""
TOLD = """
import sys
import torch
import elastic_etcd as ee

optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
optimizer.step()
for _ in range(3):
    optimizer.step()
    optimizer.step()
    ee.heartbeat()
with ee.quiet("evaluation"):
    open(sys.argv[1]).read()
"""


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    log = LogConfig(log_dir=str(tmp_path))
    async with (
        Logs.open(log, job="j", node="n", role="r") as logs,
        Watched.open(logs) as watched,
    ):
        yield watched


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BothWays]:
    with BothWays(tmp_path_factory.mktemp("ways")) as ways:
        yield ways


async def told(watched: Watched, condition: Callable[[Activity], object]) -> Activity:
    """Wait until the only worker says so."""
    async with asyncio.timeout(120):
        while True:  # a page has no events
            for _, activity in watched.workers.activities():
                if condition(activity):
                    return activity
            await asyncio.sleep(0.02)


def script(folder: Path, text: str) -> list[str]:
    (folder / "gate").unlink(missing_ok=True)
    os.mkfifo(folder / "gate")
    (folder / "train.py").write_text(textwrap.dedent(text))
    return python(folder / "train.py", folder / "gate")


async def test_a_plain_script_s_steps_are_seen_and_a_new_world_has_a_clear_page(
    watched: Watched, tmp_path: Path
) -> None:
    watched.launch(script(tmp_path, PLAIN))
    found = await told(watched, lambda p: p.steps == 5)
    assert found.doing is Doing.STEP
    later = await told(watched, lambda p: p.seconds > found.seconds)
    assert (later.steps, later.slowest) == (5, found.slowest)
    assert found.slowest > 0
    (tmp_path / "gate").write_text("go on")
    await watched.emptied()
    watched.launch(script(tmp_path, "import sys; open(sys.argv[1]).read()"))
    found = await told(watched, lambda p: p.doing is Doing.STARTING)
    assert (found.doing, found.steps) == (Doing.STARTING, 0)


async def test_what_is_told_counts_and_not_the_optimizers(watched: Watched, tmp_path: Path) -> None:
    watched.launch(script(tmp_path, TOLD))
    found = await told(watched, lambda p: p.doing is Doing.QUIET)
    assert (found.steps, found.what) == (3, "evaluation")


@pytest.mark.nightly(part="forks")
def test_a_forked_worker_is_seen_like_one_that_is_executed(ways: BothWays, tmp_path: Path) -> None:
    pages = ActivityPages()
    command = ways.script(PLAIN)
    (tmp_path / "gate").write_text("")
    for run in (ways.fork, ways.scripted):
        path = pages.begin(0)
        done = run([*command, str(tmp_path / "gate")], ways.env | {activity.VARIABLE: path})
        assert done == Outcome(0, "", "")
        assert pages.read(0).steps == 5
        assert pages.read(0).doing is Doing.DONE, "its script is at its end"
    pages.close()


def test_f3_no_step_is_under_way_without_a_process_group(ways: BothWays) -> None:
    text = """
    import os
    import torch
    import torch.distributed as dist
    from torch.distributed import destroy_process_group
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        part = dist.new_group([0])
        optimizer.step()
        destroy_process_group(part)
        destroy_process_group()
    os._exit(0)
    """
    pages = ActivityPages()
    for run in (ways.fork, ways.scripted):
        env = ways.env | {activity.VARIABLE: pages.begin(0)}
        done = run(ways.script(textwrap.dedent(text)), env)
        assert (done.code, done.err) == (0, "")
        found = pages.read(0)
        assert (found.doing, found.steps) == (Doing.DONE, 2)
        assert found.seconds > 0
    pages.close()


@pytest.mark.nightly(part="forks")
def test_compiled_models_are_seen_and_compiled_optimizers_not_disturbed(ways: BothWays) -> None:
    text = """
    import torch
    model = torch.compile(torch.nn.Linear(2, 2), backend="eager")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    for n in range(6):
        model(torch.ones(2)).sum().backward()
        step() if n % 2 else optimizer.step()
    """
    pages = ActivityPages()
    for run in (ways.fork, ways.scripted):
        env = ways.env | {activity.VARIABLE: pages.begin(0)}
        done = run(ways.script(textwrap.dedent(text)), env)
        assert (done.code, "Traceback" in done.err) == (0, False)
        assert pages.read(0).steps == 3
    pages.close()


def test_pauses_are_not_the_steps_time() -> None:
    page = ActivityPage(sealed_memfd("activity", activity.SIZE))
    page.clear()
    page.step(told=False)
    page.step(told=False)
    with page.during(Doing.QUIET, "é" * 200):
        with page.during(Doing.COMMIT):
            assert page.read().doing is Doing.COMMIT
        within = page.read()
    before = page.read()
    assert (within.commits, before.commits) == (1, 1)
    assert 0 < within.commit_seconds == before.commit_seconds
    assert 0 < within.since_commit < before.since_commit
    page.step(told=False)
    assert within.doing is Doing.QUIET
    assert within.what.startswith("é" * 63)
    assert (before.doing, before.what) == (Doing.STEP, "")
    assert page.read().steps == 3


def test_a_commit_is_as_old_as_its_last_bytes() -> None:
    page = ActivityPage(sealed_memfd("activity", activity.SIZE))
    page.clear()
    page.step(told=True)
    page.move()  # in no commit: nothing
    before = page.read()
    with page.during(Doing.COMMIT):
        began = page.read()
        page.move()
        moved = page.read()
    after = page.read()
    assert began.doing is moved.doing is Doing.COMMIT
    # Of clocks that are read one after the other.
    assert moved.since_commit - began.since_commit > moved.seconds - began.seconds
    assert (after.doing, after.steps) == (before.doing, before.steps) == (Doing.STEP, 1)
    assert after.commit_seconds > 0


def measure(page: ActivityPage, *, times: int, waited: int) -> Activity:
    for _ in range(times):
        for _ in range(activity.EVERY):
            page.step(told=False)
        page.waited(waited)
    return page.read()


def test_what_steps_take_outside_of_collectives() -> None:
    page = ActivityPage(sealed_memfd("activity", activity.SIZE))
    page.clear()
    before = page.is_measured
    page.clear(measured=True)
    assert (before, page.is_measured) == (False, True)
    page.waited(0)
    page.step(told=False)
    page.waited(0)
    assert page.read().measured == 0, "nothing is known of the first step"
    few = measure(page, times=activity.MEASURED - 1, waited=0)
    assert (few.measured, few.outside) == (9, 0.0)
    whole = measure(page, times=1, waited=0)
    assert whole.usual > 0
    assert whole.outside > 0
    assert measure(page, times=5, waited=0).outside > 0
    assert measure(page, times=10, waited=10**12).outside == 0.0, "all of it is waiting"


def test_steps_that_are_not_the_same_any_more_are_not_measured() -> None:
    page = ActivityPage(sealed_memfd("activity", activity.SIZE))
    page.clear(measured=True)
    before = measure(page, times=3, waited=0).measured
    page.step(told=True)  # counts from 1 again
    page.waited(0)
    assert page.read().measured == before
    for _ in range(100):  # more than are remembered
        page.step(told=True)
    page.waited(0)
    assert page.read().measured == before


@pytest.mark.parametrize(
    "measured", [pytest.param(False, marks=pytest.mark.nightly(part="jobs")), True]
)
def test_what_ddp_measures_is_seen(ways: BothWays, measured: bool) -> None:
    text = """
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(80):
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()
    """
    pages = ActivityPages()
    for run in (ways.fork, ways.scripted):
        env = ways.env | {activity.VARIABLE: pages.begin(0, measured=measured)}
        done = run(ways.script(textwrap.dedent(text)), env)
        assert (done.code, done.err) == (0, "")
        found = pages.read(0)
        assert (found.measured >= activity.MEASURED) == measured
        assert (found.outside > 0) == measured
    pages.close()


def test_a_worker_can_neither_shorten_the_page_nor_mislead_its_reader(tmp_path: Path) -> None:
    pages = ActivityPages()
    path = pages.begin(0)
    with open(path, "r+b") as file:  # noqa: PTH123 - as a worker opens it
        with pytest.raises(PermissionError):
            os.ftruncate(file.fileno(), 0)
        with mmap.mmap(file.fileno(), 4096) as memory:
            memory[:] = b"\xff" * 4096
    read = pages.read(0)
    assert (read.doing, read.seconds) == (Doing.DONE, 0.0)
    pages.close()


def test_without_an_agent_nothing_happens() -> None:
    import elastic_etcd as ee

    ee.heartbeat()
    with ee.quiet("evaluation"):
        pass
    assert activity.VARIABLE not in os.environ


def test_it_is_the_standard_library_only() -> None:
    """What a worker begins with loads it in the worker's interpreter."""
    source = Path(activity.__file__).read_text()
    roots = {line.split()[1].split(".")[0] for line in source.splitlines()
             if line.startswith(("import ", "from "))}  # fmt: skip
    assert roots <= set(sys.stdlib_module_names)


def test_no_script_is_disturbed_by_what_is_measured(ways: BothWays) -> None:
    """An optimizer may step in a communication's hook, and a module may be made in its own way."""
    text = """
    import tempfile
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    class Wrapper(DDP):
        def __init__(self, module):
            torch.nn.Module.__init__(self)
            self.module = module

        def forward(self, x):
            return self.module(x)

    class WithoutHash(DDP):
        def __eq__(self, other):
            return self is other

    def train(model, hook=None):
        optimizer = torch.optim.SGD(model.module.parameters(), lr=0.1)
        if hook:
            model.register_comm_hook(optimizer, hook)
        for _ in range(12):
            model(torch.ones(1, 2)).sum().backward()
            if not hook:
                optimizer.step()

    def inline(optimizer, bucket):
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        future.wait()
        optimizer.step()
        return future.then(lambda done: done.value()[0])

    def later(optimizer, bucket):
        def step(done):
            optimizer.step()
            return done.value()[0]
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(step)

    store = dist.FileStore(tempfile.mktemp(), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    train(Wrapper(torch.nn.Linear(2, 2)))
    train(WithoutHash(torch.nn.Linear(2, 2)))
    train(DDP(torch.nn.Linear(2, 2)), inline)
    train(DDP(torch.nn.Linear(2, 2)), later)
    before = DDP(torch.nn.Linear(2, 2))
    after = DDP.__new__(DDP)
    after.__dict__ = before.__dict__
    del before
    train(after)
    del after
    dist.destroy_process_group()  # else its thread may meet the end of the interpreter
    print("all done")
    """
    pages = ActivityPages()
    for run in (ways.fork, ways.scripted):
        env = ways.env | {activity.VARIABLE: pages.begin(0, measured=True)}
        done = run(ways.script(textwrap.dedent(text)), env)
        assert (done.code, done.out.strip()) == (0, "all done"), done.err
        assert pages.read(0).steps == 60
    pages.close()
