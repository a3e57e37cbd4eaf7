"""What is measured of a node before it joins, by itself."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from elastic_etcd.agent import preflight
from elastic_etcd.children import node_probe
from elastic_etcd.system.limits import processor_statistics
from tests.support.disks import disk_that_may_stand_still, small_disk, standing_still
from tests.support.etcd import FAST, EtcdServer
from tests.support.tls import Authority, asking, shows

PLAIN: dict[str, Any] = {"tls": False, "cacert": None, "cert": None, "key": None}


def later(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """This process's clock is so many seconds ahead."""
    now = time.time
    patch.setattr(time, "time", lambda: now() + seconds)


def test_devices_are_looked_at_by_the_program() -> None:
    """Torch can be loaded there; where there is none, none is missed."""
    asked: dict[str, Any] = {"processor": {"statistics": []}, "devices": {}}
    program = [sys.executable, node_probe.__file__, json.dumps(asked)]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    found = {name: fault for name, fault, _ in map(json.loads, done.stdout.splitlines())}
    assert found == {"processor": "", "devices": ""}


NONE_FOUND = """
import sys, torch
from elastic_etcd.children import node_probe
hip = bool(torch.version.hip)
node_probe._NVIDIA, node_probe._AMD = sys.argv[1 + hip], sys.argv[2 - hip]
print(torch.backends.cuda.is_built(), node_probe.devices()[0])
"""


@pytest.mark.parametrize("own", [True, False])
def test_gpus_are_missed_of_the_make_that_torch_is_built_for(own: bool) -> None:
    """With PyPI's torch, which is for NVIDIA's, a processor of AMD's that has a GPU is fit."""
    nodes = ("null", "no-such") if own else ("no-such", "null")
    program = [sys.executable, "-c", NONE_FOUND, *nodes]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(program, env=env, capture_output=True, text=True, check=True)
    built, why = done.stdout.rstrip("\n").split(" ", 1)
    assert bool(why) == (own and built == "True")


@pytest.mark.parametrize(
    ("seconds", "off"),
    [(0, ""), (60, "(58|59|60) s ahead of"), (-60, "(58|59|60) s behind")],
)
def test_the_clock_is_etcds(
    seconds: int, off: str, etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose answers have whole seconds."""
    later(monkeypatch, seconds)
    found, _ = node_probe.clock(etcd.endpoint, **PLAIN)
    need = "2 s are allowed: set the one that is wrong"
    told = f"its clock is {off} that of etcd at {etcd.endpoint}, {need} .*"
    assert re.fullmatch(told if off else "", found), found


def test_the_clock_is_asked_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path, "authority")
    flags = (*FAST, *shows(authority.issue("server")), *asking(authority))
    server, client = EtcdServer(tmp_path, "mutual", flags, "https"), authority.issue("client")
    later(monkeypatch, 60)
    try:
        server.start()
        files = {"cacert": authority.cacert, "cert": client.cert, "key": client.key}
        assert node_probe.clock(server.endpoint, tls=True, **files)[0]
        assert not node_probe.clock(server.endpoint, tls=True, **files | {"cacert": None})[0]
        assert not node_probe.clock(server.endpoint, **PLAIN)[0], "that can't be had"
        assert not node_probe.clock(f"unix://{tmp_path}/socket", **PLAIN)[0], "that is this clock"
    finally:
        server.kill()


def test_a_disk_has_room_and_is_not_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    why, speeds = node_probe.disk("--log-dir", str(tmp_path))
    assert not why
    assert speeds["disk of --log-dir (MB/s written and synced)"] > 0
    monkeypatch.setattr(node_probe, "_SLOWEST", 1e9)
    why, _ = node_probe.disk("--log-dir", str(tmp_path))
    assert f"--log-dir {tmp_path} takes " in why
    assert list(tmp_path.iterdir()) == [], "nothing is left there"


def test_a_full_disk_and_one_that_is_not_there_are_told(tmp_path: Path) -> None:
    why, _ = node_probe.disk("--memory-dir", f"{tmp_path}/none")
    assert f"--memory-dir {tmp_path}/none can't be written to: No such file or directory: " in why
    with small_disk(tmp_path):
        why, _ = node_probe.disk("--log-dir", str(tmp_path))
    assert why.startswith(f"--log-dir {tmp_path} has 0 MiB free, 64 are asked for: ")


def test_a_disk_that_stands_still_hides_no_other_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    still, other = tmp_path / "still", tmp_path / "other"
    still.mkdir()
    other.mkdir()
    monkeypatch.setattr(preflight, "_MEASURED", 2.0)
    asked: dict[str, dict[str, Any]] = {
        "processor": {"statistics": processor_statistics()},
        "--memory-dir": {"flag": "--memory-dir", "folder": str(other)},
        "--log-dir": {"flag": "--log-dir", "folder": str(still)},
        "clock": {"endpoint": "127.0.0.1:1", **PLAIN},
    }
    with disk_that_may_stand_still(still, tmp_path / "image"), standing_still(still):
        speeds, faults = preflight._measure(asked)
    assert faults == ["--log-dir has not answered for 2 s: look at dmesg"]
    assert [each.what.split()[0] for each in speeds] == ["processor", "disk"]


def test_a_program_that_fails_is_told_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON_EXEC", "/bin/false")
    assert preflight._measure({"processor": {"statistics": []}})[1] == [
        "processor can't be checked: /bin/false: exited 1"
    ]
