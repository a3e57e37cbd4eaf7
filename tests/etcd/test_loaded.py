"""The modules of the agent of a default job: it loads what its flags ask for, and all of it early.

An import while a failure is handled would cost time, and fail where the package is gone by then.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.etcd import EtcdServer

# They belong to flags, to jobs of more than one node, to other programs, or to the end.
NOT_BY_DEFAULT = {
    *("agent.devices", "agent.file_timers", "agent.goodput", "agent.peer_links"),
    *("agent.followers.metrics", "agent.followers.metrics_server", "agent.followers.notices"),
    *("agent.followers.straggler_watch", "core.stragglers", "etcd.embedded"),
    *("children.entry", "children.forkserver", "children.guardian_process"),
    *("children.run_script", "children.store_server", "children.variables", "system.trampoline"),
    *("api", "cli.query", "cli.steer", "frameworks", "launcher", "plugin", "train"),
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


def run(etcd: EtcdServer, tmp_path: Path, before: str = "") -> list[str]:
    """The lines of an agent whose workers fail, and succeed when they are started again."""
    argv = ["--etcd", etcd.endpoint, "--nproc-per-node", "2", "--no-python", "sh", "-c", FAILS_ONCE]
    done = subprocess.run(
        [sys.executable, "-c", before + AGENT, *argv],
        cwd=tmp_path,
        env=os.environ | {"LOGLEVEL": "INFO"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "generation 2 (worker" in done.stderr
    assert "succeeded: every participant is done" in done.stderr
    return done.stdout.splitlines()


def test_a_default_job_loads_no_more_than_it_needs_and_nothing_at_a_failure(
    etcd: EtcdServer, tmp_path: Path
) -> None:
    at_first, later = (set(line.split()) for line in run(etcd, tmp_path))
    assert {f"elastic_etcd.{name}" for name in NOT_BY_DEFAULT} & at_first == set()
    assert not {"statistics", "torch", "rich", "http.client", "multiprocessing"} & at_first
    assert {"elastic_etcd.agent.followers.evidence", "elastic_etcd.agent.failures"} <= at_first
    assert {name for name in later if name.startswith("elastic_etcd")} == {
        "elastic_etcd.agent.goodput"  # for the last lines of the log
    }


def test_a_job_succeeds_whose_package_is_gone_at_the_end(etcd: EtcdServer, tmp_path: Path) -> None:
    """It was upgraded or removed, while the job trained for days."""
    gone = "import sys; sys.modules['elastic_etcd.agent.goodput'] = None\n"
    assert len(run(etcd, tmp_path, gone)) == 2
