"""A classifier with Lightning: bfloat16, accumulated gradients, EMA, OneCycleLR, TensorBoard.

torchrun --nproc-per-node 2 with_lightning.py --output runs/1
python -m elastic_etcd.launch --nnodes 2 with_lightning.py --output runs/1
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset

import elastic_etcd as ee

FEATURES, CLASSES = 16, 4


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8, help="of each worker")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--save-every", type=int, default=10, help="steps, in memory")
    parser.add_argument("--disk-every", type=int, default=40, help="steps, on the disk")
    parser.add_argument("--workers", type=int, default=2, help="of the data loader")
    parser.add_argument("--samples", type=int, default=1600)
    parser.add_argument("--read-seconds", type=float, default=0.0, help="of one row, at least")
    return parser.parse_args()


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, samples: int, seed: int, read_seconds: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.features = torch.randn(samples, FEATURES, generator=generator)
        self.labels = self.features.view(samples, CLASSES, -1).sum(2).argmax(1)
        self.read_seconds = read_seconds

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        time.sleep(self.read_seconds)
        return {"features": self.features[index], "label": self.labels[index]}


class Classifier(LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, CLASSES)
        )

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        loss = cross_entropy(self.layers(batch["features"]), batch["label"])
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
        right = self.layers(batch["features"]).argmax(1) == batch["label"]
        self.log("test/accuracy", right.float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = OneCycleLR(optimizer, self.lr, total_steps=total)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class EachNode(DDPStrategy):
    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        if self.local_rank == 0:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options)


class InMemory(Callback):
    def __init__(self, args: argparse.Namespace) -> None:
        self.disk, self.every, self.disk_every = (
            args.output / "checkpoints",
            args.save_every,
            args.disk_every,
        )

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        with ee.memory_checkpoint(
            trainer.global_step, every=self.every, disk=self.disk, disk_every=self.disk_every
        ) as folder:
            if folder:
                trainer.save_checkpoint(folder / "last.ckpt", weights_only=False)


class Curve(Callback):
    """The loss of each step in a file."""

    def __init__(self, folder: Path, accumulate: int) -> None:
        self.folder, self.accumulate = folder, accumulate
        self.losses: list[Tensor] = []

    def on_train_batch_end(
        self, trainer: Trainer, _: LightningModule, outputs: Any, *__: Any
    ) -> None:
        self.losses.append(outputs["loss"].detach())
        if len(self.losses) < self.accumulate:
            return
        mean = trainer.strategy.reduce(torch.stack(self.losses).mean(), reduce_op="mean")
        self.losses = []
        if trainer.is_global_zero:
            lr = trainer.optimizers[0].param_groups[0]["lr"]
            with (self.folder / "curve.csv").open("a") as file:
                file.write(f"{trainer.global_step},{mean.item()!r},{lr!r},{trainer.world_size}\n")


def main() -> None:
    args = parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    seed_everything(0)
    trainer = Trainer(
        accelerator="cpu",
        strategy=EachNode(),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        precision=args.precision,
        max_epochs=args.epochs,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=1.0,
        logger=TensorBoardLogger(args.output, "tensorboard", version=0),
        log_every_n_steps=1,
        callbacks=[
            Curve(args.output, args.accumulate),
            EMAWeightAveraging(decay=0.98),
            InMemory(args),
        ],
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    data = Rows(args.samples, 1, args.read_seconds)
    loader = DataLoader(
        data, args.batch_size, shuffle=True, num_workers=args.workers, drop_last=True
    )
    test_loader = DataLoader(Rows(256, 2), 64)
    print(f"rank {trainer.global_rank} of {trainer.world_size}: pid {os.getpid()}", flush=True)
    model = Classifier(args.lr)
    path = ee.latest_checkpoint(disk=args.output / "checkpoints")
    last = path and path / "last.ckpt"
    trainer.fit(model, loader, test_loader, ckpt_path=last, weights_only=False)
    if trainer.is_global_zero:
        torch.save(model.state_dict(), args.output / "model.pt")
        print("accuracy", trainer.callback_metrics["test/accuracy"].item())


if __name__ == "__main__":
    main()
