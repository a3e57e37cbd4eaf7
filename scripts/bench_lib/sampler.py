"""The sampler beside torch's DistributedSampler and the algorithm that Horovod Elastic describes.

Each case runs in a process of its own, with bounds on time and memory; what does not fit is said.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

SIZES = (10**6, 10**7, 10**8, 10**10)
WORLD, SMALLER = 8, 7
NAMES = {
    "exact": 'ElasticSampler, "exact"',
    "stream": 'ElasticSampler, "stream"',
    "torch": "DistributedSampler",
    "sets": "Horovod's algorithm",
}
NOTES = f"""
Rank 0 of a world of {WORLD}. first: from set_epoch() to the first index of an epoch. reset: a world
of {SMALLER} instead, with half of the epoch used, until its first index; torch's sampler can't, and
is made anew and skips. rate: indices handed out in a second after the first one. Times are of one
thread's CPU, which a busy machine changes less. memory: the process's peak above what it had with
torch imported.
"""


def timed(what: Callable[[], object], limit: float = 1.0) -> float:
    """Seconds of CPU time: the median of five, or of one where that takes long."""
    times: list[float] = []
    while len(times) < 5 and sum(times) < limit:
        start = time.process_time()
        what()
        times.append(time.process_time() - start)
    return median(times)


def rate(indices: Iterable[int], count: int) -> float:
    start = time.process_time()
    taken = sum(1 for _ in islice(indices, count))
    return taken / (time.process_time() - start)


def elastic(shuffle: str, length: int) -> dict[str, float]:
    from elastic_etcd import ElasticSampler  # noqa: PLC0415 - after the memory was looked at

    sampler = ElasticSampler(length, shuffle=shuffle, rank=0, world_size=WORLD)  # type: ignore[arg-type]
    epochs = iter(range(1, 100))

    def first() -> None:
        sampler.set_epoch(next(epochs))
        next(iter(sampler))

    told = {"first": timed(first)}
    half = sampler.state_dict() | {"consumed": length // (2 * WORLD) * WORLD}

    def reset() -> None:
        sampler.load_state_dict(half)
        sampler.reshard(0, SMALLER)
        next(iter(sampler))

    return told | {"reset": timed(reset), "rate": rate(iter(sampler), 4_000_000)}


def torchs(length: int) -> dict[str, float]:
    from torch.utils.data import DistributedSampler  # noqa: PLC0415

    class Sized:
        def __len__(self) -> int:
            return length

    def first() -> None:
        next(iter(DistributedSampler(Sized(), WORLD, 0)))

    def reset() -> None:
        left = length // (2 * SMALLER)
        next(islice(DistributedSampler(Sized(), SMALLER, 0), left, None))

    sampler = DistributedSampler(Sized(), WORLD, 0)
    told = {"first": timed(first), "reset": timed(reset)}
    return told | {"rate": rate(iter(sampler), 4_000_000)}


def sets(length: int) -> dict[str, float]:
    from tests.support.processed_indices import ProcessedIndices  # noqa: PLC0415

    def first() -> None:
        sampler = ProcessedIndices(length, 0, WORLD)
        next(iter(sampler))

    def reset() -> None:
        sampler.reset(0, SMALLER)
        next(iter(sampler))

    sampler = ProcessedIndices(length, 0, WORLD)
    told = {"first": timed(first)}
    sampler.processed = set(range(0, length, 2))
    told["reset"] = timed(reset)
    return told | {"rate": rate(iter(sampler), 4_000_000)}


def memory() -> float:
    """MB that this process has had in memory at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1e3


def case(name: str, length: int, bound: float) -> None:
    """In the process of a case: print its figures as JSON."""
    import torch  # noqa: PLC0415 - what it takes is not the sampler's

    import elastic_etcd.train.data.sampler  # noqa: F401, PLC0415

    torch.set_num_threads(1)
    torch.randperm(1000)
    before = memory()
    resource.setrlimit(resource.RLIMIT_DATA, (int(bound * 1e9), int(bound * 1e9)))
    if name == "torch":
        told = torchs(length)
    elif name == "sets":
        told = sets(length)
    else:
        told = elastic(name, length)
    print(json.dumps(told | {"memory": memory() - before}))


def figures(name: str, length: int, seconds: float, bound: float) -> dict[str, Any] | str:
    """Run a case: its figures, or why there are none."""
    if (name == "exact" and 4e-9 * length > bound) or (name in ("torch", "sets") and length > 1e9):
        return f"needs more than {bound:g} GB"
    options = ["--case", name, str(length), "--memory", str(bound)]
    command = [sys.executable, "-m", "scripts.bench_lib.sampler", *options]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"takes more than {seconds:g} s"
    if run.returncode:
        last = run.stderr.strip().splitlines()[-1:]
        if any("Memory" in line or "memory" in line for line in last):
            return f"needs more than {bound:g} GB"
        raise SystemExit(run.stderr)
    told: dict[str, Any] = json.loads(run.stdout)
    return told


def duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.2f} ms"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=float, default=6, help="bound in GB")
    parser.add_argument("--seconds", type=float, default=120, help="bound on each case")
    parser.add_argument("--quick", action="store_true", help="up to 10^7, and 10^10")
    asked = parser.parse_args()
    if asked.case:
        case(asked.case[0], int(asked.case[1]), asked.memory)
        return 0
    print(NOTES)
    print(f"{'':8}{'':26}{'first':>12}{'reset':>12}{'rate':>12}{'memory':>12}")
    for length in SIZES:
        if asked.quick and length == 10**8:
            continue
        for name, title in NAMES.items():
            told = figures(name, length, asked.seconds, asked.memory)
            size = f"10^{len(str(length)) - 1}" if name == "exact" else ""
            row = f"{size:8}{title:26}"
            if isinstance(told, str):
                print(f"{row}  {told}", flush=True)
                continue
            row += f"{duration(told['first']):>12}{duration(told['reset']):>12}"
            print(f"{row}{told['rate'] / 1e6:>10.1f} M{told['memory']:>9.0f} MB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
