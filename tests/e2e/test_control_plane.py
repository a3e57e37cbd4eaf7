"""The Job of examples/kubernetes under a real API server and Job controller, with real agents.

No kubelet: pods are processes on this machine, and end with the exit code that the manifest judges.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import yaml

from tests.support.charts import CHART, helm
from tests.support.control_plane import ControlPlane, Kubelet, Object, path_of
from tests.support.etcd import EtcdServer
from tests.support.etcd_versions import newest_or_skip
from tests.support.venv import ROOT

pytestmark = [
    pytest.mark.timeout(3600),  # the first time, Go has to build Kubernetes
    pytest.mark.nightly(part="control-plane"),
]

FOLDER = ROOT / "examples" / "kubernetes"
JOB = "/apis/batch/v1/namespaces/default/jobs/digits"
TRAIN = """
import os, pathlib, signal, sys, time
import elastic_etcd as ee

def on_sigterm(*_):
    sys.exit()

signal.signal(signal.SIGTERM, on_sigterm)
print(f"trains in a world of {os.environ['WORLD_SIZE']}", flush=True)
while not pathlib.Path("stop").exists():
    time.sleep(0.05)
    ee.heartbeat()
"""


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    folder = tmp_path_factory.mktemp("plane")
    plane = ControlPlane(folder)
    server = EtcdServer(folder, program=newest_or_skip())
    server.start()
    try:
        with plane.running(server.endpoint):
            yield plane
    finally:
        server.kill()


@pytest.fixture
def kubelet(plane: ControlPlane, etcd: EtcdServer, prefix: str) -> Iterator[Kubelet]:
    (plane.folder / "train.py").write_text(TRAIN)
    env = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(plane.folder),
        "PET_ETCD": etcd.endpoint,
        "PET_PREFIX": prefix,
        "PET_START_METHOD": "exec",
        "PET_LEASE_TTL": "2",
        "PET_SETTLE": "2",
    }
    kubelet = Kubelet(plane, env, here)
    yield kubelet
    kubelet.close()
    (plane.folder / "stop").unlink(missing_ok=True)
    plane.ask("DELETE", f"{JOB}?propagationPolicy=Background")
    for pod in plane.ask("GET", "/api/v1/namespaces/default/pods")["items"]:
        place = f"/api/v1/namespaces/default/pods/{pod['metadata']['name']}"
        plane.patch(place, {"metadata": {"finalizers": None}})
        if "deletionTimestamp" not in pod["metadata"]:
            plane.ask("DELETE", f"{place}?gracePeriodSeconds=0")


def here(command: list[str]) -> list[str]:
    """The manifest's command, with a script and ports of this machine."""
    flags = [arg for arg in command if not arg.startswith(("--metrics-addr", "--checkpoint-dir"))]
    flags = [arg for arg in flags if not arg.startswith("--epochs")]
    return ["train.py" if arg == "/examples/digits_ddp.py" else arg for arg in flags]


def job(nodes: int) -> Object:
    documents = yaml.safe_load_all((FOLDER / "job.yaml").read_text())
    (found,) = [each for each in documents if each["kind"] == "Job"]
    found["spec"] |= {"parallelism": nodes, "completions": nodes}
    return dict(found)


def trains(kubelet: Kubelet, world: int) -> None:
    """Wait until the newest world of so many pods is of this size."""

    def found() -> bool:
        running = [pod for pod in kubelet.pods.values() if pod.process.poll() is None]
        newest = [pod.output.rpartition("trains in a world of ")[2][:1] for pod in running]
        return newest == [str(world)] * world

    kubelet.wait(f"a world of {world}", found)


def condition(plane: ControlPlane, name: str) -> dict[str, Any]:
    conditions = plane.ask("GET", JOB).get("status", {}).get("conditions", [])
    return next((c for c in conditions if c["type"] == name and c["status"] == "True"), {})


def test_o11_the_api_server_takes_the_manifests(plane: ControlPlane) -> None:
    for name in ("etcd", "etcd-tls", "job", "job-tls"):
        for manifest in yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()):
            path = f"{path_of(manifest)}?fieldValidation=Strict&dryRun=All"
            assert plane.ask("POST", path, manifest)["kind"] == manifest["kind"]


