"""A GPU's memory that another process holds when a worker begins, as the driver tells it."""

import os
import subprocess
import sys

import pytest
import torch

from tests.support.job import Job
from tests.support.places import first_gpu

PATIENCE = 120

pytestmark = [
    pytest.mark.timeout(5 * PATIENCE),
    pytest.mark.nightly(part="gpu"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="it is a GPU's memory"),
]
TAKES = """
import sys
import torch

size = int(0.6 * torch.cuda.mem_get_info()[1])
block = torch.empty(size, dtype=torch.uint8, device="cuda")
print("has its memory", flush=True)
"""


def test_a_start_without_memory_names_who_has_it_and_the_next_one_waits(job: Job) -> None:
    script = job.directory / "takes.py"
    script.write_text(TAKES)
    holds = [sys.executable, "-c", TAKES + "sys.stdin.read()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(
        holds, env=os.environ | first_gpu(), start_new_session=True, **pipes
    ) as other:  # type: ignore[call-overload]
        assert other.stdout.readline() == b"has its memory\n"
        n1 = job.start("n1", nnodes="1", script=(str(script),), env=first_gpu(), max_restarts=1)
        job.said(n1, "waiting for memory of a GPU for ", PATIENCE)
        assert f"out of memory: pid {other.pid} (" in n1.output
    job.exits(n1, 0, PATIENCE)
    assert "has its memory" in n1.output
