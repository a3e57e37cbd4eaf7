"""Jobs whose nodes share the GPUs of one machine: whatever happens to a peer, who survives keeps
its process, its CUDA context and its memory.
"""

import json
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_etcd.train.abort import uses_nccl
from tests.support import savers
from tests.support.invariants import Event, each_sample_once
from tests.support.job import DEVICE, ROOT, TRAINERS, Agent, Job
from tests.support.places import BOTH, Place, first_gpu, nccl_beside_gloo, places
from tests.support.processes import send

RIGHT = ("nanogpt", "gan", "unfreeze", "swa", "lora", "muon", "detr", "yolo", "reinforce", "warmup")
PATIENCE = 120  # seconds; a first import of torch with CUDA takes long

pytestmark = [pytest.mark.timeout(5 * PATIENCE), pytest.mark.nightly(part="gpu")]


def start(job: Job, node: str, place: Place, *arguments: str, **flags: Any) -> Agent:
    backend = () if place.backend == BOTH else ("--backend", place.backend)
    on = ("--dir", str(job.directory), "--device", place.device, *backend)
    env = place.env | flags.pop("env", {})
    return job.start(node, script=(DEVICE, *on, *arguments), env=env, **flags)


def trains(job: Job, world: int, after: int = 0) -> int:
    return job.trains(world, after=after, seconds=PATIENCE)


def started(job: Job, generation: int) -> list[Event]:
    """The starts of its workers, in rank order."""
    found = [e for e in job.events("start") if e.generation == generation]
    return sorted(found, key=lambda e: e.rank)


def lives_on(job: Job, worker: Event, generation: int) -> None:
    """Its process is in that generation, with the same memory and context on the device."""
    pids = [e.pid for e in started(job, generation)]
    assert worker.pid in pids, f"{worker.pid} was started anew: {pids}\n{job.account()}"
    path = job.directory / f"{worker.node}.{worker.pid}.device"
    lines = {line["generation"]: line for line in map(json.loads, path.read_text().splitlines())}
    before, now = (lines[g] | {"generation": 0} for g in (worker.generation, generation))
    assert now == before


def finish(job: Job, *agents: Agent) -> None:
    job.finish(*agents, seconds=PATIENCE)
    each_sample_once(job.directory)


@pytest.mark.parametrize("place", places(ranks=2))
def test_a_killed_peer(job: Job, place: Place) -> None:
    n1, n2 = (start(job, node, place) for node in ("n1", "n2"))
    g = trains(job, 2)
    before = job.begun(g)
    send(signal.SIGKILL, [before["n2"].pid])
    g = trains(job, 2, after=g)
    lives_on(job, before["n1"], g)
    assert job.begun(g)["n2"].pid != before["n2"].pid
    finish(job, n1, n2)


@pytest.mark.parametrize("place", places(ranks=2))
def test_a_peer_that_is_stopped_joins_again_and_leaves(job: Job, place: Place) -> None:
    n1, n2 = (start(job, node, place, join_settle=0) for node in ("n1", "n2"))
    g = trains(job, 2)
    survivor = job.begun(g)["n1"]
    n2.freeze()
    g = trains(job, 1, after=g)
    lives_on(job, survivor, g)
    n2.thaw()
    g = trains(job, 2, after=g)
    lives_on(job, survivor, g)
    n2.terminate()
    job.exits(n2, 143, PATIENCE)
    g = trains(job, 1, after=g)
    lives_on(job, survivor, g)
    finish(job, n1)


@pytest.mark.parametrize("place", places(ranks=4, one_gpu=True))
def test_four_workers_on_one_gpu(job: Job, place: Place) -> None:
    n1 = start(job, "n1", place, nnodes="1:1", nproc=4, env=first_gpu())
    g = trains(job, 4)
    killed, *others = started(job, g)
    send(signal.SIGKILL, [killed.pid])
    g = trains(job, 4, after=g)
    for worker in others:
        lives_on(job, worker, g)
    finish(job, n1)


