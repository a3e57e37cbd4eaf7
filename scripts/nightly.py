"""scripts/nightly: the tests that are too long for every change, part by part, and their times."""

import argparse
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_HAD = 77  # the exit code of a script that can't be run here and has said why
INTERRUPTED = 130
OLD_TORCH = "VENV=.venv-torch-2.6 TORCH=2.6.0"
ETCDS = ("bookworm", "3.5", "3.6", "3.7")
VERSION = "TEST_ETCD=$(.venv/bin/python -m tests.support.etcd_versions {}) && export TEST_ETCD"
ON_ETCD = f"{VERSION} && scripts/test -m 'not nightly' tests/etcd tests/e2e/test_etcd_*.py"
# The first command of that part does it on the newest.
OPERATED = f"{VERSION} && scripts/test tests/e2e/test_etcd_operated.py"
BENCHMARKS = (  # so short that they measure little: it is seen whether they still run
    "state --megabytes 32 --repeat 1",
    "sharded --no-jobs --megabytes 8",
    "recovery --quick --only 'in process'",
    "gpu --device cpu --sizes 0.05 --repeat 1 --kills 1",
)


@dataclass(frozen=True)
class Part:
    """What it tests, roughly how long that takes, and commands; without any, its marked tests."""

    what: str
    minutes: int
    commands: tuple[str, ...] = ()

    def lines(self, name: str) -> tuple[str, ...]:
        """The commands, for a shell in the root of the repository."""
        marked = shlex.quote(f"nightly(part={name!r})")
        return self.commands or (f"scripts/test -m {marked}",)


PARTS = {
    "model": Part("searches of the model that take seconds each", 3),
    "large": Part(
        "searches of the model that take minutes and gigabytes",
        60,
        ("PYTHONPATH=. .venv/bin/python -m tests.model large",),
    ),
    "mutants": Part("200 mistakes in core/ and train/", 60, ("scripts/mutants --count 200",)),
    "sharded": Part("500 sequences of worlds, nodes lost at 200 places, 10,000 flipped bits", 60),
    "jobs": Part("demo, tutorials, torchrun, Prometheus, hangs, more kinds of scripts", 25),
    "examples": Part("each example and each program of migration.md under each launcher", 2),
    "forks": Part("compilers, spawned processes and more variables in a forked worker", 2),
    "chaos": Part("random faults, from seeds", 3),
    "netns": Part("networks that are cut, slow and lossy; bad nodes among good ones", 5),
    "compose": Part("nodes and etcd in containers", 15, ("scripts/compose-test",)),
    "python": Part("scripts/test on the newest Python", 20, ("scripts/test-newest",)),
    "torch": Part(
        "the plug-in under the oldest torch that it takes",
        10,
        (f"{OLD_TORCH} scripts/test tests/etcd/test_torchrun.py tests/e2e/test_torchrun.py",),
    ),
    "etcd": Part(
        "the newest etcd of each minor version, as far as it can be had, and Debian's 3.4",
        75,
        (
            "scripts/test -m \"nightly(part='etcd')\"",
            *map(ON_ETCD.format, ETCDS),
            *map(OPERATED.format, ETCDS[1:-1]),
        ),
    ),
    "frameworks": Part(
        "recipes for accelerate, Lightning, transformers and DeepSpeed",
        15,
        ("TEST_FAULTS=each scripts/test tests/frameworks",),
    ),
    "users": Part(
        "whole training scripts, and habits of people's scripts, each fault by itself",
        36,
        ("TEST_FAULTS=each scripts/test tests/users",),
    ),
    "bench": Part(
        "the benchmarks that no test runs, each in a short form",
        5,
        tuple(f"scripts/bench {each}" for each in BENCHMARKS),
    ),
    "packaging": Part("the set-up, the wheel, the oldest and newest requirements, a notebook", 6),
    "chromium": Part("the live page and the site in a browser", 1),
    "kubernetes": Part("pods made of namespaces; manifests, the chart, what kustomize makes", 1),
    "control-plane": Part("a real API server and Job controller of Kubernetes, built at first", 2),
    "platforms": Part("recipes for TorchX, SkyPilot and dstack", 3),
    "slurm": Part("jobs of a real Slurm", 2),
    "fuzz": Part("what reads other people's bytes", 10, ("scripts/fuzz --seconds 60",)),
    "gpu": Part("on GPUs where there are some, and on the CPU", 1, ("scripts/test tests/gpu",)),
}


def run(name: str, part: Part) -> str:
    """How it went: passed, FAILED, or not run, for a reason that it has said."""
    outcome = "passed"
    for line in part.lines(name):
        print(f"scripts/nightly: {name}: {line}", flush=True)
        code = subprocess.run(["sh", "-c", line], cwd=ROOT, check=False).returncode
        if code not in (0, NOT_HAD):
            return "FAILED"
        if code:
            outcome = "not run"
    return outcome


def run_all(parts: dict[str, Part]) -> int:
    """Run one part after the other, whatever comes of each; the exit code."""
    told: list[str] = []
    code = 0
    try:
        for name, part in parts.items():
            began = time.monotonic()
            outcome = run(name, part)
            told.append(f"{name:12} {outcome:8} {(time.monotonic() - began) / 60:6.1f} min")
            print(f"scripts/nightly: {told[-1]}", flush=True)
            code = 1 if outcome == "FAILED" else code
    except KeyboardInterrupt:
        code = INTERRUPTED
    print("scripts/nightly, in short:", *told, sep="\n")
    return code


def main() -> int:
    listed = [f"  {name:12} {part.minutes:3} min  {part.what}" for name, part in PARTS.items()]
    parser = argparse.ArgumentParser(
        prog="scripts/nightly",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Run what scripts/test leaves out: all parts, or those that are named.",
        epilog="parts, and about how long each takes on two cores:\n"
        + "\n".join(listed)
        + "\n\nA failed part does not keep the others from running. The exit code is 1 if one "
        "failed.\nscripts/nightly chaos netns runs these two.",
    )
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[[], *PARTS])
    asked = parser.parse_args().parts
    return run_all({name: PARTS[name] for name in asked or PARTS})


if __name__ == "__main__":
    sys.exit(main())
