"""The launcher gives workers what `accelerate launch` would, by the recipe of docs/frameworks.md.

And `accelerate launch` itself meets through etcd.
"""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.frameworks.accelerate_recipe import LAUNCHES, run, variables
from tests.support.etcd import EtcdServer
from tests.support.job import ROOT
from tests.support.processes import MARK, marked, send
from tests.support.venv import FRAMEWORKS, venv_or_skip

pytestmark = [
    pytest.mark.timeout(1800),  # the first time, pip has to download
    pytest.mark.nightly(part="frameworks"),
]

OURS = ("ACCELERATE_", "FSDP_", "KMP_", "PARALLELISM_CONFIG_")
SHOWS = f"""
import json, os
print("has:", json.dumps({{k: v for k, v in os.environ.items() if k.startswith({OURS})}}))
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


@pytest.mark.parametrize("text", [CPU, FSDP], ids=["cpu", "fsdp"])
def test_workers_have_what_accelerate_launch_gives_them(
    etcd: EtcdServer, tmp_path: Path, prefix: str, text: str
) -> None:
    python = venv_or_skip("frameworks", *FRAMEWORKS)
    (tmp_path / "train.py").write_text(SHOWS)
    told = variables(text, python, tmp_path)
    theirs = run("accelerate launch --config_file accelerate.yaml train.py", python, tmp_path)
    line = LAUNCHES.replace("etcd1:2379", f"{etcd.endpoint} --prefix {prefix}")
    ours = run(line, python, tmp_path)
    assert has(ours) == has(theirs)
    assert has(theirs) == told
    assert told["ACCELERATE_MIXED_PRECISION"] == ("bf16" if text == CPU else "no")


def has(said: str) -> dict[str, str]:
    """What the script shows of its environment."""
    (shown,) = re.findall(r"has: (\{.*\})", said)
    found: dict[str, str] = json.loads(shown)
    return found


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
