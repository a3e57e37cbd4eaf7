"""What an agent takes of a core while its worker does nothing, without --metrics-addr and with it.

    scripts/bench idle --pairs 3 --seconds 60

Both run at the same time, each in a job of one node, so that what else the machine does falls on
both. What is scraped is asked for as Prometheus does. Exit code 1 when the goal is missed.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from elastic_etcd.etcd.embedded import free_ports
from tests.support.etcd import EtcdServer
from tests.support.job import ROOT
from tests.support.processes import cpu

from .figures import grid

GOAL = 0.2  # percent of a core
WARM = 10.0  # seconds, in which an agent does what it does at its start
STARTS = 60.0
SCRIPT = "import signal, pathlib, sys; pathlib.Path(sys.argv[1]).touch(); signal.pause()\n"


@contextmanager
def agent(etcd: EtcdServer, folder: Path, job: str, *flags: str) -> Iterator[int]:
    """One whose worker runs; gives its pid."""
    script, runs = folder / "idle.py", folder / f"{job} runs"
    script.write_text(SCRIPT)
    argv = [sys.executable, "-m", "elastic_etcd.launch", "--etcd", etcd.endpoint, "--job", job]
    argv += ["--nnodes", "1:2", "--settle", "0", *flags, str(script), str(runs)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(argv, env=env, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + STARTS
            while not runs.exists():
                if time.monotonic() > deadline or process.poll() is not None:
                    raise RuntimeError(f"no worker of {' '.join(argv)} after {STARTS:g} s")
                time.sleep(0.1)
            yield process.pid
        finally:
            process.send_signal(signal.SIGTERM)


@contextmanager
def scraped(port: int, every: float) -> Iterator[None]:
    """Ask for its metrics again and again."""
    over = threading.Event()

    def ask() -> None:
        while not over.wait(every):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=STARTS) as page:
                page.read()

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield
    finally:
        over.set()
        asking.join()


def pair(etcd: EtcdServer, folder: Path, number: int, args: argparse.Namespace) -> list[float]:
    """Percent of a core that the agent without metrics takes, and the one with them."""
    (port,) = free_ports(1)
    flag = f"--metrics-addr=127.0.0.1:{port}"
    with (
        agent(etcd, folder, f"without-{number}") as without,
        agent(etcd, folder, f"with-{number}", flag) as with_metrics,
        scraped(port, args.every),
    ):
        time.sleep(WARM)
        return cpu([[without], [with_metrics]], args.seconds)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/bench idle",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60, help="of each pair")
    parser.add_argument("--every", type=float, default=5, help="seconds between two scrapes")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        etcd = EtcdServer(Path(folder))
        etcd.start()
        try:
            pairs = [pair(etcd, Path(folder), n, args) for n in range(args.pairs)]
        finally:
            etcd.kill()
    rows = [(f"{a:.2f}", f"{b:.2f}", f"{b - a:+.2f}") for a, b in pairs]
    columns = ("without", f"scraped each {args.every:g} s", "more")
    Console().print(grid("an idle agent, % of a core", columns, rows))
    more = statistics.median(b - a for a, b in pairs)
    print(f"median: {more:+.2f}, goal {GOAL:g} at most; load {os.getloadavg()[0]:.1f}")
    return int(more > GOAL)


if __name__ == "__main__":
    sys.exit(main())
