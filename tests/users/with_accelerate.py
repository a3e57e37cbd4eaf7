"""A classifier with accelerate: bfloat16, accumulated gradients, EMA, trackers.

accelerate launch with_accelerate.py --output runs/1
python -m elastic_etcd.launch --nnodes 2 with_accelerate.py --output runs/1
"""

import argparse
import os
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
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
    parser.add_argument("--mixed-precision", choices=["no", "bf16"], default="bf16")
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


class Progress:
    """The step, as accelerate wants it for its checkpoints."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, saved: dict[str, int]) -> None:
        self.step = saved["step"]


def log(folder: Path, step: int, loss: float, lr: float, world: int) -> None:
    with (folder / "curve.csv").open("a") as file:
        file.write(f"{step},{loss!r},{lr!r},{world}\n")


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, CLASSES)
    )


def loaders(args: argparse.Namespace) -> tuple[DataLoader[dict[str, Tensor]], ...]:
    data = Rows(args.samples, 1, args.read_seconds)
    workers = {"num_workers": args.workers, "drop_last": True}
    return DataLoader(data, args.batch_size, shuffle=True, **workers), DataLoader(Rows(256, 2), 64)


def main() -> None:  # noqa: PLR0915 - as long as users write it
    args = parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    set_seed(0)
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.accumulate,
        log_with="tensorboard",
        project_config=ProjectConfiguration(str(args.output), save_on_each_node=True),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    rank, world = accelerator.process_index, accelerator.num_processes
    print(f"rank {rank} of {world}: pid {os.getpid()}", flush=True)
    model = network()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98), use_buffers=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loader, test_loader = loaders(args)
    batches = args.samples // args.batch_size
    scheduler = CosineAnnealingLR(optimizer, args.epochs * batches // args.accumulate)
    model, optimizer, loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, loader, test_loader, scheduler
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress, ema)
    accelerator.init_trackers("tensorboard")

    disk = args.output / "checkpoints"
    if path := ee.latest_checkpoint(disk=disk):
        accelerator.load_state(path)
    per_epoch = len(loader) // args.accumulate
    first, begun = divmod(progress.step, per_epoch)
    for epoch in range(first, args.epochs):
        loader.set_epoch(epoch)
        rest = accelerator.skip_first_batches(loader, begun * args.accumulate) if begun else loader
        begun = 0
        losses: list[Tensor] = []
        for batch in rest:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(batch["features"]), batch["label"])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            if not accelerator.sync_gradients:
                continue
            ema.update_parameters(accelerator.unwrap_model(model))
            progress.step += 1
            mean = accelerator.reduce(torch.stack(losses).mean(), "mean").item()
            losses = []
            lr = scheduler.get_last_lr()[0]
            accelerator.log({"train/loss": mean, "train/lr": lr}, step=progress.step)
            if accelerator.is_main_process:
                log(args.output, progress.step, mean, lr, world)
            with ee.memory_checkpoint(
                progress.step, every=args.save_every, disk=disk, disk_every=args.disk_every
            ) as folder:
                if folder:
                    accelerator.save_state(folder)
        right = evaluate(accelerator, ema, test_loader)
        accelerator.log({"test/accuracy": right}, step=progress.step)
    if accelerator.is_main_process:
        torch.save(ema.module.state_dict(), args.output / "model.pt")
        print("accuracy", right)
    accelerator.end_training()


@torch.no_grad()
def evaluate(
    accelerator: Accelerator, ema: nn.Module, loader: DataLoader[dict[str, Tensor]]
) -> float:
    ema.eval()
    right = []
    for batch in loader:
        hits = ema(batch["features"]).argmax(1) == batch["label"]
        right.append(accelerator.gather_for_metrics(hits))
    ema.train()
    return torch.cat(right).float().mean().item()


if __name__ == "__main__":
    main()
