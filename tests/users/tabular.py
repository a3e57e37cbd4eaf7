"""A plain DDP script that is restarted at each change of the world and has checkpoints in memory.

torchrun --nproc-per-node 2 tabular.py --output runs/1
python -m elastic_etcd.launch --nnodes 2 tabular.py --output runs/1
"""

import argparse
import copy
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler
from torch.utils.tensorboard import SummaryWriter

import elastic_etcd as ee

FEATURES = 16


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8, help="of each worker")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--amp", choices=["off", "bfloat16", "float16"], default="float16")
    parser.add_argument("--save-every", type=int, default=10, help="steps, in memory")
    parser.add_argument("--disk-every", type=int, default=40, help="steps, on the disk")
    parser.add_argument("--workers", type=int, default=2, help="of the data loader")
    parser.add_argument("--samples", type=int, default=1600)
    parser.add_argument("--read-seconds", type=float, default=0.0, help="of one row, at least")
    return parser.parse_args()


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, samples: int, seed: int, read_seconds: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.features = torch.randn(samples, FEATURES, generator=generator)
        weights = torch.linspace(-1, 1, FEATURES)
        self.targets = (self.features * weights).sum(1).sin()
        self.read_seconds = read_seconds

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        time.sleep(self.read_seconds)
        return {"features": self.features[index], "target": self.targets[index]}


class Rest(Sampler[int]):
    """What of another sampler comes after its first samples."""

    def __init__(self, sampler: Sampler[int], skipped: int) -> None:
        self.sampler, self.skipped = sampler, skipped

    def __iter__(self) -> Any:
        return iter(list(self.sampler)[self.skipped :])

    def __len__(self) -> int:
        return len(self.sampler) - self.skipped


class Training:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        torch.manual_seed(0)
        self.data = Rows(args.samples, 1, args.read_seconds)
        self.test = Rows(256, 2, 0.0)
        self.model = nn.Sequential(
            nn.Linear(FEATURES, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1)
        )
        self.ema = copy.deepcopy(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        samples = args.batch_size * args.accumulate * dist.get_world_size()
        self.steps_per_epoch = args.samples // samples
        total = args.epochs * self.steps_per_epoch
        self.scheduler = OneCycleLR(self.optimizer, args.lr, total_steps=total)
        self.scaler = torch.amp.GradScaler("cpu", enabled=args.amp == "float16")
        self.step = 0

    def parts(self) -> dict[str, Any]:
        return {
            name: getattr(self, name)
            for name in ("model", "ema", "optimizer", "scheduler", "scaler")
        }

    def save(self, folder: Path) -> None:
        saved = {name: part.state_dict() for name, part in self.parts().items()}
        torch.save(saved | {"step": self.step}, folder / "state.pt")

    def load(self, folder: Path) -> None:
        saved = torch.load(folder / "state.pt")
        for name, part in self.parts().items():
            part.load_state_dict(saved[name])
        self.step = saved["step"]

    def batches(self, epoch: int, begun: int) -> DataLoader[dict[str, Tensor]]:
        """Those of an epoch after so many steps."""
        sampler: DistributedSampler[dict[str, Tensor]] = DistributedSampler(self.data, seed=0)
        sampler.set_epoch(epoch)
        size = self.args.batch_size
        rest = Rest(sampler, begun * size * self.args.accumulate)
        return DataLoader(
            self.data, size, sampler=rest, num_workers=self.args.workers, drop_last=True
        )

    def backward(self, ddp: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        precision = getattr(torch, self.args.amp) if self.args.amp != "off" else torch.float32
        with torch.autocast("cpu", precision, enabled=self.args.amp != "off"):
            output = ddp(batch["features"]).squeeze(1).float()
            loss = mse_loss(output, batch["target"]) / self.args.accumulate
        self.scaler.scale(loss).backward()
        return loss.detach()

    def end_step(self) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()
        with torch.no_grad():
            for mean, value in zip(
                self.ema.state_dict().values(), self.model.state_dict().values(), strict=True
            ):
                mean.copy_(mean.lerp(value, 0.02) if mean.is_floating_point() else value)
        self.step += 1

    @torch.no_grad()
    def evaluate(self) -> float:
        self.ema.eval()
        return mse_loss(self.ema(self.test.features).squeeze(1), self.test.targets).item()


def log(folder: Path, step: int, loss: float, lr: float, world: int) -> None:
    with (folder / "curve.csv").open("a") as file:
        file.write(f"{step},{loss!r},{lr!r},{world}\n")


@record
def main() -> None:  # noqa: PLR0915 - as long as users write it
    args = parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {world}: pid {os.getpid()}", flush=True)
    training = Training(args)
    disk = args.output / "checkpoints"
    if path := ee.latest_checkpoint(disk=disk):
        training.load(path)
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))

    def checkpoint(every: int) -> None:
        with ee.memory_checkpoint(
            training.step, every=every, disk=disk, disk_every=args.disk_every
        ) as folder:
            if folder and os.environ["LOCAL_RANK"] == "0":
                training.save(folder)

    ddp = DistributedDataParallel(training.model)
    writer = SummaryWriter(args.output / "tb", purge_step=training.step) if rank == 0 else None
    while training.step < args.epochs * training.steps_per_epoch:
        epoch, begun = divmod(training.step, training.steps_per_epoch)
        losses: list[Tensor] = []
        for batch in training.batches(epoch, begun):
            last = len(losses) + 1 == args.accumulate
            if last:
                losses.append(training.backward(ddp, batch))
            else:
                with ddp.no_sync():
                    losses.append(training.backward(ddp, batch))
                continue
            training.end_step()
            mean = torch.stack(losses).sum()
            losses = []
            stop = torch.tensor(float(bool(told)))
            both = torch.stack([mean, stop])
            dist.all_reduce(both)
            mean, stop = both / world
            if writer:
                writer.add_scalar("train/loss", mean, training.step)
                lr = training.scheduler.get_last_lr()[0]
                log(args.output, training.step, mean.item(), lr, world)
            if stop:  # some rank was told, and each of them will be
                checkpoint(1)
                while not told:
                    time.sleep(0.1)
                sys.exit()
            checkpoint(args.save_every)
        if writer:
            writer.add_scalar("test/loss", training.evaluate(), training.step)
    if rank == 0:
        exported = torch.jit.trace(training.ema.eval(), torch.zeros(2, FEATURES))
        torch.jit.save(exported, args.output / "model.pt")
        print("test loss", training.evaluate())
    del ddp
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
