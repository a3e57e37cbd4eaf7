"""A plain script, restarted at each change of the world, that keeps its checkpoints in memory.

Each step adds 1 to every weight, so that the weights say how many steps they have been through.
"""

import argparse
import gc
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import elastic_etcd as ee

RANK, LOCAL_RANK = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])


def say(what: str, *numbers: int) -> None:
    """One line of this rank, for the test."""
    generation = os.environ["ELASTIC_ETCD_GENERATION"]
    print(f"{what}: generation {generation} rank {RANK}", *numbers, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--disk", type=Path)
    parser.add_argument("--size", type=int, default=4, help="numbers in a checkpoint")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    model = torch.nn.Linear(args.size, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    step = 0
    if path := ee.latest_checkpoint(args.disk):
        saved = torch.load(path / "state.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        step = saved["step"]
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    print("memory:", os.environ["ELASTIC_ETCD_MEMORY"], flush=True)
    say("begins", step, os.getpid())
    stop = torch.zeros(1)
    while not stop:
        optimizer.zero_grad()
        (-ddp(torch.ones(1, args.size)).sum()).backward()
        optimizer.step()
        step += 1
        if not bool((model.weight == step).all()):
            sys.exit(f"step {step}, but the weights are {model.weight}")
        with ee.memory_checkpoint(step, every=5, disk=args.disk, disk_every=20) as folder:
            if folder and LOCAL_RANK == 0:
                torch.save({"model": model.state_dict(), "step": step}, folder / "state.pt")
        if folder:
            say("saved", step)
        time.sleep(0.02)
        stop.fill_((args.dir / "stop").exists())
        dist.all_reduce(stop, dist.ReduceOp.MAX)
    del ddp
    gc.collect()  # the module's end may hang if it has the group's last reference
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
