"""`scripts/bench recovery`: prints a table, and writes every sample with --json FILE."""

import argparse
import asyncio
import json
import os
import platform
import sys
from importlib.metadata import version
from math import isinf
from pathlib import Path

from rich.console import Console

from elastic_etcd.etcd.embedded import EmbeddedEtcd

from .recovery import MEASURES, Plan, measure
from .table import table, verdict


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("benchmark", nargs="?", choices=("recovery",), default="recovery")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--node-kills", type=int, default=1, help="torchrun's, 46 s each")
    parser.add_argument("--idle", type=float, default=20, help="seconds to measure CPU over")
    parser.add_argument("--only", choices=("torchrun", "elastic_etcd"))
    parser.add_argument("--json", type=Path, help="write all samples; null: never")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    launchers = (args.only,) if args.only else ("torchrun", "elastic_etcd")
    plan = Plan(args.repeat, args.node_kills, args.idle, launchers)
    # One thread for each worker under both launchers: two cores are few.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    console, progress = Console(width=110), Console(stderr=True)

    async def run() -> dict[str, dict[str, list[float]]]:
        async with EmbeddedEtcd() as etcd:
            return measure(etcd.endpoint, plan, progress.log)

    samples = asyncio.run(run())
    here, torchrun = samples.get("elastic_etcd", {}), samples.get("torchrun", {})
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}"
    title = f"recovery: torch {version('torch')}, {machine}, {plan.repeat} repetitions"
    console.print(table(title, MEASURES, here, torchrun))
    if args.json:
        finite = {
            name: {m: [None if isinf(v) else v for v in values] for m, values in found.items()}
            for name, found in samples.items()
        }
        args.json.write_text(json.dumps({"title": title, "samples": finite}, indent=1) + "\n")
    missed = [
        m for m in MEASURES if verdict(m, here.get(m.name, []), torchrun.get(m.name, [])) is False
    ]
    return 1 if missed and not args.only else 0


if __name__ == "__main__":
    sys.exit(main())
