"""The worker of the recovery benchmark: a plain DDP script that every launcher runs unchanged.

It writes DIR/PID-NUMBER.steps: lines "name at" for what it passes on the way to its first step,
then "step at world_size" for each step. `at` is CLOCK_MONOTONIC, one clock for all processes of
a machine. It ends when DIR/stop exists. With --in-process it does the same under `@ee.run`.
"""

import time

BEGUN = time.monotonic()  # before the imports, which are most of a cold start

import argparse  # noqa: E402
import gc  # noqa: E402
import itertools  # noqa: E402
import os  # noqa: E402
from collections.abc import Callable  # noqa: E402
from functools import partial  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

IMPORTED = time.monotonic()
STEP_SECONDS = 0.02  # stands for a step's computation, so that two cores are not the bottleneck


class Steps:
    """What one process did in one world; `number` tells its worlds apart."""

    def __init__(self, directory: Path, number: int = 0) -> None:
        mark = os.environ.get("E2E_MARK", "-")
        path = directory / f"{os.getpid()}-{number}.steps"
        self._file = path.open("w", buffering=1)
        self._file.write(f"node {mark}\n")
        self._stop = directory / "stop"
        self._count = 0

    def passed(self, name: str, at: float | None = None) -> None:
        self._file.write(f"{name} {time.monotonic() if at is None else at}\n")

    def step(self) -> None:
        self._count += 1
        self._file.write(f"{self._count} {time.monotonic()} {dist.get_world_size()}\n")
        time.sleep(STEP_SECONDS)

    def stop(self) -> bool:
        """Whether the benchmark has seen enough; all ranks agree on the step."""
        stop = torch.tensor([self._stop.exists()], dtype=torch.uint8)
        dist.all_reduce(stop, dist.ReduceOp.MAX)
        return bool(stop)

    def close(self) -> None:
        self._file.close()


def plain(directory: Path) -> None:
    """One world, which the launcher starts anew for each."""
    steps = Steps(directory)
    steps.passed("script", BEGUN)
    steps.passed("imports", IMPORTED)
    dist.init_process_group("gloo")
    steps.passed("process group")
    train(steps, *model_and_optimizer())
    gc.collect()  # DDP is in reference cycles; a gloo group that they keep aborts at exit
    dist.destroy_process_group()


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(8, 1)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def train(
    steps: Steps,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    commit: Callable[[], object] = lambda: None,
    check: Callable[[], object] = lambda: None,
) -> None:
    """One world; `commit` follows each optimizer step, and `check` the log of the step."""
    ddp = DistributedDataParallel(model)
    steps.passed("DDP")
    stop = False
    while not stop:
        optimizer.zero_grad()
        ddp(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        commit()
        stop = steps.stop()
        steps.step()
        check()


def in_process(directory: Path) -> None:
    """One world after the other in the same process."""
    import elastic_etcd as ee  # noqa: PLC0415 - no part of what the peers run

    worlds = itertools.count()  # of this process; the state is the job's

    @ee.run
    def live(state: ee.ElasticState) -> None:
        world = next(worlds)
        steps = Steps(directory, world)
        if world == 0:
            steps.passed("script", BEGUN)
            steps.passed("imports", ready)
        steps.passed("process group")
        train(steps, model, optimizer, partial(state.commit, every=5), state.check)
        steps.close()

    ready = time.monotonic()  # ee.run and ee.ElasticState are loaded when they are first named
    model, optimizer = model_and_optimizer()
    live(ee.ElasticState(model=model, optimizer=optimizer))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--in-process", action="store_true")
    args = parser.parse_args()
    run = in_process if args.in_process else plain
    run(args.directory)


if __name__ == "__main__":
    main()
