"""The modules of the agent of a default job: it loads what its flags ask for, and all of it early.

An import while a failure is handled would cost time, and fail where the package is gone by then.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.etcd import EtcdServer

# They belong to flags and to jobs of more than one node.
ASKED_FOR = {
    *("agent.file_timers", "agent.peer_links", "core.stragglers", "etcd.embedded"),
    *("agent.followers.metrics", "agent.followers.notices"),
    "agent.followers.straggler_watch",
}
# The others belong to other programs, and to the end.
NOT_BY_DEFAULT = ASKED_FOR | {
    *("agent.devices", "agent.goodput", "system.trampoline"),
    *("children.entry", "children.forkserver", "children.guardian_process"),
    *("children.run_script", "children.store_server", "children.timer_server"),
    "children.variables",
    *("api", "cli.query", "cli.steer", "launcher", "plugin", "train"),
}
AGENT = """
import os, sys
from elastic_etcd import launch

class Modules:
    def __init__(self):
        self.known = set()

    def see(self, before, event, state):
        if state.local.running and not self.known:
            self.known = set(sys.modules)
            print("at first", *self.known)

modules = Modules()
code = launch.run(sys.argv[1:], os.environ, follow=lambda logs: modules)
print("later", *(set(sys.modules) - modules.known))
sys.exit(code)
"""
FAILS_ONCE = "mkdir failed 2> /dev/null && exit 3; exit 0"


def run(tmp_path: Path, *flags: str, before: str = "", **env: str) -> list[str]:
    """The lines of an agent whose workers fail, and succeed when they are started again."""
    argv = [*flags, "--nproc-per-node", "2", "--no-python", "sh", "-c", FAILS_ONCE]
    done = subprocess.run(
        [sys.executable, "-c", before + AGENT, *argv],
        cwd=tmp_path,
        env=os.environ | {"LOGLEVEL": "INFO"} | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "generation 2 (rank" in done.stderr
    assert "succeeded: every participant is done" in done.stderr
    return done.stdout.splitlines()


def test_a_default_job_loads_no_more_than_it_needs_and_nothing_at_a_failure(
    etcd: EtcdServer, tmp_path: Path
) -> None:
    at_first, later = (set(line.split()) for line in run(tmp_path, "--etcd", etcd.endpoint))
    assert {f"elastic_etcd.{name}" for name in NOT_BY_DEFAULT} & at_first == set()
    assert not {"statistics", "torch", "rich", "http.client", "multiprocessing"} & at_first
    assert {"elastic_etcd.agent.followers.evidence", "elastic_etcd.agent.failures"} <= at_first
    assert ours(later) == {"elastic_etcd.agent.goodput"}  # for the last lines of the log


def test_all_that_is_asked_for_is_loaded_before_the_first_worker(tmp_path: Path) -> None:
    flags = ("--nnodes", "1:2", "--settle", "0", "--metrics-addr", "0")
    watch = ("--preemption-watch", f"file:{tmp_path / 'notice'}")
    served = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
    at_first, later = (set(line.split()) for line in run(tmp_path, *flags, *watch, **served))
    asked_for = {f"elastic_etcd.{name}" for name in ASKED_FOR}
    assert asked_for <= at_first
    assert ours(later) == {"elastic_etcd.agent.goodput"}


def test_a_job_succeeds_whose_package_is_gone_at_the_end(etcd: EtcdServer, tmp_path: Path) -> None:
    """It was upgraded or removed, while the job trained for days."""
    gone = "import sys; sys.modules['elastic_etcd.agent.goodput'] = None\n"
    assert len(run(tmp_path, "--etcd", etcd.endpoint, before=gone)) == 2


def ours(modules: set[str]) -> set[str]:
    return {name for name in modules if name.startswith("elastic_etcd.")}
