"""`elastic-etcd accelerate` gives workers what `accelerate launch` gives them, or says why not.

And `accelerate launch` itself meets through etcd.
"""

import json
import os
import re
import signal
import subprocess
import uuid
from pathlib import Path

import pytest

from elastic_etcd.frameworks.accelerate import _PROGRAM
from tests.support.etcd import EtcdServer
from tests.support.job import ROOT
from tests.support.processes import MARK, marked, send
from tests.support.venv import FRAMEWORKS, venv_or_skip

pytestmark = [
    pytest.mark.timeout(1800),  # the first time, pip has to download
    pytest.mark.nightly(part="frameworks"),
]

SHOWS = """
import json, os
ours = ("ACCELERATE_", "FSDP_", "KMP_", "OMP_", "CUDA_")
print("has:", json.dumps({k: v for k, v in os.environ.items() if k.startswith(ours)}))
"""
CPU = """
distributed_type: MULTI_CPU
dynamo_config: {dynamo_backend: INDUCTOR, dynamo_mode: max-autotune}
mixed_precision: bf16
num_machines: 1
num_processes: 1
use_cpu: true
"""
FSDP = """
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_min_num_params: 2000
  fsdp_version: 2
gpu_ids: '0'
num_machines: 1
num_processes: 1
"""
KILLED_ONCE = """
import os, signal
from pathlib import Path
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
print("world of", accelerator.num_processes, flush=True)
accelerator.wait_for_everyone()
if accelerator.is_main_process and not Path("killed").exists():
    Path("killed").touch()
    os.kill(os.getpid(), signal.SIGKILL)
accelerator.wait_for_everyone()
accelerator.end_training()
"""
ENTRY_POINT = """
[torchrun.handlers]
etcd-v3 = elastic_etcd.plugin.torchrun:etcd_v3
"""
REFUSED = {
    "nowhere.yaml": (None, "--config-file nowhere.yaml: no such file (looked from "),
    "broken.yaml": ("[", "--config-file broken.yaml: accelerate can't read it: "),
    "unknown.yaml": ("distributed_type: 'NO'\nnodes: 2", "had unknown keys (['nodes'])"),
    "tpu.yaml": ("distributed_type: XLA", "a TPU's processes are started by torch_xla"),
    "deepspeed.yaml": ("distributed_type: DEEPSPEED", "DeepSpeed is not installed"),
}
ASKS = """
import json, sys
sys.path.append(sys.argv.pop(1))
from accelerate_environment import answer
lines = [["--config_file", file, "train.py"] for file in sys.argv[1:]]
print(json.dumps([answer(line, {}) for line in [*lines, ["--mixed_precision=8", "train.py"]]]))
"""


@pytest.mark.parametrize("text", [CPU, FSDP], ids=["cpu", "fsdp"])
def test_workers_have_what_accelerate_launch_gives_them(
    etcd: EtcdServer, tmp_path: Path, text: str
) -> None:
    python = str(venv_or_skip("frameworks", *FRAMEWORKS))
    (tmp_path / "file.yaml").write_text(text)
    (tmp_path / "shows.py").write_text(SHOWS)
    flags = ["--config_file", "file.yaml", "--dynamo_use_dynamic"]
    job = ["--etcd", etcd.endpoint, "--job", uuid.uuid4().hex, "--start-method", "exec"]
    theirs = has([python, "-m", "accelerate.commands.launch", *flags, "shows.py"], tmp_path)
    ours = has([python, "-m", "elastic_etcd", "accelerate", *flags, *job, "shows.py"], tmp_path)
    assert ours == theirs
    assert theirs["ACCELERATE_DYNAMO_USE_DYNAMIC"] == "True"


def has(command: list[str], folder: Path) -> dict[str, str]:
    """What the script shows of its environment."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HOME": str(folder)}
    done = subprocess.run(
        command,
        cwd=folder,
        env={k: v for k, v in env.items() if k != "OMP_NUM_THREADS"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    (shown,) = re.findall(r"has: (\{.*\})", done.stdout)
    found: dict[str, str] = json.loads(shown)
    return found


def test_what_can_not_work_is_said(tmp_path: Path) -> None:
    python = str(venv_or_skip("frameworks", *FRAMEWORKS))
    for name, (text, _) in REFUSED.items():
        if text is not None:
            (tmp_path / name).write_text(text)
    told = subprocess.run(
        [python, "-P", "-c", ASKS, str(_PROGRAM.parent), *REFUSED],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        check=True,
    )
    *answers, flag = json.loads(told.stdout)
    for answer, (_, why) in zip(answers, REFUSED.values(), strict=True):
        assert why in answer["error"]
    assert "--mixed_precision" in flag["error"]
    assert "invalid choice: '8'" in flag["error"]


def test_accelerate_launch_meets_through_etcd(
    etcd: EtcdServer, tmp_path: Path, prefix: str
) -> None:
    """The command line of docs/plugin.md; a worker is killed, and all begin another world."""
    python = str(venv_or_skip("frameworks", *FRAMEWORKS))
    metadata = tmp_path / "elastic_etcd-0.dist-info"
    metadata.mkdir()
    (metadata / "entry_points.txt").write_text(ENTRY_POINT)
    (tmp_path / "train.py").write_text(KILLED_ONCE)
    address, port = etcd.endpoint.split(":")
    flags = ["--multi_gpu", "--num_machines=2", "--num_processes=2", "--machine_rank=1"]
    flags += ["--rdzv_backend=etcd-v3", f"--main_process_ip={address}"]
    flags += [f"--main_process_port={port}", f"--rdzv_conf=prefix={prefix}", "--max_restarts=20"]
    own = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "PET_RDZV_ID": "job", MARK: prefix}
    own |= {"HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    try:
        nodes = [
            subprocess.Popen(
                [python, "-m", "accelerate.commands.launch", *flags, "train.py"],
                cwd=tmp_path,
                env=os.environ | own,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for _ in range(2)
        ]
        for node in nodes:
            said, _ = node.communicate(timeout=600)
            assert node.returncode == 0, said
            assert said.count("world of 2\n") == 2, said
    finally:
        send(signal.SIGKILL, marked(prefix))
