"""Every example, and the program in docs/migration.md, under each launcher with a small load."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
TINY = ("--images=4", "--size=32", "--batch=2", "--loader-workers=1")
LAUNCHERS = {
    "python": (),
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    "launch": ("-m", "elastic_etcd.launch", "--nproc-per-node", "2"),
}
AROUND = """\
import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import elastic_etcd as ee

torch.manual_seed(0)
data = TensorDataset(torch.randn(320, 64), torch.randint(10, (320,)))
model = torch.nn.Linear(64, 10)
optimizer = torch.optim.Adam(model.parameters())
"""
# As docs/migration.md has it of a framework that makes its own process group.
OWN_GROUP = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import elastic_etcd as ee

dist.init_process_group("gloo")  # or accelerate's Accelerator(), which makes it
inputs = torch.randn(240, 8)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
sampler = ee.ElasticSampler(data, tail="pad")
state = ee.ElasticState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)
if state.sync() and dist.get_rank() == 0:
    print("goes on in epoch", state.epoch)

ddp = DistributedDataParallel(model)  # or what accelerator.prepare() gives
loader = DataLoader(data, batch_size=8, sampler=sampler)
while state.epoch < 3:
    sampler.set_epoch(state.epoch)
    for x, y in state.steps(loader, commit_every=5):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(ddp(x), y).backward()
        optimizer.step()
    state.epoch += 1
    state.commit()
    if dist.get_rank() == 0:
        print("epoch", state.epoch, "done")
del ddp
dist.destroy_process_group()
"""


def run(launcher: str, script: Path, *arguments: str, cwd: Path, calm: bool = True) -> str:
    """What it prints; it must exit 0, and if it is to be `calm` ask for no attention on the way."""
    done = subprocess.run(
        [sys.executable, *LAUNCHERS[launcher], str(script), *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    told: str = done.stdout
    assert done.returncode == 0, told
    assert not calm or "Traceback" not in told, told
    return told


def test_all_examples_are_here() -> None:
    there = {path.name for path in (ROOT / "examples").glob("*.py")}
    names = {"digits_ddp.py", "digits_elastic.py", "fsdp2_elastic.py", "resnet_synthetic.py"}
    assert there == names


@pytest.mark.nightly(part="examples")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_sharded(launcher: str, tmp_path: Path) -> None:
    small = ("--epochs=1", "--samples=256", "--width=16", "--depth=1", "--checkpoints=kept")
    told = run(launcher, ROOT / "examples" / "fsdp2_elastic.py", *small, cwd=tmp_path, calm=False)
    assert "epoch 1 " in told
    assert len(list((tmp_path / "kept").glob("commit-*/.metadata"))) == 1


@pytest.mark.nightly(part="examples")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_synthetic(launcher: str, tmp_path: Path) -> None:
    run(launcher, ROOT / "examples" / "resnet_synthetic.py", *TINY, cwd=tmp_path)


@pytest.mark.nightly(part="examples")
@pytest.mark.parametrize(
    ("example", "keeps"),
    [("digits_ddp.py", "--checkpoint-dir"), ("digits_elastic.py", "--save")],
    ids=["ddp", "elastic"],
)
def test_digits_go_on_from_what_they_keep_under_another_launcher(
    example: str, keeps: str, tmp_path: Path
) -> None:
    script, kept = ROOT / "examples" / example, tmp_path / "kept"
    for epochs, launcher in enumerate(LAUNCHERS, 1):
        told = run(launcher, script, f"--epochs={epochs}", f"{keeps}={kept}", cwd=tmp_path)
        world = 1 if launcher == "python" else 2
        assert f"epoch {epochs}/{epochs}  world {world}  loss" in told
        assert told.count("  world ") == 1, "epochs that were trained before"
        assert "accuracy 0." in told


@pytest.mark.nightly(part="examples")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_program_after_migration(launcher: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "migration.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text(program)
    told = run(launcher, script, cwd=tmp_path)
    assert "epoch 3 done" in told


def test_the_loop_that_the_readme_shows(tmp_path: Path) -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text(f"{AROUND}{shown}print('consumed', state.epoch, state.sampler.consumed)\n")
    assert run("launch", script, cwd=tmp_path).count("consumed 2 320") == 2


@pytest.mark.nightly(part="examples")
def test_t22_a_group_of_its_own_goes_on_from_memory(tmp_path: Path) -> None:
    killed = """\
    if state.epoch == 2 and dist.get_rank() == 1 and os.environ["ELASTIC_ETCD_GENERATION"] == "1":
        os.kill(os.getpid(), 9)
    if dist.get_rank() == 0:
"""
    text = OWN_GROUP.replace("    if dist.get_rank() == 0:\n", killed)
    script = tmp_path / "train.py"
    script.write_text(f"import os\n{text}")
    told = run("launch", script, cwd=tmp_path, calm=False)
    assert "was killed by SIGKILL" in told
    assert "goes on in epoch 2" in told
    assert "epoch 3 done" in told
    assert told.count("epoch 1 done") == 1
