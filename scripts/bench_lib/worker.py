"""The worker of the recovery benchmark: a plain DDP script that every launcher runs unchanged.

It writes DIR/PID-NUMBER.steps: lines "name at" for what it passes on the way to its first step,
then "step at world_size" for each step. `at` is CLOCK_MONOTONIC, one clock for all processes of
a machine. It ends when DIR/stop exists. With --in-process it does the same under `@ee.run`. With
--save-every the plain script goes on from its file, as scripts do, and so do the numbers of steps;
in process they do without. With --device it trains there, and passes two more: when it has begun
with the device, and when the first collective on it is done.
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
COMMIT_EVERY = 5  # steps

Keep = Callable[[int], object]  # is told each step, and makes some of them outlive the world


class Steps:
    """What one process did in one world; `number` tells its worlds apart.

    `done` is the number of the last step that the training has behind it.
    """

    def __init__(self, directory: Path, pause: float, number: int = 0, done: int = 0) -> None:
        mark = os.environ.get("E2E_MARK", "-")
        path = directory / f"{os.getpid()}-{number}.steps"
        self._file = path.open("w", buffering=1)
        self._file.write(f"node {mark}\n")
        self._stop = directory / "stop"
        self._pause = pause
        self.done = done

    def passed(self, name: str, at: float | None = None) -> None:
        self._file.write(f"{name} {time.monotonic() if at is None else at}\n")

    def step(self) -> None:
        self.done += 1
        self._file.write(f"{self.done} {time.monotonic()} {dist.get_world_size()}\n")
        time.sleep(self._pause)

    def stop(self, device: str | None) -> bool:
        """Whether the benchmark has seen enough; all ranks agree on the step."""
        stop = torch.tensor([self._stop.exists()], dtype=torch.uint8, device=device)
        dist.all_reduce(stop, dist.ReduceOp.MAX)
        return bool(stop)

    def close(self) -> None:
        self._file.close()


def plain(args: argparse.Namespace) -> None:
    """One world, which the launcher starts anew for each."""
    begun = begin(args)
    model, optimizer = model_and_optimizer(args.device)
    saved, every = args.directory / "saved", args.save_every
    done = load(saved, model, optimizer) if every and saved.exists() else 0
    steps = Steps(args.directory, args.step_seconds, done=done)
    steps.passed("script", BEGUN)
    steps.passed("imports", IMPORTED)
    if begun:
        steps.passed("device", begun)
    dist.init_process_group(args.backend)
    steps.passed("process group")
    collect(steps, args)
    keep = saver(saved, every, model, optimizer) if every else nothing
    train(steps, args.device, model, optimizer, keep)
    gc.collect()  # DDP is in reference cycles; a gloo group that they keep aborts at exit
    dist.destroy_process_group()


def begin(args: argparse.Namespace) -> float:
    """Use the device for the first time: when that was done; 0.0 if there was none to be used."""
    if args.device is None:
        return 0.0
    torch.ones(1, device=args.device).item()
    return time.monotonic()


def collect(steps: Steps, args: argparse.Namespace) -> None:
    """A first collective, in which NCCL connects the ranks, if the device is to be used."""
    if args.device:
        one = torch.ones(1, device=args.device)
        dist.all_reduce(one)
        one.item()
        steps.passed("collective")


def model_and_optimizer(device: str | None) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(8, 1, device=device)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def nothing(*_: object) -> None:
    """What a script does for its steps that does not save."""


def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The step after which the file was written."""
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


def saver(
    path: Path, every: float, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Keep:
    """Has rank 0 write the file, once in so many seconds."""
    due = time.monotonic() + every

    def keep(step: int) -> None:
        nonlocal due
        if dist.get_rank() == 0 and time.monotonic() >= due:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            aside = path.with_suffix(".new")
            torch.save(state | {"step": step}, aside)
            aside.replace(path)
            due = time.monotonic() + every

    return keep


def train(
    steps: Steps,
    device: str | None,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    keep: Keep,
    check: Callable[[], object] = nothing,
) -> None:
    """One world; `keep` follows each optimizer step, and `check` the log of the step."""
    ddp = DistributedDataParallel(model)
    steps.passed("DDP")
    stop = False
    while not stop:
        optimizer.zero_grad()
        ddp(torch.randn(4, 8, device=device)).sum().backward()
        optimizer.step()
        keep(steps.done + 1)
        stop = steps.stop(device)
        steps.step()
        check()


def in_process(args: argparse.Namespace) -> None:
    """One world after the other in the same process."""
    import elastic_etcd as ee  # noqa: PLC0415 - no part of what the peers run

    worlds = itertools.count()  # of this process; the state is the job's

    @ee.run(backend=args.backend)
    def live(state: ee.ElasticState) -> None:
        world = next(worlds)
        steps = Steps(args.directory, args.step_seconds, world, state.step)
        if world == 0:
            steps.passed("script", BEGUN)
            steps.passed("imports", ready)
            if begun:
                steps.passed("device", begun)
        steps.passed("process group")
        collect(steps, args)
        train(steps, args.device, model, optimizer, partial(commit, state), state.check)
        steps.close()

    def commit(state: ee.ElasticState, step: int) -> None:
        state.step = step
        state.commit(every=COMMIT_EVERY)

    ready = time.monotonic()  # ee.run and ee.ElasticState are loaded when they are first named
    begun = begin(args)
    model, optimizer = model_and_optimizer(args.device)
    live(ee.ElasticState(model=model, optimizer=optimizer, step=0))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--in-process", action="store_true")
    parser.add_argument("--step-seconds", type=float, default=STEP_SECONDS)
    parser.add_argument("--save-every", type=float, default=0, metavar="SECONDS")
    parser.add_argument("--device", help="default: the CPU, and nothing is passed for it")
    parser.add_argument("--backend", default="gloo")
    args = parser.parse_args()
    run = in_process if args.in_process else plain
    run(args)


if __name__ == "__main__":
    main()
