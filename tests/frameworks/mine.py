"""What the recipes of docs/frameworks.md call the user's own: a model that counts, and data.

Data are read slowly until a file `fast` is there, and each process reads more and more slowly, so
that a run outlasts its faults.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

STEPS, EPOCHS = 400, 4


class Data(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return 200

    def __getitem__(self, _: int) -> dict[str, Tensor]:
        self.read += 1
        time.sleep(0 if Path("fast").exists() else 0.05 if self.read < 50 else 0.5)
        return {"x": torch.ones(4)}


class Model(nn.Module):
    """Its state says how many steps it has been through."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: Tensor, **_: object) -> dict[str, Tensor]:
        if self.training:
            self.steps += 1
            world = "generation {ELASTIC_ETCD_GENERATION} rank {RANK} of {WORLD_SIZE}"
            print(f"step {self.steps}: {world.format(**os.environ)} pid {os.getpid()}", flush=True)
        return {"loss": self.linear(x).square().mean()}


data = Data()
loader = DataLoader(data, batch_size=1, shuffle=True)
model = Model()
optimizer = torch.optim.AdamW(model.parameters())

if "lightning" in sys.modules:
    from lightning import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"folder": Path("data")})
            self.model = model

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            loss: Tensor = self.model(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer
