"""`scripts/chaos`: see `scripts/chaos --help`."""

import argparse
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .nemesis import Burst, Kind, schedule
from .nodes import MAX_NODES, Etcd, disk
from .report import Outcome, Report
from .run import Run

FAULTS = "\n".join(f"    {kind}" for kind in Kind)
EPILOG = f"""
what is done:
  Bursts of faults hit a job that trains on three to five nodes, beside three members of etcd:

{FAULTS}

  The disk is a loop device, and processes are counted in a cgroup, which takes root; what can't be
  done is left out, and the report says so. After each burst the job must be whole again within
  90 s (--patience). In the end it must succeed.

what is checked:
  From the workers' logs: one world per generation and one generation per node at a time, ranks,
  each sample once per epoch, and the final weights equal, to the last bit, to those of a training
  that nobody disturbed. From etcd's own history: that generations only grow, and every write is
  by a live member of the present generation. And that no process, key, lease, file or shared
  memory is left.

examples:
  scripts/chaos                            two minutes, some seed
  scripts/chaos --minutes 60 --seed 1      an hour
  scripts/chaos --seed 1 --schedule        what would be done
  scripts/chaos --seed 1 --keep /tmp/logs  keep all logs, also when nothing is wrong

exit status:
  0 nothing is wrong   1 something is, or the job did not go on   2 wrong usage
  Ctrl-C ends the training, checks what has happened, and reports; once more ends at once (130).
"""
JOB_MINUTES = 10  # of one job; there are at least two, since modes take turns


def positive(text: str) -> float:
    if not 0 < (value := float(text)) < 10**5:
        raise argparse.ArgumentTypeError(f"{text!r} is no such number")
    return value


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "scripts/chaos",
        description="Disturbs a real elastic job in all ways, and checks that it does not show.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=positive, default=2, metavar="N", help="default: 2")
    parser.add_argument("--seed", type=int, metavar="S", help="of the faults (default: by chance)")
    parser.add_argument(
        "--mode",
        choices=("run", "plain", "both"),
        default="both",
        help="workers that recover in process (ee.run), or are restarted in each new world, or "
        "one after the other (default)",
    )
    parser.add_argument(
        "--patience",
        type=positive,
        default=90,
        metavar="S",
        help="seconds for the job to be whole again after a burst (default: 90); more where the "
        "machine does much else",
    )
    parser.add_argument("--schedule", action="store_true", help="print the faults, do nothing")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for all logs; a new one")
    args = parser.parse_args()
    if args.keep and args.keep.exists():
        parser.error(f"--keep {args.keep}: there is such a file or folder already")
    if args.seed is None:
        args.seed = secrets.randbelow(10**6)
    return args


def within(bursts: Iterator[Burst], seconds: float) -> Iterator[Burst]:
    """The bursts of so much time, if the job recovered in no time."""
    for burst in bursts:
        seconds -= burst.pause + max(fault.at + fault.lasts for fault in burst.faults)
        if seconds < 0:
            return
        yield burst


class Interrupted:
    """Whether the user wants to stop: Ctrl-C or SIGTERM once; the second one ends at once."""

    def __init__(self) -> None:
        self._asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def __call__(self) -> bool:
        return self._asked

    def _ask(self, number: int, _: object) -> None:
        self._asked = True
        signal.signal(number, signal.default_int_handler)


def torment(args: argparse.Namespace, directory: Path, report: Report) -> Outcome:
    """One job after the other until the time is up."""
    bursts, agents, total = schedule(args.seed, MAX_NODES), MAX_NODES, Outcome()
    jobs = max(2, round(args.minutes / JOB_MINUTES)) if args.mode == "both" else 1
    asked = Interrupted()
    with Etcd(directory) as etcd, disk(directory) as logs:
        for number in range(1, jobs + 1):
            deadline = time.monotonic() + 60 * args.minutes / jobs
            plain = args.mode == "plain" or (args.mode == "both" and number % 2 == 0)

            def over(deadline: float = deadline) -> bool:
                return asked() or time.monotonic() > deadline

            how = "workers are restarted in each world" if plain else "workers in ee.run"
            report.say(f"\n[bold]job {number} of {jobs}[/]: {agents} nodes, {how}")
            (directory / f"job-{number}").mkdir()
            folder = directory / f"job-{number}"
            one = Run(etcd, logs, folder, report, asked, over, args.patience)
            agents = one.go(f"chaos-{number}", bursts, agents, plain=plain)
            total.add(one.outcome)
            if asked() or one.outcome.violations:
                break
    return total


def main() -> int:
    args, report = arguments(), Report()
    report.say(f"seed {args.seed}")
    if args.schedule:
        report.schedule(within(schedule(args.seed, MAX_NODES), 60 * args.minutes))
        return 0
    directory = args.keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with report:
            outcome = torment(args, directory, report)
    except KeyboardInterrupt:
        report.say(f"stopped at once; the logs are in {directory}")
        return 130
    report.summary(outcome, args.seed, str(directory))
    if outcome.violations:
        again = f"scripts/chaos --minutes {args.minutes:g} --seed {args.seed} --mode {args.mode}"
        report.say(f"The same faults again: {again}")
        return 1
    if not args.keep:
        shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
