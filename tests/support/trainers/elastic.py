"""A worker that recovers in process, and logs what it does like ddp.py.

A `start` for each world that it trains in, a `step` after each optimizer step and before its
commit, `end` on the way out; and beside the log which samples each step used, in a file of the
same name that ends in .samples.
"""

import argparse
import json
import logging.config
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import elastic_etcd as ee

NODE = os.environ["ELASTIC_ETCD_NODE"]


class Numbers(Dataset[torch.Tensor]):  # type: ignore[misc] # torch is untyped to mypy
    """Item i is i."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Log:
    """This process's files; a line is there when `write` returns."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / f"{NODE}.{os.getpid()}.jsonl"
        self._file = self._path.open("a", buffering=1)
        self._samples = self._path.with_suffix(".samples").open("a", buffering=1)

    def write(self, event: str, **more: Any) -> None:
        fields = {
            "event": event,
            "time": time.time(),
            "generation": int(os.environ["ELASTIC_ETCD_GENERATION"]),
            "rank": int(os.environ["RANK"]),
            "world_size": int(os.environ["WORLD_SIZE"]),
            "local_rank": int(os.environ["LOCAL_RANK"]),
            "group_rank": int(os.environ["GROUP_RANK"]),
            "node": NODE,
            "pid": os.getpid(),
            "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
            "master": f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        }
        self._file.write(json.dumps(fields | more) + "\n")

    def samples(self, step: int, epoch: int, indices: list[int], loss: float) -> None:
        line = {
            "generation": int(os.environ["ELASTIC_ETCD_GENERATION"]),
            "rank": int(os.environ["RANK"]),
            "step": step,
            "epoch": epoch,
            "indices": indices,
            "loss": loss,
        }
        self._samples.write(json.dumps(line) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=10**9)
    parser.add_argument("--length", type=int, default=240, help="of the data set")
    parser.add_argument("--batch", type=int, default=2, help="per rank")
    parser.add_argument("--loaders", type=int, default=0, help="processes of the data loader")
    parser.add_argument("--step-time", type=float, default=0.03)
    parser.add_argument("--outside", action="store_true", help="the module is wrapped once")
    parser.add_argument("--by-hand", action="store_true", help="gradients are averaged, not by DDP")
    parser.add_argument("--skips", action="store_true", help="a batch that fails is left out")
    parser.add_argument("--log", action="store_true", help="configures logging")
    parser.add_argument(
        "--fault", default="", help="raise, long or stuck, in a process whose first"
    )
    parser.add_argument("--on", type=int, default=0, help="world is generation 1 with this rank")
    parser.add_argument("--at", type=int, default=-1, help="after this step")
    return parser.parse_args()


def happen(fault: str) -> None:
    """In a training step, where the user's code would be."""
    if fault == "raise":
        raise ValueError("a mistake of the user's")
    if fault == "long":
        time.sleep(5)
        return
    threading.Event().wait()  # nobody can abort that


def asked_to_stop(folder: Path, device: torch.device | str = "cpu") -> bool:
    """Whether any rank has seen that the test asks for the end."""
    asked = torch.tensor([int((folder / "stop").exists())], device=device)
    dist.all_reduce(asked)
    return bool(asked)


def average(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def main() -> None:
    args = arguments()
    if args.log:
        logging.config.dictConfig({"version": 1, "root": {"level": "INFO"}})
    log = Log(args.dir)
    here = (os.environ["ELASTIC_ETCD_GENERATION"], os.environ["RANK"]) == ("1", str(args.on))
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    outside = ee.ddp(model) if args.outside else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sampler = ee.ElasticSampler(args.length, seed=3, tail="uneven")
    loader = DataLoader(
        Numbers(args.length),
        args.batch,
        sampler=sampler,
        num_workers=args.loaders,
        persistent_workers=args.loaders > 0,
    )
    state = ee.ElasticState(model=model, optimizer=optimizer, sampler=sampler, step=0)
    skipped = [Exception] if args.skips else []
    worlds: list[int] = []
    state.on_reset(lambda: worlds.append(dist.get_world_size()))

    @ee.run
    def train(state: ee.ElasticState) -> None:
        ddp = outside or (model if args.by_hand else DistributedDataParallel(model))
        log.write("start", step=state.step)
        while sampler.epoch < args.epochs:
            for batch in state.steps(loader, commit_every=1):
                with suppress(*skipped):
                    if not sampler._shares_step():  # some ranks have nothing left: no collectives
                        log.samples(state.step + 1, sampler.epoch, batch.tolist(), 0.0)
                        continue
                    loss = ddp(
                        torch.stack([batch / 240, batch % 3 / 2, batch % 2, batch % 5 / 4], 1)
                    ).pow(2)
                    optimizer.zero_grad()
                    loss.mean().backward()
                    if here and state.step == args.at:
                        log.write(args.fault)
                        happen(args.fault)
                    if args.by_hand:
                        average(model)
                    optimizer.step()
                    time.sleep(args.step_time)
                    state.step += 1
                    log.samples(state.step, sampler.epoch, batch.tolist(), loss.mean().item())
                    log.write("step", step=state.step, loss=loss.mean().item())
                    if asked_to_stop(args.dir):
                        return
            sampler.set_epoch(sampler.epoch + 1)

    train(state)
    log.write("end")


if __name__ == "__main__":
    main()
