"""A control plane of Kubernetes on this machine: its API server, and its controllers of Jobs.

Both are Go modules, pinned in tests/packaging. There is no scheduler and no kubelet: `Kubelet`
gives each pod a machine of its own, whose container is a process.
"""

import json
import os
import re
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from elastic_etcd.etcd.embedded import free_ports
from elastic_etcd.system import trampoline
from tests.support.go_programs import built_or_skip, pinned
from tests.support.job import PATIENCE
from tests.support.venv import ROOT

MODULE = ROOT / "tests" / "packaging" / "modules" / "kubernetes"
PROGRAMS = ("kube-apiserver", "kube-controller-manager")
TOKEN = "tests"
KUBECONFIG = """\
apiVersion: v1
kind: Config
clusters: [{{name: tests, cluster: {{server: "{url}", insecure-skip-tls-verify: true}}}}]
users: [{{name: tests, user: {{token: {token}}}}}]
contexts: [{{name: tests, context: {{cluster: tests, user: tests}}}}]
current-context: tests
"""
Object = dict[str, Any]


class ControlPlane:
    """`with running(ETCD):` it runs, on that etcd."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.config = folder, folder / "kubeconfig"
        version = pinned(MODULE, "k8s.io/kubernetes")
        packages = {name: f"k8s.io/kubernetes/cmd/{name}" for name in PROGRAMS}
        named = f"-X k8s.io/component-base/version.gitVersion=v{version}"
        self._programs = built_or_skip(MODULE, f"kubernetes-{version}", packages, named)
        self._port = free_ports(1)[0]
        self.url = f"https://127.0.0.1:{self._port}"

    @contextmanager
    def running(self, etcd: str) -> Iterator[None]:
        key, tokens = self.folder / "key", self.folder / "tokens"
        made = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        key.write_bytes(
            made.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
        )
        tokens.write_text(f"{TOKEN},tests,tests,system:masters\n")
        self.config.write_text(KUBECONFIG.format(url=self.url, token=TOKEN))
        server = (
            f"--etcd-servers=http://{etcd}",
            f"--secure-port={self._port}",
            "--bind-address=127.0.0.1",
            f"--cert-dir={self.folder}",
            f"--token-auth-file={tokens}",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://tests",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--disable-admission-plugins=ServiceAccount",
        )
        manager = (
            f"--kubeconfig={self.config}",
            "--controllers=job-controller",
            "--leader-elect=false",
            "--secure-port=0",
        )
        with ExitStack() as scope:
            for name, flags in zip(PROGRAMS, (server, manager), strict=True):
                scope.enter_context(self._started(name, flags))
                self._wait_ready()
            yield

    @contextmanager
    def _started(self, name: str, flags: tuple[str, ...]) -> Iterator[None]:
        tied = (sys.executable, "-I", "-S", trampoline.__file__, str(os.getpid()), "--")
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [*tied, str(self._programs / name), *flags], stdout=log, stderr=log
            )
        try:
            yield
        finally:
            process.kill()
            process.wait()

    def _wait_ready(self) -> None:
        def ready() -> bool:
            try:
                return bool(self.ask("GET", "/api/v1/namespaces/default"))
            except OSError:
                return False

        wait("the API server is ready", ready, 2 * PATIENCE)

    def ask(self, method: str, path: str, body: Object | None = None, kind: str = "json") -> Object:
        """What the API server says. Raises HTTPError, with its reason as a note."""
        request = urllib.request.Request(
            self.url + path,
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {TOKEN}", "Content-Type": f"application/{kind}"},
            method=method,
        )
        try:
            with urllib.request.urlopen(
                request, timeout=30, context=ssl._create_unverified_context()
            ) as answer:
                told: Object = json.load(answer)
                return told
        except urllib.error.HTTPError as error:
            error.add_note(error.read().decode())
            raise

    def create(self, manifest: Object) -> Object:
        return self.ask("POST", f"{path_of(manifest)}?fieldValidation=Strict", manifest)

    def patch(self, path: str, changes: Object) -> Object:
        return self.ask("PATCH", path, changes, "merge-patch+json")


def path_of(manifest: Object) -> str:
    """Where manifests of this kind are, in the namespace `default`."""
    group = manifest["apiVersion"]
    kind = manifest["kind"].lower()
    plural = f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}s"
    return f"/{'apis' if '/' in group else 'api'}/{group}/namespaces/default/{plural}"


def wait(what: str, until: Callable[[], object], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, f"not yet: {what}"
        time.sleep(0.2)


@dataclass
class Pod:
    """A container that is a process."""

    name: str
    index: str
    process: "subprocess.Popen[bytes]"
    log: Path
    told: bool = False  # it has been told to end
    reported: bool = False

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")


@dataclass
class Kubelet:
    """Runs the pods that there are, a turn at a time; `change` fits a command to this machine."""

    plane: ControlPlane
    env: dict[str, str]
    change: Callable[[list[str]], list[str]]
    pods: dict[str, Pod] = field(default_factory=dict)  # by their uid

    def turn(self) -> None:
        for pod in self.plane.ask("GET", "/api/v1/namespaces/default/pods")["items"]:
            known = self.pods.get(pod["metadata"]["uid"])
            deleted = "deletionTimestamp" in pod["metadata"]
            if known is None and not deleted:
                self._start(pod)
            elif known and not known.reported and known.process.poll() is not None:
                self._report(pod, known, deleted=deleted)
            elif known and deleted and not known.told:
                known.told = True
                known.process.send_signal(signal.SIGTERM)

    def wait(self, what: str, until: Callable[[], object], seconds: float = 2 * PATIENCE) -> None:
        def turned() -> object:
            self.turn()
            return until()

        try:
            wait(what, turned, seconds)
        except AssertionError as error:
            for pod in self.pods.values():
                error.add_note(f"--- {pod.name}\n{pod.output[-3000:]}")
            raise

    def close(self) -> None:
        for pod in self.pods.values():
            pod.process.kill()
            pod.process.wait()

    def _start(self, pod: Object) -> None:
        name, number = pod["metadata"]["name"], len(self.pods)
        place = f"/api/v1/namespaces/default/pods/{name}"
        target = {"kind": "Node", "apiVersion": "v1", "name": f"machine{number}"}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}}
        self.plane.ask("POST", f"{place}/binding", binding | {"target": target})
        pod = self.plane.ask("GET", place)
        pod["status"]["podIP"] = "127.0.0.1"
        (container,) = pod["spec"]["containers"]
        log = self.plane.folder / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                self.change([*container["command"], *container["args"]]),
                env=filled_in(pod, container["env"]) | self.env,
                cwd=self.plane.folder,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        index = pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"]
        self.pods[pod["metadata"]["uid"]] = Pod(name, index, process, log)
        self._status(place, container["name"], "Running", {"running": {}})

    def _report(self, pod: Object, known: Pod, *, deleted: bool) -> None:
        known.reported = True
        place = f"/api/v1/namespaces/default/pods/{known.name}"
        code = known.process.returncode
        phase = "Failed" if code else "Succeeded"
        (container,) = pod["spec"]["containers"]
        self._status(place, container["name"], phase, {"terminated": {"exitCode": code}})
        if deleted:
            self.plane.ask("DELETE", f"{place}?gracePeriodSeconds=0")

    def _status(self, place: str, container: str, phase: str, state: Object) -> None:
        ready = "running" in state
        status = {
            "phase": phase,
            "podIP": "127.0.0.1",
            "podIPs": [{"ip": "127.0.0.1"}],
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [
                {
                    "name": container,
                    "state": state,
                    "ready": ready,
                    "restartCount": 0,
                    "image": "tests",
                    "imageID": "tests",
                }
            ],
        }
        self.plane.patch(f"{place}/status", {"status": status})


def filled_in(pod: Object, env: list[Object]) -> dict[str, str]:
    """A container's environment, as a kubelet makes it."""
    found: dict[str, str] = {}
    for each in env:
        text = each.get("value", "")
        if "valueFrom" in each:
            path = each["valueFrom"]["fieldRef"]["fieldPath"]
            label = re.fullmatch(r"metadata\.labels\['(.*)'\]", path)
            if label:
                text = pod["metadata"]["labels"][label[1]]
            else:
                text = pod
                for part in path.split("."):
                    text = text[part]
        found[each["name"]] = re.sub(
            r"\$\((\w+)\)", lambda named: found.get(named[1], named[0]), str(text)
        )
    return found
