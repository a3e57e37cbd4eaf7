"""What a kubelet does to a pod of examples/kubernetes, with a container made of namespaces.

The agent is the first process there, its root is read-only and it has no capabilities. A pod that
is deleted is told by the preStop hook, and then its first process gets SIGTERM.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.etcd import EtcdServer
from tests.support.job import PATIENCE, ROOT, Agent, Job
from tests.support.processes import send
from tests.support.residue import keys

pytestmark = [pytest.mark.timeout(600), pytest.mark.nightly(part="kubernetes")]

# The hook has drained the node, or was killed when the drained agent ended, and its container.
DRAINED = (0, -signal.SIGKILL)
TOOLS = ("unshare", "nsenter", "setpriv", "mount")
CONTAINER = """#!/bin/sh
exec unshare --pid --fork --mount-proc --kill-child sh -c '
    mount --bind "$VOLUME" "$VOLUME" && cd "$VOLUME" &&
    mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /run &&
    mount -o remount,bind,ro / &&
    exec setpriv --no-new-privs --inh-caps=-all --bounding-set=-all "$PYTHON" "$@"' sh "$@"
"""
SAVES = """
import os, pathlib, signal, sys, time
import elastic_etcd as ee

def on_sigterm(*_):
    if ee.leaving():
        pathlib.Path(sys.argv[1]).write_text("saved")
    sys.exit()

signal.signal(signal.SIGTERM, on_sigterm)
try:
    open("/root-is-written", "w")
except OSError as error:
    print("world", os.environ["WORLD_SIZE"], error.strerror, flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.fixture(autouse=True)
def namespaces() -> None:
    if os.geteuid() != 0:
        pytest.skip("namespaces take root")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        pytest.skip(f"without {', '.join(missing)} there are no containers")
    made = ["unshare", "--pid", "--fork", "--mount-proc", "true"]
    if error := subprocess.run(made, capture_output=True, text=True, check=False).stderr:
        pytest.skip(f"no namespaces here: {error}")


def hook() -> list[str]:
    """The preStop hook's command."""
    documents = yaml.safe_load_all((ROOT / "examples/kubernetes/job.yaml").read_text())
    (job,) = [each for each in documents if each["kind"] == "Job"]
    (agent,) = job["spec"]["template"]["spec"]["containers"]
    command: list[str] = agent["lifecycle"]["preStop"]["exec"]["command"]
    return command


def environment(job: Job, node: str) -> dict[str, str]:
    """What the manifests set for the agent and for the hook."""
    beside = Path(sys.executable).parent
    return {
        "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PET_ETCD": str(job.endpoint),
        "PET_JOB": job.name,
        "PET_NODE_NAME": node,
    }


def pod(job: Job, node: str, **flags: Any) -> Agent:
    """Start a container with an agent, whose script saves when its node leaves."""
    container, script = job.directory / "container", job.directory / "train.py"
    container.write_text(CONTAINER)
    container.chmod(0o755)
    script.write_text(SAVES)
    mounts = {"VOLUME": str(job.directory), "PYTHON": sys.executable, "TMPDIR": "/run"}
    env = environment(job, node) | mounts | flags.pop("env", {})
    given: dict[str, Any] = {"start_method": "exec", "leave_deadline": 60} | flags
    argv = (str(script), str(job.directory / f"{node}.saved"))
    return job.start(node, script=argv, python=container, env=env, **given)


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def delete(job: Job, agent: Agent) -> int:
    """What the kubelet does to a pod that is deleted; gives the hook's exit code."""
    (first,) = children(agent.pid)
    inside = ["nsenter", f"--target={first}", "--pid", "--mount"]
    done = subprocess.run(
        [*inside, *hook()],
        env=environment(job, agent.node),
        capture_output=True,
        text=True,
        check=False,
    )
    if agent.running():
        send(signal.SIGTERM, [first])
    return done.returncode


def hears_sigterm(agent: Agent) -> None:
    """Wait until the agent does, which is a child of the first process."""
    deadline = time.monotonic() + PATIENCE
    while not any(
        map(handles_sigterm, [p for first in children(agent.pid) for p in children(first)])
    ):
        assert time.monotonic() < deadline, agent.output
        time.sleep(0.1)


def handles_sigterm(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    (caught,) = re.findall(r"^SigCgt:\s+(\w+)$", status, re.MULTILINE)
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def test_a_pod_that_is_deleted_saves_and_does_not_count_as_done(job: Job, etcd: EtcdServer) -> None:
    n1, n2 = pod(job, "n1"), pod(job, "n2")
    for each in (n1, n2):
        job.said(each, "world 2 Read-only file system")
    assert delete(job, n2) in DRAINED
    job.exits(n2, 143)
    assert "is drained by" in n2.output
    assert (job.directory / "n2.saved").exists(), n2.output
    job.said(n1, "world 1 Read-only file system")
    etcd.freeze()
    assert delete(job, n1) == 5, "nobody can be told"
    job.exits(n1, 143)
    job.abandoned = True
    etcd.thaw()
    assert n1.output.count("SIGTERM: leaving") == 1
    assert (job.directory / "n1.saved").exists(), n1.output
    assert "outcome" not in keys(etcd, job.name)


def test_a_pod_is_deleted_before_etcd_answers(job: Job, etcd: EtcdServer) -> None:
    etcd.freeze()
    agent = pod(job, "n1")
    hears_sigterm(agent)
    assert delete(job, agent) == 5
    job.exits(agent, 143)
    etcd.thaw()
    assert agent.output.count("SIGTERM: leaving") == 1


def test_a_pod_is_deleted_while_its_agent_preloads(job: Job) -> None:
    os.mkfifo(job.directory / "never")
    preloaded = "open('preloading', 'w').close(); open('never').read()"
    (job.directory / "large.py").write_text(preloaded)
    env = {"PYTHONPATH": f"{ROOT}{os.pathsep}{job.directory}"}
    agent = pod(job, "n1", start_method="prefork", preload="large", env=env)
    job.wait("it preloads", (job.directory / "preloading").exists)
    assert delete(job, agent) == 1, "it has not joined"
    job.exits(agent, 143)


def test_a_pod_is_deleted_while_it_waits_for_others(job: Job) -> None:
    agent = pod(job, "n1", nnodes="2:2")
    job.said(agent, "1 node is ready; at least 2 must be")
    assert delete(job, agent) in DRAINED
    job.exits(agent, 143)
    assert "n1 is drained by" in agent.output
