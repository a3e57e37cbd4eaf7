"""The worker of the recovery benchmark: a plain DDP script that both launchers run unchanged.

It appends a line to DIR/PID.steps after each step: its number, CLOCK_MONOTONIC (one clock for all
processes of a machine), the world's size and the agent's pid. It ends when DIR/stop exists.
"""

import gc
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEP_SECONDS = 0.02  # stands for a step's computation, so that two cores are not the bottleneck


def train(directory: Path) -> None:
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    step = 0
    stop = torch.tensor([0])
    with (directory / f"{os.getpid()}.steps").open("w", buffering=1) as log:
        while not stop:
            model(torch.randn(4, 8)).sum().backward()
            stop[0] = (directory / "stop").exists()
            dist.all_reduce(stop)
            step += 1
            log.write(f"{step} {time.monotonic()} {dist.get_world_size()} {os.getppid()}\n")
            time.sleep(STEP_SECONDS)


def main() -> None:
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]))
    gc.collect()  # DDP is in reference cycles; a gloo group that they keep aborts at exit
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