def test_o11_a_job_grows_and_shrinks_loses_a_pod_and_succeeds(
    plane: ControlPlane, kubelet: Kubelet
) -> None:
    plane.create(job(2))
    trains(kubelet, 2)
    plane.patch(JOB, {"spec": {"parallelism": 3, "completions": 3}})
    trains(kubelet, 3)
    (deleted,) = [pod for pod in kubelet.pods.values() if pod.index == "1"]
    plane.ask("DELETE", f"/api/v1/namespaces/default/pods/{deleted.name}")
    trains(kubelet, 2)
    assert deleted.process.returncode == 143
    trains(kubelet, 3)  # another pod of that index
    assert sorted(pod.index for pod in kubelet.pods.values()) == ["0", "1", "1", "2"]
    plane.patch(JOB, {"spec": {"parallelism": 2, "completions": 2}})
    trains(kubelet, 2)
    ended = [pod.index for pod in kubelet.pods.values() if pod.process.poll() is not None]
    assert sorted(ended) == ["1", "2"], "the highest index has left"
    (plane.folder / "stop").touch()
    kubelet.wait("it is complete", lambda: condition(plane, "Complete"))
    assert not condition(plane, "Failed")


def test_o11_a_job_that_is_stopped_stays_so(
    plane: ControlPlane, kubelet: Kubelet, etcd: EtcdServer
) -> None:
    plane.create(job(2))
    trains(kubelet, 2)
    steer = [sys.executable, "-m", "elastic_etcd", "stop", "digits", "--etcd", etcd.endpoint]
    subprocess.run(steer, env=os.environ | kubelet.env, check=True)
    kubelet.wait("it has failed", lambda: condition(plane, "Failed"))
    assert condition(plane, "Failed")["reason"] == "PodFailurePolicy"
    assert {pod.process.wait() for pod in kubelet.pods.values()} <= {6, 143}
    assert len(kubelet.pods) == 2, "none was replaced"


def run_helm(plane: ControlPlane, command: str, *flags: str) -> str:
    """Words of an error, "" if there is none."""
    done = helm(command, "digits", *flags, "--kubeconfig", plane.config)
    return "" if done.returncode == 0 else done.stderr


def test_o11_helm_leaves_a_job_in_a_queue_as_kueue_has_it(plane: ControlPlane) -> None:
    def upgraded(nodes: int) -> Any:
        flags = ("--reuse-values", "--set", f"nodes={nodes}")
        assert not run_helm(plane, "upgrade", str(CHART), *flags)
        spec = plane.ask("GET", JOB)["spec"]
        assert (spec["parallelism"], spec["completions"]) == (nodes, nodes)
        return spec["suspend"]

    assert not run_helm(plane, "install", str(CHART), "--set", "kueue.queue=training")
    assert upgraded(5) is True, "it waits"
    plane.patch(JOB, {"spec": {"suspend": False}})
    assert upgraded(6) is False, "it trains"
    assert upgraded(5) is False
    assert not run_helm(plane, "uninstall")


def test_o11_helm_installs_the_chart_and_changes_the_number_of_nodes(plane: ControlPlane) -> None:
    def run(command: str, *flags: str) -> str:
        return run_helm(plane, command, *flags)

    chart = (str(CHART), "--reuse-values")
    assert not run("install", str(CHART))
    for kind in ("apps/v1/namespaces/default/statefulsets/etcd", JOB.removeprefix("/apis/")):
        assert plane.ask("GET", f"/apis/{kind}")
    assert not run("upgrade", *chart, "--set", "nodes=6")
    spec = plane.ask("GET", JOB)["spec"]
    assert (spec["parallelism"], spec["completions"]) == (6, 6)
    assert "field is immutable" in run("upgrade", *chart, "--set", "image=registry.example.com/b")
    assert not run("uninstall")
    with pytest.raises(HTTPError, match="404"):
        plane.ask("GET", JOB)
    kept = "/api/v1/namespaces/default/persistentvolumeclaims/digits-checkpoints"
    assert plane.ask("GET", kept)["kind"] == "PersistentVolumeClaim"
    assert not run("install", str(CHART)), "with the volume that has stayed"
    assert not run("uninstall")
