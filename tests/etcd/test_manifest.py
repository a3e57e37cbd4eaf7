"""The etcds of examples/kubernetes: their environment makes a cluster that probes find."""

import os
import re
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import yaml

from elastic_etcd.etcd.embedded import free_ports
from elastic_etcd.system import trampoline
from tests.support.etcd import START_TIMEOUT, tool
from tests.support.etcd_versions import MINORS, newest_or_skip, pinned
from tests.support.job import ROOT
from tests.support.prometheus import get
from tests.support.tls import Authority, Files

FOLDER = ROOT / "examples" / "kubernetes"


def container(manifest: str) -> dict[str, Any]:
    text = (FOLDER / manifest).read_text()
    (etcd,) = [each for each in yaml.safe_load_all(text) if each["kind"] == "StatefulSet"]
    (found,) = etcd["spec"]["template"]["spec"]["containers"]
    return found  # type: ignore[no-any-return] # YAML


def environment(
    found: dict[str, Any], name: str, ports: dict[str, int], directory: Path
) -> dict[str, str]:
    """Of a member, with a port of this machine for each address of the cluster."""
    env: dict[str, str] = {}
    for each in found["env"]:
        text = each["value"].replace("$(ETCD_NAME)", name) if "value" in each else name
        text = text.replace("0.0.0.0", f"{name}.etcd").replace(
            "/var/lib/etcd", str(directory / name)
        )
        text = text.replace("/etcd-server", str(directory))
        env[each["name"]] = re.sub(
            r"etcd-\d\.etcd:\d+", lambda found: f"127.0.0.1:{ports[found[0]]}", text
        )
    return env


@pytest.mark.parametrize("manifest", ["etcd.yaml", "etcd-tls.yaml"])
def test_e3_the_manifests_name_an_etcd_that_is_tested(manifest: str) -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["x-etcd"]["image"]
    (version,) = re.findall(r":v([\d.]+)$", container(manifest)["image"])
    assert compose.endswith(f":${{ETCD_VERSION:-v{version}}}")
    assert version in map(pinned, MINORS)


@contextmanager
def cluster(manifest: str, directory: Path) -> Iterator[dict[str, int]]:
    """Its members; the port of this machine for each of their addresses."""
    program = newest_or_skip()
    found = container(manifest)
    names = [f"etcd-{index}" for index in range(3)]
    addresses = [f"{name}.etcd:{port}" for name in names for port in (2379, 2380, 2381)]
    ports = dict(zip(addresses, free_ports(len(addresses)), strict=True))
    logs = [directory / f"{name}.log" for name in names]
    with ExitStack() as scope:
        for name, log in zip(names, logs, strict=True):
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", trampoline.__file__, str(os.getpid()), "--", program],
                env=environment(found, name, ports, directory),
                stdout=scope.enter_context(log.open("wb")),
                stderr=subprocess.STDOUT,
            )
            scope.callback(process.wait)
            scope.callback(process.kill)
        for name in names:
            for probe in ("startup", "readiness", "liveness"):
                asked = found[f"{probe}Probe"]["httpGet"]
                assert asked["port"] == "metrics"
                answers(f"127.0.0.1:{ports[f'{name}.etcd:2381']}", asked["path"])
        yield ports
        said = "".join(log.read_text() for log in logs)
    assert "unrecognized" not in said, said


def test_the_statefulset_is_a_cluster_whose_probes_answer(tmp_path: Path) -> None:
    with cluster("etcd.yaml", tmp_path):
        pass


def test_with_tls_an_agent_is_no_member_and_no_root(tmp_path: Path) -> None:
    """kubernetes.md's `etcdctl` turns users on; before, each certificate may do all."""
    agent = secret(tmp_path)
    ca = str(tmp_path / "ca.crt")
    etcd = Files(str(tmp_path / "tls.crt"), str(tmp_path / "tls.key"))
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    (function,) = re.findall(r"^    (etcdctl\(\) .*)$", page, re.MULTILINE)

    def told(lines: str) -> str:
        return subprocess.run(
            ["sh", "-ec", f"{function}\n{lines}"], check=True, capture_output=True, text=True
        ).stdout

    with cluster("etcd-tls.yaml", tmp_path) as ports:
        peer = f"https://127.0.0.1:{ports['etcd-0.etcd:2380']}/members"
        assert b"clientURLs" in read(peer, ca, etcd)
        with pytest.raises(OSError, match=r"(?i)certificate|reset|broken pipe|closed"):
            read(peer, ca, agent)
        client = f"127.0.0.1:{ports['etcd-0.etcd:2379']}"
        function = function.replace("kubectl exec -i etcd-0 --", "command")
        function = function.replace("command etcdctl", f"command {tool('etcdctl')}")
        function = function.replace("etcd-0.etcd:2379", client)
        function = function.replace("/etcd-server", str(tmp_path))
        flags = f"--endpoints=https://{client} --cacert={ca} --cert={agent.cert} --key={agent.key}"
        write = f"{tool('etcdctl')} {flags} put /others/key x"
        assert told(write) == "OK\n"
        added = "etcdctl user add root --no-password; etcdctl user grant-role root root"
        assert "Enabled" in told(f"{added}; etcdctl auth enable")
        with pytest.raises(subprocess.CalledProcessError) as denied:
            told(write)
        assert "etcdserver" in denied.value.stderr


def test_kubernetes_md_names_the_claims_of_an_etcd_that_is_removed() -> None:
    text = (FOLDER / "etcd.yaml").read_text()
    (etcd,) = [each for each in yaml.safe_load_all(text) if each["kind"] == "StatefulSet"]
    (claim,), name = etcd["spec"]["volumeClaimTemplates"], etcd["metadata"]["name"]
    claims = [f"{claim['metadata']['name']}-{name}-{n}" for n in range(etcd["spec"]["replicas"])]
    removed = f"kubectl delete statefulset {name} && kubectl delete pvc {' '.join(claims)}\n"
    assert removed in (ROOT / "docs" / "kubernetes.md").read_text()


def read(url: str, ca: str, files: Files) -> bytes:
    context = ssl.create_default_context(cafile=ca)
    context.load_cert_chain(files.cert, files.key)
    with urlopen(url, context=context, timeout=START_TIMEOUT) as answer:
        return bytes(answer.read())


def secret(directory: Path) -> Files:
    """What the Secret with etcd's certificate holds. An agent's certificate."""
    authority = Authority(directory, "ca")
    made, agent = authority.issue("etcd", host="etcd-0.etcd"), authority.issue("trainer")
    Path(authority.cacert).rename(directory / "ca.crt")
    Path(made.cert).rename(directory / "tls.crt")
    Path(made.key).rename(directory / "tls.key")
    return agent


def answers(address: str, path: str) -> None:
    """Wait until 200 is the answer."""
    deadline = time.monotonic() + START_TIMEOUT
    while True:
        try:
            status, text = get(address, path)
        except URLError as error:
            status, text = 0, str(error)
        if status == 200:
            return
        assert time.monotonic() < deadline, f"{path}: {status} {text}"
        time.sleep(0.1)
