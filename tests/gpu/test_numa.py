"""Workers that run on the CPUs near their GPUs only."""

import os

import pytest
import torch
from torch.numa.binding import AffinityMode, NumaOptions, _get_logical_cpus_to_bind_to

from tests.support.job import Job

PATIENCE = 120

pytestmark = [pytest.mark.timeout(3 * PATIENCE), pytest.mark.nightly(part="gpu")]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds CPUs by the GPU's bus")
@pytest.mark.parametrize("method", ["prefork", "exec"])
def test_f11_a_worker_runs_on_the_cpus_near_its_gpu(job: Job, method: str) -> None:
    script = job.directory / "cpus.py"
    script.write_text("import os; print('cpus:', *sorted(os.sched_getaffinity(0)), flush=True)\n")
    agent = job.start(
        "n1", nnodes="1:1", script=(str(script),), numa_binding="node", start_method=method
    )
    job.exits(agent, 0, PATIENCE)
    near = _get_logical_cpus_to_bind_to(
        gpu_index=0, numa_options=NumaOptions(affinity_mode=AffinityMode.NODE)
    )
    assert near <= os.sched_getaffinity(0)
    assert "cpus: " + " ".join(map(str, sorted(near))) in agent.output
