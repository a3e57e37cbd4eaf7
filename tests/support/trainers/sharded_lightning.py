"""A plain script of Lightning's ModelParallelStrategy, kept in memory as docs/memory.md has it."""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import elastic_etcd as ee
from tests.support.trainers.saver import say


class Sharded(LightningModule):  # type: ignore[misc]  # Lightning is not followed
    def configure_model(self) -> None:
        if hasattr(self, "layers"):
            return
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
        fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class EachNode(ModelParallelStrategy):  # type: ignore[misc]
    def broadcast(self, obj: Any, src: int = 0) -> Any:  # each node has a folder of its own
        return obj if isinstance(obj, Path) else super().broadcast(obj, src)


class InMemory(Callback):  # type: ignore[misc]
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        say("begins", trainer.global_step, os.getpid())

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        with ee.memory_checkpoint(trainer.global_step, every=5, sharded=True) as folder:
            if folder:  # on every rank
                trainer.save_checkpoint(folder / "last.ckpt", weights_only=False)
        if folder:
            say("saved", trainer.global_step)
        time.sleep(0.02)
        stop = torch.tensor(float((self.directory / "stop").exists()), device="cuda")
        dist.all_reduce(stop, dist.ReduceOp.MAX)
        trainer.should_stop = bool(stop)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    world = int(os.environ["GROUP_WORLD_SIZE"])
    trainer = Trainer(
        strategy=EachNode(data_parallel_size=world, tensor_parallel_size=1),
        num_nodes=world,
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_epochs=-1,
        callbacks=[InMemory(args.dir)],
        enable_checkpointing=False,
        logger=False,
        enable_progress_bar=False,
    )
    loader = DataLoader(torch.randn(10_000, 5), 4)
    path = ee.latest_checkpoint()
    trainer.fit(Sharded(), loader, ckpt_path=path and path / "last.ckpt", weights_only=False)


if __name__ == "__main__":
    main()