@pytest.mark.parametrize("place", places(ranks=2))
def test_a_rank_that_hangs_is_named_and_who_waits_for_it_lives_on(job: Job, place: Place) -> None:
    flags = {"log_dir": str(job.directory), "hang_timeout": 3}
    n1 = start(job, "n1", place, "--stuck", "5", nnodes="1:1", nproc=2, **flags)
    (stuck,) = job.wait("rank 1 hangs", lambda: job.events("stuck"), PATIENCE)
    waits, hangs = started(job, stuck.generation)
    for rank in (0, 1):
        job.said(n1, f"rank {rank} is in step 6 for ", PATIENCE)
        job.said(n1, f"rank {rank}: where it stands is in ", PATIENCE)
    (path,) = re.findall(r"rank 1: where it stands is in (\S+/hang.txt)", n1.output)
    assert "in happen" in Path(path).read_text()
    send(signal.SIGKILL, [hangs.pid])
    g = trains(job, 2, after=stuck.generation)
    lives_on(job, waits, g)
    finish(job, n1)


def test_as_many_workers_as_gpus(job: Job) -> None:
    gpus = torch.cuda.device_count()
    place = Place("cuda", BOTH if uses_nccl() else "gloo")
    n1 = start(job, "n1", place, nnodes="1:1", nproc="gpu")
    if gpus == 0:
        job.abandoned = True
        job.exits(n1, 2)
        assert "--nproc-per-node gpu: no GPU found on this machine" in n1.output
        return
    trains(job, gpus)
    devices = [json.loads(p.read_text())["device"] for p in job.directory.glob("*.device")]
    assert sorted(devices) == [f"cuda:{number}" for number in range(gpus)]
    finish(job, n1)


def test_t6_trainings_that_are_right_raise_no_alarm(job: Job) -> None:
    """Two replicas on one GPU, which are compared at each commit."""
    place = nccl_beside_gloo(2, one_gpu=True)
    env = place.env | {"DEVICE": "cuda", "STEPS": "200"}
    script = (str(ROOT / "tests" / "users" / "habits.py"), f"--output={job.directory}", *RIGHT)
    agents = [
        job.start(node, nnodes="2", script=script, env=env, compare_every=1)
        for node in ("n1", "n2")
    ]
    for agent in agents:
        job.exits(agent, 0, 4 * PATIENCE)
        assert "replicas differ" not in agent.output
    lines = (job.directory / "curve.csv").read_text().splitlines()
    assert Counter(line.partition(",")[0] for line in lines) == dict.fromkeys(RIGHT, 200)


def test_nccl_s_record_of_a_hang_is_kept(job: Job) -> None:
    """In a plain script, as docs/contributing/hangs.md turns it on."""
    place = nccl_beside_gloo(2, one_gpu=True)
    env = place.env | {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{job.directory}/pipe-",
        "TORCH_FR_DUMP_TEMP_FILE": f"{job.directory}/trace-",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{job.directory}/trace-",
    }
    flags: dict[str, Any] = {"program": TRAINERS / "sharded_saver.py", "nnodes": "2", "env": env}
    flags |= {"log_dir": str(job.directory / "logs"), "hang_timeout": 5}
    n1, n2 = (savers.start(job, node, **flags) for node in ("n1", "n2"))
    g, _, pids = savers.begun(job, 2)
    savers.saved(job, g, more=2)
    send(signal.SIGSTOP, [pids[1]])
    job.said(n1, "rank 0: NCCL's flight recorder is in ", PATIENCE)
    (path,) = re.findall(r"rank 0: NCCL's flight recorder is in (\S+/nccl_trace)", n1.output)
    assert b"nccl:" in Path(path).read_bytes()
    job.abandoned = True
    for agent in (n1, n2):
        agent.node_kill()
