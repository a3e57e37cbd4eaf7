"""A convolutional network that goes on in process (ee.run): mixed precision, EMA, OneCycleLR.

python images.py --output runs/1
python -m elastic_etcd.launch --nnodes 2 images.py --output runs/1
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset
from torch.utils.tensorboard import SummaryWriter

import elastic_etcd as ee

CLASSES = 10


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="of each worker")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--amp", choices=["off", "bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--commit-every", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2, help="of the data loader")
    parser.add_argument("--samples", type=int, default=1600)
    parser.add_argument("--read-seconds", type=float, default=0.0, help="of one image, at least")
    return parser.parse_args()


class Images(Dataset[dict[str, Tensor]]):
    """Noisy pictures of ten prototypes."""

    def __init__(self, samples: int, seed: int, read_seconds: float) -> None:
        prototypes = torch.randn(CLASSES, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(CLASSES, (samples,), generator=generator)
        noise = torch.randn(samples, 1, 8, 8, generator=generator)
        self.images = prototypes[self.labels] + 2 * noise
        self.read_seconds = read_seconds

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        time.sleep(self.read_seconds)
        return {"image": self.images[index], "label": self.labels[index]}


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader[dict[str, Tensor]]) -> float:
    model.eval()
    right = torch.tensor(0)
    for batch in loader:
        right += (model(batch["image"]).argmax(1) == batch["label"]).sum()
    model.train()
    return right.item() / len(loader.dataset)


@ee.run
def train(state: ee.ElasticState, args: argparse.Namespace, data: Images, test: Images) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {world}: pid {os.getpid()}", flush=True)
    ddp = DistributedDataParallel(state.model)
    loader = DataLoader(
        data, args.batch_size, sampler=state.sampler, num_workers=args.workers, drop_last=True
    )
    test_loader = DataLoader(test, 64)
    precision = getattr(torch, args.amp) if args.amp != "off" else torch.float32
    writer = (
        SummaryWriter(args.output / "tensorboard", purge_step=state.step) if rank == 0 else None
    )
    while state.epoch < args.epochs:
        state.sampler.set_epoch(state.epoch)
        for batch in state.steps(loader, commit_every=args.commit_every):
            state.optimizer.zero_grad()
            with torch.autocast("cpu", precision, enabled=args.amp != "off"):
                loss = cross_entropy(ddp(batch["image"]), batch["label"])
            state.scaler.scale(loss).backward()
            state.scaler.step(state.optimizer)
            state.scaler.update()
            state.scheduler.step()
            state.ema.update_parameters(state.model)
            state.step += 1

            mean = loss.detach().float()
            dist.all_reduce(mean)
            mean /= world
            if writer:
                lr = state.scheduler.get_last_lr()[0]
                writer.add_scalar("train/loss", mean, state.step)
                writer.add_scalar("train/lr", lr, state.step)
                log(args.output, state.step, mean.item(), lr, world)
        if writer:
            right = accuracy(state.ema, test_loader)
            writer.add_scalar("test/accuracy", right, state.step)
            state.best = max(state.best, right)
        state.epoch += 1
        state.commit()
        state.save(args.output / "last.safetensors")
    if writer:
        writer.close()


def log(folder: Path, step: int, loss: float, lr: float, world: int) -> None:
    with (folder / "curve.csv").open("a") as file:
        file.write(f"{step},{loss!r},{lr!r},{world}\n")


def main() -> None:
    args = parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    data = Images(args.samples, 1, args.read_seconds)
    test = Images(256, 2, 0)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    steps = args.samples // (args.batch_size * world)
    state = ee.ElasticState(
        model=model,
        ema=AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=True),
        optimizer=optimizer,
        scheduler=OneCycleLR(optimizer, args.lr, total_steps=args.epochs * steps),
        scaler=torch.amp.GradScaler("cpu", enabled=args.amp == "float16"),
        sampler=ee.ElasticSampler(data, seed=0),
        epoch=0,
        step=0,
        best=0.0,
    )
    if (args.output / "last.safetensors").exists():
        state.load(args.output / "last.safetensors")
    train(state, args, data, test)
    if int(os.environ.get("RANK", "0")) == 0:
        exported = torch.export.export(state.ema.module.eval(), (torch.zeros(2, 1, 8, 8),))
        torch.export.save(exported, args.output / "model.pt2")
        print("best accuracy", state.best)


if __name__ == "__main__":
    main()
