"""The etcds of examples/kubernetes: their environment makes a cluster that probes find."""

import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import yaml

from elastic_etcd.etcd.embedded import free_ports
from elastic_etcd.system import trampoline
from tests.support.etcd import START_TIMEOUT
from tests.support.etcd_versions import MINORS, newest_or_skip, pinned
from tests.support.job import ROOT
from tests.support.prometheus import get
from tests.support.tls import Authority

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


@pytest.mark.parametrize("manifest", ["etcd.yaml", "etcd-tls.yaml"])
def test_the_statefulset_is_a_cluster_whose_probes_answer(manifest: str, tmp_path: Path) -> None:
    program = newest_or_skip()
    found = container(manifest)
    secret(tmp_path)
    names = [f"etcd-{index}" for index in range(3)]
    addresses = [f"{name}.etcd:{port}" for name in names for port in (2379, 2380, 2381)]
    ports = dict(zip(addresses, free_ports(len(addresses)), strict=True))
    logs = [tmp_path / f"{name}.log" for name in names]
    with ExitStack() as scope:
        for name, log in zip(names, logs, strict=True):
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", trampoline.__file__, str(os.getpid()), "--", program],
                env=environment(found, name, ports, tmp_path),
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
        said = "".join(log.read_text() for log in logs)
    assert "unrecognized" not in said, said


def secret(directory: Path) -> None:
    """What the Secret with etcd's certificate holds."""
    authority = Authority(directory, "ca")
    made = authority.issue("etcd")
    Path(authority.cacert).rename(directory / "ca.crt")
    Path(made.cert).rename(directory / "tls.crt")
    Path(made.key).rename(directory / "tls.key")


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
