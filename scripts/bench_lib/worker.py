"""The worker of the recovery benchmark: a plain DDP script that every launcher runs unchanged.

It writes DIR/PID-NUMBER.steps: lines "name at" for what it passes on the way to its first step,
then "step at world_size" for each step. `at` is CLOCK_MONOTONIC, one clock for all processes of
a machine. It ends when DIR/stop exists.
"""

import time

BEGUN = time.monotonic()  # before the imports, which are most of a cold start

import gc  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
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


def train(steps: Steps) -> None:
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    steps.passed("DDP")
    stop = False
    while not stop:
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        stop = steps.stop()
        steps.step()


def main() -> None:
    steps = Steps(Path(sys.argv[1]))
    steps.passed("script", BEGUN)
    steps.passed("imports", IMPORTED)
    dist.init_process_group("gloo")
    steps.passed("process group")
    train(steps)
    gc.collect()  # DDP is in reference cycles; a gloo group that they keep aborts at exit
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
