"""A rank that hangs in a framework's loop, which tells nothing of its steps, is found and named."""

import re
from typing import Any

import pytest

from tests.support import hangs
from tests.support.job import Agent, Job
from tests.support.venv import FRAMEWORKS, venv_or_skip

pytestmark = [
    pytest.mark.timeout(1800),  # the first time, pip has to download
    pytest.mark.nightly(part="frameworks"),
]

ACCELERATE = (
    hangs.SCRIPT
    + """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(Samples(), batch_size=2, num_workers=1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for number, batch in enumerate(loader, 1):
    optimizer.zero_grad()
    accelerator.backward(model(batch).sum())
    optimizer.step()
    if hang(number):
        break
"""
)
LIGHTNING = (
    hangs.SCRIPT
    + """
from lightning import LightningModule, Trainer

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def training_step(self, batch, index):
        return self.layer(batch).sum()

    def on_train_batch_end(self, outputs, batch, index):
        self.trainer.should_stop = hang(index + 1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

devices = int(os.environ["LOCAL_WORLD_SIZE"])
off = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer = Trainer(accelerator="cpu", strategy="ddp", devices=devices, max_epochs=1, **off)
trainer.fit(Model(), DataLoader(Samples(), batch_size=2, num_workers=1))
"""
)
TRANSFORMERS = (
    hangs.SCRIPT
    + """
from transformers import Trainer, TrainerCallback, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, x):
        return {"loss": self.layer(x).sum()}

class Hangs(TrainerCallback):
    def on_step_end(self, arguments, state, control, **_):
        control.should_training_stop = hang(state.global_step)

def collate(rows):
    return {"x": torch.stack(rows)}

off = dict(save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True)
arguments = TrainingArguments("out", use_cpu=True, dataloader_num_workers=1, **off)
given = dict(train_dataset=Samples(), data_collator=collate, callbacks=[Hangs()])
Trainer(Model(), arguments, **given).train()
"""
)

EACH = pytest.mark.parametrize(
    "text",
    [ACCELERATE, LIGHTNING, TRANSFORMERS],
    ids=["accelerate", "lightning", "transformers"],
)


def start(job: Job, text: str, worlds: int, **flags: Any) -> Agent:
    return job.start(
        "n1",
        nnodes="1:1",
        nproc=2,
        script=hangs.script(job, text),
        python=venv_or_skip("frameworks", *FRAMEWORKS),
        env={"WORLDS": str(worlds)},
        lease_ttl=20,  # the machine may be busy
        hang_timeout=8,
        max_restarts=worlds,
        **flags,
    )


@EACH
def test_each_hang_is_told_with_where_it_stands(job: Job, text: str) -> None:
    hangs.names_each(job, start(job, text, 0))


@EACH
def test_a_rank_that_hangs_is_named_and_its_world_begun_anew(job: Job, text: str) -> None:
    n1 = start(job, text, 1, hang_action="restart")
    job.exits(n1, 0, 600)
    line = r"rank 1 on n1 is in step 6 for \d+ s, 1 other waits in 6 \(train.py:\d+ in sleeps\)"
    assert re.search(rf"warning: {line}\n", n1.output)
    assert re.search(rf"generation 2 \({line}\): ", n1.output)
