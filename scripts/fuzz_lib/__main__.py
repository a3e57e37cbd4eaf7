"""`scripts/fuzz [TARGET ...] --seconds N`: each target in a process of its own, for so long.

The exit code is 1 when one of them fell; the input is then in the file that libFuzzer names. Make
it a test in tests/security.
"""

import argparse
import logging
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

TARGETS = {
    "value": "one value of a key",
    "view": "all of a job's keys, and what its coordinator does and writes then",
    "packet": "a message of a worker, of an agent or of a fork server",
    "socket": "packets at the agent's end of a worker's channel, with descriptors",
    "codecs": "the encoded objects of a snapshot",
    "snapshot": "a snapshot's header and table of tensors, sums right and wrong",
    "saved": "a file that a state is loaded from",
    "checkpoint": "a node's offer of checkpoints, a manifest, names of files asked for",
    "inventory": "the numbers by which a rank says which snapshots it has",
    "link": "bytes at an agent's port for others, after the right nonce or a wrong one",
    "request": "a request to --metrics-addr",
    "error": "a worker's error file, and the end of what it said",
    "page": "the page of memory in which a worker says what it is doing",
    "notice": "the file that tells that this machine goes",
}


def fuzz(name: str, seconds: int, corpus: Path) -> None:
    """Run one target in this process; ends it."""
    import atheris  # noqa: PLC0415 - only here

    with atheris.instrument_imports(include=["elastic_etcd"], enable_loader_override=False):
        from . import targets  # noqa: PLC0415 - instrumented

    for number, seed in enumerate(targets.SEEDS[name]):
        (corpus / str(number)).write_bytes(seed)
    run: Callable[[bytes], None] = getattr(targets, f"fuzz_{name}")
    logging.disable()
    options = [f"-max_total_time={seconds}", "-max_len=4096", "-print_final_stats=1", "-timeout=20"]
    options += [f"-artifact_prefix={tempfile.gettempdir()}/"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], run)
    atheris.Fuzz()


def one(name: str, seconds: int) -> bool:
    """Whether it went well; prints one line about it, and all that was said if it did not."""
    command = [sys.executable, "-m", "scripts.fuzz_lib", name, f"--seconds={seconds}", "--here"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    found = re.search(r"number_of_executed_units: (\d+)", said)
    covered = re.findall(r"cov: (\d+)", said)
    print(f"{name:10} {found[1] if found else 0:>9} inputs, {covered[-1] if covered else 0} edges")
    if done.returncode:
        print(said[-8000:])
    return not done.returncode


def main() -> int:
    told = "\n".join(f"  {name:10} {what}" for name, what in TARGETS.items())
    parser = argparse.ArgumentParser(
        prog="scripts/fuzz",
        description=f"{__doc__}\n{told}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="all without any")
    parser.add_argument("--seconds", type=int, default=60, help="each")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.targets) - TARGETS.keys():
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    if args.here:
        with tempfile.TemporaryDirectory() as corpus:
            fuzz(args.targets[0], args.seconds, Path(corpus))
    results = [one(name, args.seconds) for name in args.targets or TARGETS]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
