"""The recipes for TorchX, SkyPilot and dstack: each program reads its own, and the commands run.

TorchX runs the job on this machine. The other two need a cloud: their nodes are started here, with
the variables that they would set, by the shell that they would call.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.etcd import EtcdServer
from tests.support.venv import ROOT, venv_or_skip

pytestmark = [
    pytest.mark.timeout(900),  # the first time, pip has to download
    pytest.mark.nightly(part="platforms"),
]

EXAMPLES = ROOT / "examples"
TRAIN = """\
import os, sys, time
import elastic_etcd as ee
print("world", os.environ["WORLD_SIZE"], "with", sys.argv[1:], flush=True)
"""
PARSE_SKYPILOT = """\
import sys, sky, yaml
config = yaml.safe_load(open(sys.argv[1]))
task = sky.Task.from_yaml_config(config, env_overrides=[("NODE", "node1")])
(resources,) = task.resources
print(task.num_nodes, resources.use_spot, resources.accelerators["H100"], task.envs["NODE"])
"""
PARSE_DSTACK = """\
import sys, yaml
from dstack._internal.core.models.configurations import parse_apply_configuration
task = parse_apply_configuration(yaml.safe_load(open(sys.argv[1])))
print(task.type, task.resources.gpu.count.min, task.retry.duration, sorted(task.env))
"""


@pytest.fixture
def env(etcd: EtcdServer, prefix: str, tmp_path: Path) -> dict[str, str]:
    """The environment of a node, in a folder with a script."""
    (tmp_path / "train.py").write_text(TRAIN)
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ours = {"PET_PREFIX": prefix, "PET_START_METHOD": "exec", "PYTHONPATH": str(ROOT)}
    names = {"ETCD": etcd.endpoint, "JOB": "digits", "NNODES": "2:2"}
    return {"PATH": programs, "HOME": str(tmp_path)} | ours | names


def said(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """What it prints; it must go well."""
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def nodes_run(shell: list[str], folder: Path, env: dict[str, str]) -> None:
    """Two nodes, each started by this shell, are a world."""
    nodes = [
        subprocess.Popen(
            shell,
            cwd=folder,
            env=env | {"NODE": f"node{index}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    for node in nodes:
        output, _ = node.communicate(timeout=120)
        assert node.returncode == 0, output
        assert "world 2 with" in output


def test_o11_torchx_runs_nodes_that_meet(env: dict[str, str], tmp_path: Path) -> None:
    torchx = venv_or_skip("torchx", "torchx==0.7.*").with_name("torchx")
    component = f"{EXAMPLES / 'torchx' / 'elastic.py'}:elastic"
    logs = tmp_path / "logs"
    asked = ["run", "--wait", "--scheduler", "local_cwd", "--scheduler_args", f"log_dir={logs}"]
    given = shlex.split(f"--etcd {env['ETCD']} --nnodes 2:2 --script train.py -- --epochs 9")
    said(torchx, *asked, component, *given, cwd=tmp_path, env=env)
    outputs = [file.read_text() for file in logs.glob("torchx/*/node/*/stdout.log")]
    assert [output.count("world 2 with ['--epochs', '9']") for output in outputs] == [1, 1]


def test_o11_torchx_for_slurm_ends_all_nodes_with_the_first(tmp_path: Path) -> None:
    """So docs/platforms.md says, and sends people to the sbatch files of examples/slurm."""
    torchx = venv_or_skip("torchx", "torchx==0.7.*").with_name("torchx")
    component = f"{EXAMPLES / 'torchx' / 'elastic.py'}:elastic"
    given = ["--etcd", "etcd1:2379", "--nodes", "4", "--nnodes", "2:4", "--script", "train.py"]
    told = said(torchx, "run", "--dryrun", "--scheduler", "slurm", component, *given, cwd=tmp_path)
    commands = [line for line in told.splitlines() if "python -m elastic_etcd.launch" in line]
    assert len(commands) == 4
    assert all("--kill-on-bad-exit=1" in command for command in commands)
    assert "--node-name node3 train.py" in commands[3]


def test_o11_skypilot_reads_its_recipe_and_the_command_runs(
    env: dict[str, str], tmp_path: Path
) -> None:
    recipe = EXAMPLES / "skypilot" / "node.yaml"
    python = venv_or_skip("skypilot", "skypilot==0.14.*")
    alone = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    (tmp_path / "home").mkdir()
    told = said(python, "-c", PARSE_SKYPILOT, recipe, cwd=tmp_path / "home", env=alone)
    assert told.splitlines()[-1] == "1 True 8 node1"
    written: dict[str, Any] = yaml.safe_load(recipe.read_text())
    assert written["envs"].keys() == {"ETCD", "JOB", "NNODES", "NODE"}
    sets = {"SKYPILOT_NUM_GPUS_PER_NODE": "1"}
    nodes_run(["bash", "-c", written["run"]], tmp_path, env | sets)


def test_o11_dstack_reads_its_recipe_and_the_command_runs(
    env: dict[str, str], tmp_path: Path
) -> None:
    recipe = EXAMPLES / "dstack" / "node.dstack.yml"
    python = venv_or_skip("dstack", "dstack==0.22.*")
    told = said(python, "-c", PARSE_DSTACK, recipe)
    assert told == "task 8 86400 ['ETCD', 'JOB', 'NNODES', 'NODE']\n"
    (command,) = yaml.safe_load(recipe.read_text())["commands"]
    assert shlex.split(command)[:4] == ["exec", "python", "-m", "elastic_etcd.launch"]
    nodes_run(["sh", "-c", command], tmp_path, env | {"DSTACK_GPUS_PER_NODE": "1"})
