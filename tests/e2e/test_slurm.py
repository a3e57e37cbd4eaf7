"""The files of examples/slurm on a real Slurm: nodes come and go, and a job goes back to the queue.

Needs root, and Debian's packages or their mirror; where those are not to be had it is skipped.
"""

import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.debian import NotToBeHad
from tests.support.etcd import EtcdServer
from tests.support.job import PATIENCE, ROOT
from tests.support.slurm import Slurm

pytestmark = [pytest.mark.timeout(900), pytest.mark.nightly(part="slurm")]

# It needs no torch, so that it costs little, and saves what it has done when its node leaves.
TRAIN = """
import os, pathlib, signal, sys, time
import elastic_etcd as ee

directory = pathlib.Path(sys.argv[1])
checkpoint = directory / "checkpoint"
step = int(checkpoint.read_text()) if checkpoint.exists() else 0
world, agent = os.environ["WORLD_SIZE"], os.getppid()


def on_sigterm(*_):
    if ee.leaving() and os.environ["RANK"] == "0":
        checkpoint.write_text(str(step))
        print("saved at step", step, flush=True)
    sys.exit()


signal.signal(signal.SIGTERM, on_sigterm)
step += 1
print(f"trains in a world of {world}, its first step is {step}, by {agent}", flush=True)
while not (directory / "stop").exists():
    time.sleep(0.05)
    step += 1
    ee.heartbeat()
"""
# What many clusters have: the job's temporary files go, whosever they are.
EPILOG = """#!/bin/sh
find "{shared}" -mindepth 1 -delete
"""
FLAGS = {"NPROC": "1", "PET_START_METHOD": "exec", "PET_LEASE_TTL": "2", "PET_SETTLE": "5"}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    for example in (ROOT / "examples" / "slurm").iterdir():
        text = example.read_text().replace("#SBATCH --gpus-per-node=8\n", "")  # there are none
        (folder / example.name).write_text(text)
    (folder / "train.py").write_text(TRAIN)
    epilog, shared = folder / "epilog", tempfile.mkdtemp()  # sockets have short names
    epilog.write_text(EPILOG.format(shared=shared))
    epilog.chmod(0o755)
    try:
        cluster = Slurm(folder, nodes=5, epilog=str(epilog))
    except NotToBeHad as reason:
        pytest.skip(str(reason))
    with cluster.running():
        yield cluster
    shutil.rmtree(shared)


def shared_tmp(slurm: Slurm) -> str:
    """The folder that the epilog empties."""
    (folder,) = re.findall(r'find "(.*?)"', (slurm.folder.parent / "epilog").read_text())
    return str(folder)


def log(slurm: Slurm, job: str, name: str) -> str:
    files = slurm.folder.parent.glob(f"{name}-{job}*.log")
    return "\n".join(file.read_text(errors="replace") for file in files)


def trains(slurm: Slurm, world: int, *logs: tuple[str, str], times: int) -> dict[str, int]:
    """Wait until so many workers have begun in worlds of this size; gives {node: last agent}."""
    begun = re.compile(
        rf"^\[(n\d) \d+\]: trains in a world of {world}, its first step is \d+, by (\d+)$",
        re.MULTILINE,
    )

    def found() -> list[tuple[str, str]]:
        return begun.findall("\n".join(log(slurm, *each) for each in logs))

    what = f"{times} workers in worlds of {world}"
    slurm.wait(what, lambda: len(found()) >= times, seconds=2 * PATIENCE)
    assert len(found()) == times, slurm.account()
    return {node: int(pid) for node, pid in found()}


