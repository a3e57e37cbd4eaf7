"""What the program of `elastic-etcd check` says of disks, the clock and devices."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from elastic_etcd.agent import node_checks
from elastic_etcd.children import node_probe
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
    asked: dict[str, Any] = {"devices": {}}
    program = [sys.executable, node_probe.__file__, json.dumps(asked)]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert [(name, cure) for name, _, cure in map(json.loads, done.stdout.splitlines())] == [
        ("devices", "")
    ]


NONE_FOUND = """
import sys, torch
from elastic_etcd.children import node_probe
from elastic_etcd.agent import node_checks
hip = bool(torch.version.hip)
node_probe._NVIDIA, node_probe._AMD = sys.argv[1 + hip], sys.argv[2 - hip]
print(torch.backends.cuda.is_built(), node_probe.devices()[1])
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
    found, cure = node_probe.clock(etcd.endpoint, **PLAIN)
    told = f"{off} that of etcd at {etcd.endpoint}, 2 s are allowed"
    well = f"within 2 s of that of etcd at {etcd.endpoint}"
    assert re.fullmatch(told if off else well, found), found
    assert cure == ("set the one that is wrong (chronyc makestep)" if off else "")


def test_the_clock_is_asked_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path, "authority")
    flags = (*FAST, *shows(authority.issue("server")), *asking(authority))
    server, client = EtcdServer(tmp_path, "mutual", flags, "https"), authority.issue("client")
    later(monkeypatch, 60)
    try:
        server.start()
        files = {"cacert": authority.cacert, "cert": client.cert, "key": client.key}
        assert node_probe.clock(server.endpoint, tls=True, **files)[1]
        unknown = ("etcd does not tell its time", "")
        assert node_probe.clock(server.endpoint, tls=True, **files | {"cacert": None}) == unknown
        assert node_probe.clock(server.endpoint, **PLAIN) == unknown
        assert node_probe.clock(f"unix://{tmp_path}/socket", **PLAIN) == unknown
    finally:
        server.kill()


def test_a_disk_has_room_and_is_not_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, cure = node_probe.disk(str(tmp_path))
    assert re.match(f"{tmp_path} takes .* MB/s of what is written and synced, and has ", found)
    assert not cure
    monkeypatch.setattr(node_probe, "_SLOWEST", 1e9)
    found, cure = node_probe.disk(str(tmp_path))
    assert found.startswith(f"{tmp_path} takes ")
    assert cure == "look at the disk, or give another folder"
    assert list(tmp_path.iterdir()) == [], "nothing is left there"


def test_a_full_disk_and_one_that_is_not_there_are_told(tmp_path: Path) -> None:
    found, cure = node_probe.disk(f"{tmp_path}/none")
    assert found == f"{tmp_path}/none can't be written to: No such file or directory"
    assert cure == "mend it, or give another folder"
    with small_disk(tmp_path):
        assert node_probe.disk(str(tmp_path)) == (
            f"{tmp_path} has 0 MiB free, 64 are asked for",
            "free some, or give another folder",
        )


def test_a_log_dir_that_is_dev_null_is_no_disk() -> None:
    given = node_checks.NodeFlags(1, os.devnull, "/var/tmp", None, "/elastic-etcd", 5.0)
    assert "disk of --log-dir" not in node_checks._questions(given, None)


def test_a_disk_that_stands_still_hides_no_other_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    still, other = tmp_path / "still", tmp_path / "other"
    still.mkdir()
    other.mkdir()
    monkeypatch.setattr(node_checks, "_MEASURED", 2.0)
    asked: dict[str, dict[str, Any]] = {
        "disk of --memory-dir": {"folder": str(other)},
        "disk of --log-dir": {"folder": str(still)},
        "clock": {"endpoint": "127.0.0.1:1", **PLAIN},
    }
    with disk_that_may_stand_still(still, tmp_path / "image"), standing_still(still):
        found = {each.name: each for each in node_checks.measured(asked)}
    assert found.keys() == {"devices", "clock", "disk of --memory-dir", "disk of --log-dir"}
    assert [each for each in found.values() if each.cure] == [
        node_checks.CheckResult("disk of --log-dir", "has not answered for 2 s", "look at dmesg")
    ]


def test_a_program_that_fails_is_told_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON_EXEC", "/bin/false")
    found = node_checks.measured({"disk of TMPDIR": {"folder": "/"}})
    assert found[1:] == [
        node_checks.CheckResult(
            "disk of TMPDIR", "can't be checked: /bin/false: exited 1", "mend that Python"
        )
    ]
