"""--preload: after the first restart the log says which modules are worth it, and then they are."""

import os
import signal
from typing import Any

import pytest

from tests.support.job import DDP, ROOT, Agent, Job
from tests.support.processes import send

pytestmark = pytest.mark.timeout(600)

SLOW = "import threading\nthreading.Event().wait(0.7)\n"
SCRIPT = """\
import large, runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
LINE = "s importing large: --preload large saves it"


def start(job: Job, **flags: Any) -> Agent:
    packages = job.directory / "site-packages"
    packages.mkdir()
    (packages / "large.py").write_text(SLOW)
    script = job.directory / "script.py"
    script.write_text(SCRIPT)
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(packages)])}
    run = (str(script), DDP, "--dir", str(job.directory))
    return job.start("n1", script=run, env=env, min_uptime=0, settle=0, **flags)


def restart(job: Job, generation: int) -> int:
    send(signal.SIGKILL, [job.worker(generation, 0).pid])
    return job.trains(1, after=generation)


@pytest.mark.nightly(part="jobs")
def test_after_the_first_restart_the_log_says_once_what_it_would_save(job: Job) -> None:
    agent = start(job)
    generation = job.trains(1)
    assert "--preload" not in agent.output, "its start could not be quicker"
    generation = restart(job, generation)
    job.said(agent, LINE)
    restart(job, generation)
    job.finish(agent)
    assert agent.output.count("saves it") == 1


@pytest.mark.nightly(part="jobs")
@pytest.mark.parametrize(
    "flags",
    [
        {"preload": "large"},
        {"start_method": "exec"},
    ],
)
def test_it_says_nothing_where_it_would_save_nothing(job: Job, flags: dict[str, str]) -> None:
    agent = start(job, **flags)
    restart(job, job.trains(1))
    job.finish(agent)
    assert "saves it" not in agent.output
