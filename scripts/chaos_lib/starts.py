"""`scripts/chaos starts`: two nodes start again and again on a busy machine, without any fault.

Each start must come to a first step of all ranks. One that does not ends the loop, with all logs,
the stacks of its workers and the agents' flight records kept.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .nodes import Disk, Etcd, Nodes, WorkerLogs

BURN = "while True: pass"
STARTED = 2  # nodes, with three workers: n2 has two


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "scripts/chaos starts",
        description="Start a job of two nodes again and again beside programs that only compute, "
        "and measure the time to its first step. Exit status: 1 if one has none, else 0.",
    )
    parser.add_argument("--count", type=int, default=300, metavar="N", help="default: 300")
    parser.add_argument(
        "--minutes", type=float, default=1e5, metavar="N", help="no start begins after these"
    )
    parser.add_argument(
        "--load", type=int, default=4, metavar="N", help="programs beside it (default: 4)"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=120,
        metavar="S",
        help="seconds for a start's first step (default: 120)",
    )
    parser.add_argument(
        "--mode", choices=("run", "plain"), default="plain", help="with ee.run or without (default)"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for all logs; a new one")
    args = parser.parse_args(argv)
    if args.keep and args.keep.exists():
        parser.error(f"--keep {args.keep}: there is such a file or folder already")
    return args


def main(argv: Sequence[str]) -> int:
    args = arguments(argv)
    directory = args.keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    directory.mkdir(parents=True, exist_ok=True)
    taken: list[float] = []
    end = time.monotonic() + 60 * args.minutes
    try:
        with Etcd(directory) as etcd, busy(args.load):
            while len(taken) < args.count and time.monotonic() < end:
                taken.append(start(etcd, directory / f"start-{len(taken) + 1}", args))
                print(f"start {len(taken)}: {taken[-1]:.1f} s", flush=True)
                if not args.keep:
                    shutil.rmtree(directory / f"start-{len(taken)}")
    except AssertionError as error:
        print(f"start {len(taken) + 1}: {error}\nthe logs are in {directory}")
        return 1
    finally:
        if taken:
            print(
                f"{len(taken)} starts with a first step after: median "
                f"{statistics.median(taken):.1f} s, longest {max(taken):.1f} s"
            )
    if not args.keep:
        shutil.rmtree(directory)
    return 0


def start(etcd: Etcd, directory: Path, args: argparse.Namespace) -> float:
    """Two nodes come to a first step, and end; how long that step took to come, in seconds.

    Raises AssertionError.
    """
    directory.mkdir()
    (directory / "logs").mkdir()
    disk = Disk(directory / "logs", apart=False)
    plain = args.mode == "plain"
    nodes = Nodes(etcd.endpoints, directory, directory.name, disk, ignore, plain=plain)
    began = time.monotonic()

    def steps() -> bool:
        nodes.logs.read()
        return len(nodes.logs.nodes()) == STARTED and nodes.logs.trains(0.0)

    try:
        for _ in range(STARTED):
            nodes.join()
        nodes.wait("every rank has done a step", steps, args.patience)
        took = time.monotonic() - began
        nodes.finish(args.patience)
    except AssertionError:
        nodes.record()
        raise
    finally:
        nodes.close()
    return took


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many programs compute meanwhile."""
    burning = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()


def ignore(logs: WorkerLogs) -> None:
    """Nobody looks at what the job does meanwhile."""
    del logs
