import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_etcd.agent import devices
from elastic_etcd.agent.devices import count_devices, cpus_near_gpus
from elastic_etcd.errors import UsageError

FOUR_GPUS = "\n".join(
    f"GPU {i}: NVIDIA H100 80GB HBM3 (UUID: GPU-{i}a2b3c4d-0000-1111-2222-333344445555)"
    for i in range(4)
)
MIG = FOUR_GPUS + "\n  MIG 1g.10gb     Device  0: (UUID: MIG-aaaa-bbbb)"
CPUS = len(os.sched_getaffinity(0))
NIGHTLY = pytest.mark.nightly(part="jobs")

Machine = Callable[..., dict[str, str]]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """An environment in which nvidia-smi and the workers' Python are programs of the test's."""
    monkeypatch.setattr(devices, "_DEVICE_NODES", ())

    def program(name: str, body: str) -> str:
        file = tmp_path / name
        file.write_text("#!/bin/sh\n" + body)
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        return str(file)

    def make(smi: str | None = None, torch: str | None = None, **env: str) -> dict[str, str]:
        if smi is not None:
            program("nvidia-smi", f"cat <<'END'\n{smi}\nEND\n")
        if torch is not None:
            monkeypatch.setattr(devices, "_DEVICE_NODES", ("null",))
            env["PYTHON_EXEC"] = program("python-with-torch", torch)
        return {"PATH": f"{tmp_path}:/usr/bin:/bin", **env}

    return make


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4),
        ("0,1", 2),
        ("3", 1),
        (" 2 , 0 ", 2),
        ("0,1,7,2", 2),  # CUDA stops at the first that is not there
        ("0,-1,2", 1),
        ("1,1", 0),  # and sees none when one is repeated
        ("GPU-0a2b3c4d-0000-1111-2222-333344445555,GPU-2a2b", 2),
        ("GPU-ffff", 0),
        ("", 0),
        ("-1", 0),
        ("NoDevFiles", 0),
    ],
)
def test_gpus_are_counted_as_cuda_shows_them(
    machine: Machine, visible: str | None, count: int
) -> None:
    env = machine(FOUR_GPUS)
    if visible is not None:
        env["CUDA_VISIBLE_DEVICES"] = visible
    if count:
        assert count_devices("gpu", env) == count
        assert count_devices("auto", env) == count
    else:
        with pytest.raises(UsageError, match=r"no GPU found on this machine \(CUDA_VISIBLE"):
            count_devices("gpu", env)
        assert count_devices("auto", env) == CPUS


@pytest.mark.parametrize(
    ("env", "nvidia", "amd"),
    [
        ({}, True, True),
        ({"CUDA_VISIBLE_DEVICES": "0"}, True, True),
        ({"CUDA_VISIBLE_DEVICES": "GPU-0a2b,-1"}, True, True),
        ({"CUDA_VISIBLE_DEVICES": "MIG-aaaa"}, True, True),
        ({"CUDA_VISIBLE_DEVICES": ""}, False, False),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, False, False),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, False, False),  # Slurm's, of a job without --gres
        ({"ROCR_VISIBLE_DEVICES": "NoDevFiles"}, True, False),
        ({"HIP_VISIBLE_DEVICES": "none"}, True, False),
    ],
)
def test_gpus_that_are_hidden_are_not_checked(
    env: dict[str, str], nvidia: bool, amd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job without a GPU was refused on a machine that has some."""
    for here, nodes in ((nvidia, ("null", "no-such")), (amd, ("no-such", "null"))):
        for name, found in zip(("_NVIDIA", "_AMD"), nodes, strict=True):
            monkeypatch.setattr(devices, name, found)
        assert devices.are_visible(env) == here


def test_nvidia_smi_is_preferred_to_importing_torch(machine: Machine) -> None:
    assert count_devices("gpu", machine(FOUR_GPUS, torch="exit 1")) == 4


@pytest.mark.parametrize("visible", [None, "MIG-aaaa-bbbb"])
def test_torch_counts_parts_of_gpus(machine: Machine, visible: str | None) -> None:
    env = machine(MIG, torch="echo 1")
    if visible:
        env["CUDA_VISIBLE_DEVICES"] = visible
    assert count_devices("gpu", env) == 1


@pytest.mark.parametrize("spec", ["gpu", "auto", "xpu"])
def test_torch_counts_where_nvidia_smi_is_missing_or_broken(machine: Machine, spec: str) -> None:
    env = machine(smi="", torch='echo warning from a library; echo "$3" >&2; echo 6')
    assert count_devices(spec, env) == 6


def test_torch_is_asked_for_the_kind(machine: Machine) -> None:
    env = machine(torch='[ "$3" = xpu ] && echo 2 || echo 0')
    assert count_devices("xpu", env) == 2
    with pytest.raises(UsageError, match="no GPU found"):
        count_devices("gpu", env)


@pytest.mark.parametrize("name", ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"])
def test_a_variable_of_rocm_that_hides_the_gpus_is_named(machine: Machine, name: str) -> None:
    with pytest.raises(UsageError, match=rf"no GPU found on this machine \({name} is ''\)\.\nGive"):
        count_devices("gpu", machine(torch="echo 0", **{name: ""}))


BACKEND = """
import sys, types
import torch

torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", types.SimpleNamespace(
    device_count=lambda: 3, is_available=lambda: sys.argv[2] == "here"))
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("spec", "where", "count"),
    [
        ("npu", "here", "3"),
        pytest.param("npu", "away", "0", marks=NIGHTLY),
        pytest.param("gpus", "here", "unknown", marks=NIGHTLY),
    ],
)
def test_a_backend_that_a_package_has_registered_is_counted_as_torchrun_does(
    spec: str, where: str, count: str
) -> None:
    """The package is a stand-in of a few lines: its devices are not here."""
    asked = BACKEND + devices._ASK_DEVICES
    command = [sys.executable, "-c", asked, spec, where]
    assert (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{count}\n"
    )


def test_a_name_that_torch_does_not_know_is_no_number(machine: Machine) -> None:
    assert count_devices("npu", machine(torch='[ "$3" = npu ] && echo 3')) == 3
    with pytest.raises(UsageError, match="--nproc-per-node gpus: give a number"):
        count_devices("gpus", machine(torch="echo unknown"))


def test_torch_that_cannot_be_asked(machine: Machine) -> None:
    with pytest.raises(UsageError, match=r"No module named .torch.\nGive a number") as caught:
        count_devices("gpu", machine(torch="echo \"No module named 'torch'\" >&2; exit 1"))
    assert len(str(caught.value).splitlines()) == 3


def test_f11_cpus_near_gpus_are_what_torch_says(machine: Machine) -> None:
    env = machine(torch='[ "$3 $4" = "socket 2" ] && echo a warning && echo "[[0, 1], [2, 3]]"')
    assert cpus_near_gpus("socket", 2, env) == ["0,1", "2,3"]
    with pytest.raises(UsageError, match=r"can't say .*\n.*: no GPU 7\nIt needs torch 2\.13"):
        cpus_near_gpus("node", 8, machine(torch="echo no GPU 7 >&2; exit 1"))
    with pytest.raises(UsageError, match="none of the CPUs near a GPU"):
        cpus_near_gpus("node", 2, machine(torch="echo '[[0], []]'"))


@NIGHTLY
@pytest.mark.timeout(600)
def test_the_real_torch_answers(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_DEVICE_NODES", ("null",))
    env = dict(os.environ, CUDA_VISIBLE_DEVICES="")
    assert devices._ask_torch(devices._ASK_DEVICES, "gpu", env=env) == "0"
    assert devices._ask_torch(devices._ASK_DEVICES, "auto", env=env) == "0"
    with pytest.raises(UsageError, match=r"--numa-binding node: torch can't say .*\n.*NVIDIA"):
        cpus_near_gpus("node", 2, env)


def test_a_machine_without_devices(machine: Machine) -> None:
    env = machine()
    with pytest.raises(UsageError, match=r"no GPU found on this machine\.\nGive a number"):
        count_devices("gpu", env)
    assert count_devices("auto", env) == CPUS
    assert count_devices("cpu", env) == CPUS


def test_numbers() -> None:
    assert count_devices("3") == 3
    for bad in ("0", "-1", "2.5", "many", "", "٣"):
        with pytest.raises(UsageError, match="at least 1, or gpu, cpu, xpu, auto, or the name of"):
            count_devices(bad)
