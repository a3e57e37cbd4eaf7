"""The example for GPUs, as a user starts it. tests/unit/test_examples.py runs it on the CPU."""

import math
import re

import pytest
import torch

from tests.support.job import ROOT, Job

PATIENCE = 300
SMALL = ("--images=12800", "--size=64", "--batch=32", "--loader-workers=2")

pytestmark = [pytest.mark.timeout(2 * PATIENCE), pytest.mark.nightly(part="gpu")]


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason=f"no GPU: torch {torch.__version__} finds none"
)
def test_resnet_in_mixed_precision(job: Job) -> None:
    script = (str(ROOT / "examples" / "resnet_synthetic.py"), *SMALL)
    n1 = job.start("n1", nnodes="1:1", nproc="gpu", script=script)
    job.exits(n1, 0, PATIENCE)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)  \d+ images/s", n1.output)]
    assert losses, n1.output
    assert all(map(math.isfinite, losses)), losses