def test_a_spare_takes_a_place_and_a_job_grows(slurm: Slurm, tmp_path: Path) -> None:
    train, told = ("train.py", str(tmp_path)), {"NNODES": "2,4", **FLAGS}
    job = slurm.sbatch("--nodes=3", "fixed.sbatch", *train, ETCD_NODES="3", **told)
    fixed = (job, "fixed")
    first = trains(slurm, 2, fixed, times=2)
    slurm.wait("a spare", lambda: "]: spare: " in log(slurm, *fixed))
    node, agent = max(first.items())
    os.kill(agent, signal.SIGKILL)
    then = trains(slurm, 2, fixed, times=4)
    assert set(then) == {"n1", "n2", "n3"}, "the spare has begun, beside those of before"
    assert f"{node} is " in log(slurm, *fixed)  # dead, or lost
    (etcd,) = re.findall(r" ETCD=(\S+) ", log(slurm, *fixed))
    assert etcd.count(",") == 2
    more = slurm.sbatch("--array=1-2", "grow.sbatch", *train, JOB=job, ETCD=etcd, **told)
    grown = trains(slurm, 4, fixed, (more, "grow"), times=4)
    assert set(grown) == {"n1", "n2", "n3", "n4", "n5"} - {node}
    slurm.run("scancel", "--signal=USR2", f"{more}_1")  # as --signal=USR2@180 does in time
    slurm.ends(f"{more}_1", "FAILED", "143:0")
    assert "SIGUSR2: leaving" in log(slurm, f"{more}_1", "grow")
    trains(slurm, 2, fixed, (more, "grow"), times=6)
    (tmp_path / "stop").touch()
    slurm.ends(job)  # though srun says 137
    slurm.ends(f"{more}_2")


def test_a_job_goes_back_to_the_queue_and_on(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.sbatch(
        "--nodes=2", "requeue.sbatch", "train.py", str(tmp_path), NNODES="1:2", **FLAGS
    )
    name = (job, "requeue")
    trains(slurm, 2, name, times=2)
    slurm.run("scancel", "--batch", "--signal=USR2", job)  # as --signal=B:USR2@180 does in time
    slurm.wait("it begins again", lambda: slurm.field(job, "Restarts") == "1")
    assert log(slurm, *name).count(": leaving; ") == 2
    (saved,) = re.findall(r"saved at step (\d+)", log(slurm, *name))
    trains(slurm, 2, name, times=4)
    assert log(slurm, *name).count(f"a world of 2, its first step is {int(saved) + 1}, ") == 2
    (tmp_path / "stop").touch()
    slurm.ends(job)


def test_a_job_goes_back_to_the_queue_while_etcd_is_away(
    slurm: Slurm, tmp_path: Path, etcd: EtcdServer
) -> None:
    told = {"ETCD": etcd.endpoint, "NNODES": "1:2", **FLAGS}
    job = slurm.sbatch("--nodes=2", "requeue.sbatch", "train.py", str(tmp_path), **told)
    trains(slurm, 2, (job, "requeue"), times=2)
    etcd.kill()
    slurm.run("scancel", "--batch", "--signal=USR2", job)
    slurm.wait("it begins again", lambda: slurm.field(job, "Restarts") == "1")
    slurm.run("scancel", job)


def worker_of(agent: int) -> int:
    """Its only child that runs the script."""
    lists = [file.read_text().split() for file in Path(f"/proc/{agent}/task").glob("*/children")]
    (found,) = [
        int(pid)
        for children in lists
        for pid in children
        if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return found


def test_o11_an_epilog_empties_the_folder_of_another_job_s_agents(
    slurm: Slurm, tmp_path: Path
) -> None:
    """They need nothing in it: a worker is killed, and all begin again."""
    shared = Path(shared_tmp(slurm))
    told = {"NNODES": "2:2", "TMPDIR": str(shared), **FLAGS}
    job = slurm.sbatch("--nodes=2", "fixed.sbatch", "train.py", str(tmp_path), **told)
    fixed = (job, "fixed")
    agents = trains(slurm, 2, fixed, times=2)
    (shared / "file").touch()
    slurm.ends(slurm.sbatch("--nodes=1", "--wrap", "true"))
    slurm.wait("the epilog has run", lambda: not [*shared.iterdir()])
    os.kill(worker_of(agents["n1"]), signal.SIGKILL)
    assert trains(slurm, 2, fixed, times=4) == agents, "by the same agents"
    (tmp_path / "stop").touch()
    slurm.ends(job)
