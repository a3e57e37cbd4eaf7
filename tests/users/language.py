"""A language model with the same global batch in every world (ee.run, ee.accumulation_steps).

python language.py --output runs/1
python -m elastic_etcd.launch --nnodes 1:4 language.py --output runs/1
"""

import argparse
import math
import os
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import elastic_etcd as ee

SYMBOLS, LENGTH, HELD_OUT = 32, 24, 64


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--commit-every", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2, help="of the data loader")
    parser.add_argument("--samples", type=int, default=1600)
    parser.add_argument("--read-seconds", type=float, default=0.0, help="of one text, at least")
    return parser.parse_args()


class Texts(Dataset[list[int]]):
    """Counting in steps of one to four, with mistakes, in lines of unlike lengths."""

    def __init__(self, samples: int, seed: int, read_seconds: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def line() -> list[int]:
            start, stride, length = torch.randint(1000, (3,), generator=generator).tolist()
            stride, length = stride % 4 + 1, length % (LENGTH - 8) + 8
            wrong = torch.rand(length, generator=generator) < 0.1
            return [(start + i * stride + int(wrong[i])) % SYMBOLS for i in range(length)]

        self.lines = [line() for _ in range(samples)]
        self.read_seconds = read_seconds

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> list[int]:
        time.sleep(self.read_seconds)
        return self.lines[index]


def collate(lines: list[list[int]]) -> dict[str, Tensor]:
    ids = torch.zeros(len(lines), LENGTH, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, line in enumerate(lines):
        ids[row, : len(line)] = torch.tensor(line)
        labels[row, : len(line) - 1] = torch.tensor(line[1:])
    return {"ids": ids, "labels": labels}


class Model(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, width)
        self.place = nn.Parameter(torch.zeros(LENGTH, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(width, SYMBOLS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place
        mask = torch.full((LENGTH, LENGTH), -math.inf).triu(1)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over lines of each line's mean, so that it is a mean over samples."""
    losses = cross_entropy(model(batch["ids"]).mT, batch["labels"], reduction="none")
    return (losses.sum(1) / (batch["labels"] >= 0).sum(1)).mean()


@torch.no_grad()
def perplexity(model: nn.Module, texts: Texts) -> float:
    model.eval()
    loss = loss_of(model, collate(texts.lines))
    model.train()
    return loss.exp().item()


@ee.run
def train(state: ee.ElasticState, args: argparse.Namespace, data: Texts, test: Texts) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {world}: pid {os.getpid()}", flush=True)
    ddp = DistributedDataParallel(state.model)
    plan = ee.accumulation_steps(args.global_batch, args.micro_batch)
    state.sampler.reshard(batch_sizes=plan.batch_sizes)
    loader = DataLoader(
        data,
        batch_sampler=plan.batches(state.sampler),
        num_workers=args.workers,
        collate_fn=collate,
    )
    writer = (
        SummaryWriter(args.output / "tensorboard", purge_step=state.step) if rank == 0 else None
    )
    while state.epoch < args.epochs:
        state.sampler.set_epoch(state.epoch)
        steps = state.steps(loader, accumulate=len(plan), commit_every=args.commit_every)
        total = torch.zeros(())
        for batch in tqdm(steps, f"epoch {state.epoch}", disable=rank > 0):
            with nullcontext() if steps.ends_step else ddp.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=args.bfloat16):
                    loss = loss_of(ddp, batch) * plan.weight(len(batch["ids"]))
                loss.backward()
            total += loss.detach()
            if not steps.ends_step:
                continue
            norm = nn.utils.clip_grad_norm_(state.model.parameters(), args.clip)
            state.optimizer.step()
            state.optimizer.zero_grad()
            state.scheduler.step()
            state.step += 1
            dist.all_reduce(total)
            total /= world
            if writer:
                writer.add_scalar("train/loss", total, state.step)
                writer.add_scalar("train/norm", norm, state.step)
                log(args.output, state.step, total.item(), state.scheduler.get_last_lr()[0], world)
            total.zero_()
        if writer:
            writer.add_scalar("test/perplexity", perplexity(state.model, test), state.step)
        state.epoch += 1
        state.commit()
        state.save(args.output / "last.safetensors", wait=False, keep=2)
    if rank == 0:
        torch.save(state.model.state_dict(), args.output / "model.pt")
        print("perplexity", perplexity(state.model, test))


def log(folder: Path, step: int, loss: float, lr: float, world: int) -> None:
    with (folder / "curve.csv").open("a") as file:
        file.write(f"{step},{loss!r},{lr!r},{world}\n")


def main() -> None:
    args = parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    total = args.epochs * (args.samples // args.global_batch)

    def factor(step: int) -> float:
        if step < args.warmup:
            return (step + 1) / args.warmup
        return 0.5 * (1 + math.cos(math.pi * (step - args.warmup) / (total - args.warmup)))

    data = Texts(args.samples, 1, args.read_seconds)
    test = Texts(HELD_OUT, 2)
    state = ee.ElasticState(
        model=model,
        optimizer=optimizer,
        scheduler=LambdaLR(optimizer, factor),
        sampler=ee.ElasticSampler(data, shuffle=True, seed=0),
        epoch=0,
        step=0,
    )
    ee.seed_all(state, seed=0)
    state.on_reset(
        lambda old, new: print(
            f"rank {new.rank} of {new.world_size}, was {old.rank} of {old.world_size}"
        )
    )
    checkpoint = args.output / "last.safetensors"
    if checkpoint.exists():
        state.load(checkpoint)
    train(state, args, data, test)
    print(os.environ.get("RANK", "0"), "done")


if __name__ == "__main__":
    main()
