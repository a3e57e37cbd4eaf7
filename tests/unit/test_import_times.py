"""A restarted worker tells how long its script's imports took, and the script can't tell."""

import asyncio
import os
from functools import partial
from pathlib import Path

import pytest

from elastic_etcd.agent.channel import ChannelServer, WorkerChannel
from elastic_etcd.agent.prefork import Prefork, saved_by_preload
from elastic_etcd.protocol.messages import Disconnected, FromWorker, Imported
from elastic_etcd.system.child_process import exited
from tests.unit.prefork import DEADLINE, BothWays

pytestmark = pytest.mark.timeout(600)

SLOW = "import threading\nthreading.Event().wait({})\n"
MODULES = {
    "site-packages/large/__init__.py": SLOW.format(0.3) + "import within\n",
    "site-packages/large/later.py": SLOW.format(0.4),
    "site-packages/large/0001_first.py": SLOW.format(0.2),  # no name that --preload takes
    "site-packages/within.py": SLOW.format(0.2),
    "site-packages/of_mine.py": SLOW.format(0.2),
    "site-packages/broken.py": "import after_it\n1 / 0\n",
    "site-packages/after_it.py": SLOW.format(0.2),
    "site-packages/threaded.py": SLOW.format(0.2)
    + "threading.Thread(target=threading.Event().wait, daemon=True).start()\n",
    "mine.py": SLOW.format(0.2) + "import of_mine\n",
}
IMPORTS = """\
import large, torch, mine, threaded
try:
    import broken
except ZeroDivisionError:
    pass
import importlib, large.later
importlib.import_module("large.0001_first")
optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
optimizer.step()
"""
SEEN = """\
import builtins, importlib, sys, traceback
for name in ("broken", "not_there"):
    for load in (importlib.import_module, __import__):
        try:
            load(name)
        except Exception:
            traceback.print_exc(file=sys.stdout)
try:
    import broken
except ZeroDivisionError:
    traceback.print_exc(file=sys.stdout)
import torch._dynamo  # the last that was loaded ahead
print(sys.meta_path, builtins.__import__, sys.path_hooks, sys.getprofile(), sys.gettrace())
"""


def write(folder: Path) -> None:
    for name, text in MODULES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture
def given(tmp_path: Path) -> BothWays:
    write(tmp_path)
    given = BothWays(tmp_path)
    given.env["PYTHONPATH"] += f"{os.pathsep}{tmp_path / 'site-packages'}"
    return given


async def told_by(given: BothWays, argv: list[str]) -> tuple[list[Imported], list[Imported]]:
    """What workers of one fork server that run `argv` tell: one that is asked, one that isn't."""
    told: dict[bool, list[Imported]] = {True: [], False: []}
    asked = True
    gone = asyncio.Event()

    def heard(_: WorkerChannel, message: FromWorker | Disconnected) -> None:
        if isinstance(message, Imported):
            told[asked].append(message)
        elif isinstance(message, Disconnected):
            gone.set()

    channels = ChannelServer(heard)
    env = {**given.env, "ELASTIC_ETCD_SOCKET": channels.open()}
    env |= {"ELASTIC_ETCD_LOCAL_RANK": "0", "ELASTIC_ETCD_GENERATION": "2"}
    prefork = Prefork(argv, given.env, (), 1, asyncio.create_task)
    prefork.start()
    try:
        async with asyncio.timeout(DEADLINE):
            await prefork.imported()
            worker = await prefork.fork(argv, env, 1, 2, time_imports=True)
            assert await exited(worker) == 0
            await gone.wait()
            asked = False
            worker = await prefork.fork(argv, env, 1, 2, time_imports=False)
            assert await exited(worker) == 0
    finally:
        prefork.close()
        channels.close()
    return told[True], told[False]


@pytest.mark.nightly(part="jobs")
async def test_a_worker_that_is_asked_tells_at_its_first_step(given: BothWays) -> None:
    argv = given.script(IMPORTS)
    (told,), untold = await told_by(given, argv)
    assert list(told.seconds) == ["large", "of_mine", "after_it", "large.later"]
    assert told.seconds["large"] >= 0.5, "with what it imports itself"
    assert untold == []


@pytest.mark.nightly(part="forks")
def test_a_script_that_is_timed_sees_what_another_sees(given: BothWays) -> None:
    argv = given.script(SEEN)
    seen = []
    with given:
        for time_imports in (True, False):
            fork = partial(given.prefork.fork, time_imports=time_imports)
            seen.append(given.run(fork, argv, None))
        seen.append(given.exec(argv))
    assert seen == seen[:1] * 3
    assert seen[0].code == 0
    assert "ZeroDivisionError" in seen[0].out


@pytest.mark.parametrize(
    ("seconds", "line"),
    [
        ({}, ""),
        ({"a": 0.2, "b": 0.2}, ""),
        ({"a": 0.5}, "restart spent 0.5 s importing a: --preload a saves it"),
        (
            {"a": 0.8, "b": 0.25, "a.c.d": 5.0},
            "restart spent 6.0 s importing a, b: --preload b,a.c.d saves it",
        ),
    ],
)
def test_the_line_names_what_preload_is_to_be_given(seconds: dict[str, float], line: str) -> None:
    assert saved_by_preload(seconds) == line
