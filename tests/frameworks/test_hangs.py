"""A rank that hangs in a framework's loop, which tells nothing of its steps, is found and named."""

import re
import textwrap

import pytest

from tests.support.job import Job
from tests.support.venv import FRAMEWORKS, venv_or_skip

pytestmark = pytest.mark.timeout(1800)  # the first time, pip has to download

BEGIN = """
import os, time
import torch
from torch.utils.data import DataLoader

def sleeps():
    if int(os.environ["RANK"]) == 1 and not os.path.exists("hung"):
        open("hung", "w").close()
        time.sleep(1000)
"""
ACCELERATE = """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(torch.ones(80, 2), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, batch in enumerate(loader, 1):
    optimizer.zero_grad()
    accelerator.backward(model(batch).sum())
    optimizer.step()
    if step == 5:
        sleeps()
"""
LIGHTNING = """
from lightning import LightningModule, Trainer

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def training_step(self, batch, index):
        if index == 5:
            sleeps()
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

devices = int(os.environ["LOCAL_WORLD_SIZE"])
off = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer = Trainer(accelerator="cpu", strategy="ddp", devices=devices, max_epochs=1, **off)
trainer.fit(Model(), DataLoader(torch.ones(80, 2), batch_size=2))
"""


@pytest.mark.parametrize("text", [ACCELERATE, LIGHTNING], ids=["accelerate", "lightning"])
def test_a_rank_that_hangs_is_named_and_its_world_begun_anew(job: Job, text: str) -> None:
    script = job.directory / "train.py"
    script.write_text(textwrap.dedent(BEGIN + text))
    n1 = job.start(
        "n1",
        nnodes="1:1",
        nproc=2,
        script=(str(script),),
        python=venv_or_skip("frameworks", *FRAMEWORKS),
        lease_ttl=20,  # the machine may be busy
        hang_timeout=8,
        hang_action="restart",
    )
    job.exits(n1, 0, 600)
    line = r"rank 1 on n1 is in step 6 for \d+ s, 1 other waits in 6 \(train.py:\d+ in sleeps\)"
    assert re.search(rf"warning: {line}\n", n1.output)
    assert re.search(rf"generation 2 \({line}\): ", n1.output)
