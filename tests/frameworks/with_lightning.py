"""docs/memory.md's recipe for Lightning, in a script that tells the test what it does."""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

import elastic_etcd as ee
from tests.support.trainers.saver import say


class Model(LightningModule):
    """Its weights say how many steps they have been through."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 1, bias=False)
        torch.nn.init.zeros_(self.linear.weight)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        time.sleep(0.02)
        return -self.linear(torch.ones_like(batch)).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class EachNode(DDPStrategy):
    """Saves on each node, and not only on the first."""

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        if self.local_rank == 0:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options)


class InMemory(Callback):
    """Saves every few steps."""

    def on_train_batch_end(self, trainer: Any, model: Any, *_: Any) -> None:
        with ee.memory_checkpoint(trainer.global_step, every=5) as folder:
            if folder:
                trainer.save_checkpoint(folder / "last.ckpt", weights_only=False)
        if folder:
            say("saved", trainer.global_step)
        assert (model.linear.weight == trainer.global_step).all()


class Told(Callback):
    """For the test: where it begins, and the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Any, model: Any) -> None:
        del model
        say("begins", trainer.global_step, os.getpid())

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        stop = torch.tensor(float((self.folder / "stop").exists()))
        trainer.should_stop = bool(trainer.strategy.reduce(stop, reduce_op="sum"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    args = parser.parse_args()
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy=EachNode(),
        callbacks=[InMemory(), Told(args.dir)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
        max_steps=100_000,
        min_epochs=0,
    )
    path = ee.latest_checkpoint()
    data = DataLoader(torch.ones(1000, 4), batch_size=1)
    trainer.fit(Model(), data, ckpt_path=path and path / "last.ckpt", weights_only=False)


if __name__ == "__main__":
    main()
