"""`elastic-etcd accelerate`: whose flag is whose, and what becomes of accelerate's numbers."""

import os
from collections.abc import Mapping
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from elastic_etcd.__main__ import main
from elastic_etcd.frameworks.accelerate import _sizes
from elastic_etcd.frameworks.accelerate_environment import _be_second_of_two, split

TOLD = {
    "num_machines": 4,
    "num_processes": 16,
    "machine_rank": 1,
    "main_process_ip": "10.0.0.1",
}


def sizes(
    *flags: str, told: Mapping[str, object] = TOLD, env: Mapping[str, str] | None = None
) -> tuple[list[str], list[str]]:
    script = ["train.py", "--nnodes", "9"]
    return _sizes({"flags": [*flags], "script": script, "meeting": told}, env or {})


def test_numbers_of_accelerate_count_where_none_are_given() -> None:
    flags, remarks = sizes()
    assert flags == ["--nproc-per-node=4", "--nnodes=4"]
    rank, address, nodes = remarks
    assert rank.startswith("machine_rank 1 has no meaning here: ranks are given at the rendezvous")
    assert address.startswith("main_process_ip 10.0.0.1 has no meaning here: ")
    assert nodes == "num_machines 4 is --nnodes 4: give MIN:MAX instead"


@pytest.mark.parametrize(
    ("given", "env"),
    [
        (["--nnodes", "2:8", "--nproc-per-node", "gpu"], {}),
        (["--nnodes=2:8", "--nproc_per_node=2"], {}),
        ([], {"PET_NNODES": "2:8", "PET_NPROC_PER_NODE": "2"}),
    ],
)
def test_what_is_given_counts(given: list[str], env: dict[str, str]) -> None:
    flags, remarks = sizes(*given, env=env)
    assert flags == []
    assert remarks[-1] == "num_machines 4 has no meaning here: --nnodes counts"


def test_a_file_of_one_machine_says_nothing() -> None:
    assert sizes(told={}) == ([], [])
    assert sizes(told={"num_processes": 8}) == (["--nproc-per-node=8"], [])


@pytest.mark.parametrize(
    ("flags", "env", "workers"),
    [
        ("", "", 4),
        ("--nproc-per-node 3", "9", 3),
        ("--nnodes=2 --nproc_per_node=3 --rerun", "", 3),
        ("--nproc-per-node=cpu", "", os.cpu_count()),
        ("", "3", 3),
    ],
)
def test_accelerate_divides_the_cores_among_as_many_workers_as_there_are(
    flags: str, env: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", env)
    args = SimpleNamespace()
    _be_second_of_two(args, TOLD, flags.split())
    assert args.num_processes // args.num_machines == workers


def test_each_flag_goes_where_it_is_known_and_the_script_keeps_its_own() -> None:
    ours, theirs = {"--job": True, "--rerun": False}, {"--cpu": False, "--mixed_precision": True}
    line = "--job j --mixed_precision bf16 --cpu --rerun --tee=3 train.py --cpu --job k"
    assert split(line.split(), ours, theirs) == (
        ["--job", "j", "--rerun", "--tee=3"],
        ["--mixed_precision", "bf16", "--cpu"],
        ["train.py", "--cpu", "--job", "k"],
    )


@pytest.mark.skipif(find_spec("accelerate") is not None, reason="accelerate is there")
def test_that_accelerate_is_missing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accelerate", "--nnodes", "2", "train.py"]) == 2
    told = capsys.readouterr().err
    assert "error: No module named 'accelerate' in " in told
    assert "pip install accelerate there" in told


def test_a_python_that_is_not_there_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHON_EXEC", "/no/python")
    assert main(["accelerate", "train.py"]) == 2
    assert "error: /no/python can't load accelerate: " in capsys.readouterr().err


def test_no_script_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accelerate"]) == 2
    assert "error: no script given" in capsys.readouterr().err
