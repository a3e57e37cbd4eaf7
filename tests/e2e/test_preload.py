"""--preload auto: what the script imports is there before it, after a restart and on new nodes."""

import json
import os
import signal
from typing import Any

import pytest

from tests.support.etcd import EtcdServer
from tests.support.job import DDP, ROOT, Agent, Job
from tests.support.processes import send
from tests.support.residue import PREFIX

pytestmark = pytest.mark.timeout(600)

# It does not ask for the number of its process: what does is left out.
LARGE = "import os\npid = int(os.readlink('/proc/self'))\n"
LARGE += "home = os.environ.get('LARGE_HOME', 'at home')\n"
# What a user's script does beside the training; it says who has imported the package.
SCRIPT = """\
import os, runpy, sys
{first}
import large
name = "{{ELASTIC_ETCD_NODE}}.{{ELASTIC_ETCD_GENERATION}}.large".format(**os.environ)
with open(name, "w") as file:
    file.write(f"{{large.pid != os.getpid()}} {{large.home}}")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def start(job: Job, node: str, first: str = "", preload: str = "auto") -> Agent:
    packages = job.directory / "site-packages"
    if not packages.exists():  # written again it would be another version
        packages.mkdir()
        (packages / "large.py").write_text(LARGE)
    script = job.directory / "script.py"
    script.write_text(SCRIPT.format(first=first))
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(packages)])}
    flags: dict[str, Any] = {"preload": preload} if preload else {}
    run = (str(script), DDP, "--dir", str(job.directory))
    return job.start(node, script=run, env=env, log_level="debug", min_uptime=0, settle=1, **flags)


def found(job: Job, node: str, generation: int) -> str:
    """Whether this node's worker has found the package loaded, and what that has read."""
    return (job.directory / f"{node}.{generation}.large").read_text()


def known(etcd: EtcdServer, job: Job) -> list[str] | None:
    """What etcd has of the modules."""
    text = etcd.ctl("get", "--print-value-only", f"{PREFIX}/{job.name}/preload")
    return json.loads(text)["modules"] if text.strip() else None


def test_a_restart_and_a_newcomer_have_what_the_script_imports(job: Job, etcd: EtcdServer) -> None:
    n1 = start(job, "n1")
    first = job.trains(1)
    assert found(job, "n1", first) == "False at home"
    assert "large" in (job.wait("it is learned", lambda: known(etcd, job), 300) or [])
    job.said(n1, "large")
    n2 = start(job, "n2")
    second = job.trains(2, after=first)
    assert found(job, "n2", second) == "True at home", "from its first worker on"
    assert found(job, "n1", second) == "True at home"
    send(signal.SIGKILL, [job.worker(second, 0).pid])
    third = job.trains(2, after=second)
    assert {found(job, node, third) for node in ("n1", "n2")} == {"True at home"}
    job.finish(n1, n2)
    assert known(etcd, job) is None, "it goes with the run"


def test_t19_what_the_script_sets_keeps_its_effect(job: Job, etcd: EtcdServer) -> None:
    n1 = start(job, "n1", first="os.environ['LARGE_HOME'] = 'away'")
    generation = job.trains(1)
    job.wait("it is learned", lambda: known(etcd, job) is not None, 300)
    assert known(etcd, job) == [], "there is nothing else"
    job.said(n1, "large is not loaded ahead: it has to do with LARGE_HOME")
    send(signal.SIGKILL, [job.worker(generation, 0).pid])
    after = job.trains(1, after=generation)
    assert found(job, "n1", after) == "False away"
    assert "begins anew" not in n1.output
    job.finish(n1)


def test_t19_a_script_that_sets_it_only_later_is_not_loaded_ahead_any_more(
    job: Job, etcd: EtcdServer
) -> None:
    changes = "if int(os.environ['ELASTIC_ETCD_GENERATION']) > 1: os.environ['LARGE_HOME'] = 'away'"
    n1 = start(job, "n1", first=changes)
    first = job.trains(1)
    assert "large" in (job.wait("it is learned", lambda: known(etcd, job), 300) or [])
    job.said(n1, "loaded ahead: torch, ")
    send(signal.SIGKILL, [job.worker(first, 0).pid])
    second = job.trains(1, after=first)
    assert found(job, "n1", second) == "False away"
    assert "this script changes LARGE_HOME before it imports large" in n1.output
    job.wait("all nodes are told", lambda: known(etcd, job) == [], 300)
    job.said(n1, "this script's own modules are not loaded ahead any more")
    job.finish(n1)


def test_garbage_in_the_key_is_told_and_costs_nothing_else(job: Job, etcd: EtcdServer) -> None:
    etcd.ctl("put", f"{PREFIX}/{job.name}/preload", '{"modules": ["os; exit()"], "v": 1}')
    n1 = start(job, "n1")
    job.trains(1)
    job.said(n1, f"ignored, not written by this program: {PREFIX}/{job.name}/preload")
    job.finish(n1)


def test_by_default_nothing_is_learned(job: Job, etcd: EtcdServer) -> None:
    n1 = start(job, "n1", preload="")
    first = job.trains(1)
    send(signal.SIGKILL, [job.worker(first, 0).pid])
    second = job.trains(1, after=first)
    assert found(job, "n1", second) == "False at home"
    assert known(etcd, job) is None
    job.finish(n1)
