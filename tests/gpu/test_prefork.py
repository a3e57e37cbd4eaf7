"""Workers that are forked from a process with torch in it: CUDA begins in them, and not before."""

import signal
from pathlib import Path

import pytest

from tests.support.job import FORKSERVER, Job
from tests.support.places import Place, devices
from tests.support.processes import send

PATIENCE = 120

pytestmark = [pytest.mark.timeout(3 * PATIENCE), pytest.mark.nightly(part="gpu")]

PROBE = """
import os, sys, time
import torch

begun = torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork()
x = torch.full((64, 64), 2.0, device=sys.argv[1], requires_grad=True)
(x @ x).sum().backward()
right = bool((x.grad == 256).all())
print("probe:", os.environ["ELASTIC_ETCD_GENERATION"], os.getpid(), begun, right, flush=True)
while not os.path.exists("stop"):
    time.sleep(0.05)
"""
RIGHT = ("False", "True")  # not begun before, and computed


def probes(job: Job, after: int = 0) -> tuple[int, dict[int, tuple[str, ...]]]:
    """What both workers of a later generation have said: which, and their words by pid."""
    (agent,) = job.agents

    def said() -> tuple[int, dict[int, tuple[str, ...]]] | None:
        lines = [line.partition("probe: ")[2].split() for line in agent.output.splitlines()]
        for generation in sorted({int(words[0]) for words in lines if words}):
            found = {int(w[1]): tuple(w[2:]) for w in lines if w and int(w[0]) == generation}
            if generation > after and len(found) == 2:
                return generation, found
        return None

    return job.wait(f"two workers after generation {after}", said, PATIENCE)


def uses_a_gpu(pid: int) -> bool:
    """Whether the process has begun with CUDA: the driver opens this for each that does."""
    links = Path(f"/proc/{pid}/fd").iterdir()
    return Path("/dev/nvidia-uvm") in [link.readlink() for link in links]


@pytest.mark.parametrize("place", devices())
def test_cuda_begins_in_the_workers(job: Job, place: Place) -> None:
    script = job.directory / "probe.py"
    script.write_text(PROBE)
    n1 = job.start("n1", nnodes="1:1", nproc=2, script=(str(script), place.device))
    g, first = probes(job)
    assert {*first.values()} == {RIGHT}
    send(signal.SIGKILL, list(first)[:1])
    g, again = probes(job, after=g)
    assert not first.keys() & again.keys()
    assert {*again.values()} == {RIGHT}
    others = [pid for pid in n1.programs(FORKSERVER) if pid not in again]
    assert others, "there is no fork server"
    assert not any(map(uses_a_gpu, others))
    job.finish(n1, seconds=PATIENCE)
