"""Scripts as users write them, under faults: their curves are those of runs without any.

By default scripts without a framework run, with all faults in one run. TEST_FAULTS=each runs the
others, too, and each fault by itself.
"""

import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import pytest

from tests.support.job import Agent, Job
from tests.support.processes import send
from tests.support.savers import memory_dir
from tests.support.venv import FRAMEWORKS, venv_or_skip

pytestmark = [
    pytest.mark.timeout(1800),  # the first time, pip has to download
    pytest.mark.nightly(part="users"),
]

STEPS = 100
PATIENCE = 600
ARGUMENTS = ("--samples=1600", "--epochs=2", "--workers=1", "--read-seconds=0.002")


@dataclass(frozen=True)
class Point:
    """A line of a curve."""

    step: int
    loss: float
    lr: float
    world: int


@dataclass(frozen=True)
class Script:
    """What is promised of it."""

    name: str
    failure: int  # steps that are trained again after one
    planned: int  # after a planned change
    tolerance: float | None = 0.0  # of a step's loss; None: the framework gives it other samples
    nnodes: str = "2"


SCRIPTS = (
    Script("images", failure=10, planned=0),
    Script("language", failure=5, planned=0, tolerance=1e-4, nnodes="1:2"),
    Script("tabular", failure=10, planned=0),
    Script("with_accelerate", failure=10, planned=10),
    Script("with_lightning", failure=10, planned=10, tolerance=None),
    Script("with_transformers", failure=10, planned=10),
)


class Run:
    """A job of a script, its nodes in the order in which they were started, and its curve."""

    def __init__(self, job: Job, script: Script) -> None:
        self.job, self.script = job, script
        self.nodes: list[Agent] = []
        self.failures = self.changes = 0

    def start(self, nnodes: str | None = None, nproc: int = 1) -> None:
        program = Path(__file__).with_name(f"{self.script.name}.py")
        node = self.job.start(
            f"n{len(self.job.agents) + 1}",
            nnodes=nnodes or self.script.nnodes,
            nproc=nproc,
            script=(str(program), f"--output={self.job.directory}", *ARGUMENTS),
            python=venv_or_skip("frameworks", *FRAMEWORKS),
            memory_dir=memory_dir(self.job),
            env={"OMP_NUM_THREADS": "1"},  # sums are of the same order, however many are on a node
            lease_ttl=20,  # the machine may be busy
        )
        self.nodes.append(node)

    def join(self) -> None:
        """While a step takes long, so that it does not come when all is over."""
        self.changes += 1
        worker = self.worker()
        send(signal.SIGSTOP, [worker])
        self.start()
        if self.script.nnodes != "2":
            self.job.said(self.nodes[0], f"{self.nodes[-1].node} joins", PATIENCE)
        send(signal.SIGCONT, [worker])

    def worker(self) -> int:
        """The process of rank 0."""
        return int(re.findall(r"pid (\d+)", self.nodes[0].output)[-1])

    def kill_worker(self) -> None:
        self.failures += 1
        send(signal.SIGKILL, [self.worker()])

    def lose(self) -> None:
        self.failures += 1
        self.nodes.pop(0).node_kill()

    def leave(self) -> None:
        self.changes += 1
        node = self.nodes.pop(0)
        node.terminate()
        self.job.exits(node, 128 + signal.SIGTERM, PATIENCE)

    def curve(self) -> list[Point]:
        file = self.job.directory / "curve.csv"
        lines = file.read_text().splitlines() if file.exists() else []
        return [
            Point(int(step), float(loss), float(lr), int(world))
            for step, loss, lr, world in (line.split(",") for line in lines)
        ]

    def reaches(self, step: int) -> None:
        self.job.wait(f"step {step}", lambda: any(p.step >= step for p in self.curve()), PATIENCE)

    def finish(self) -> list[Point]:
        for node in self.nodes:
            self.job.exits(node, 0, PATIENCE)
        return self.curve()


Fault = tuple[int, Callable[[Run], None]]  # at which step


def faults(script: Script) -> dict[str, list[Fault]]:
    """By name. In a world of a fixed size somebody waits for the place of whoever goes."""
    if script.nnodes == "2":
        return {
            "all": [
                (13, Run.kill_worker),
                (27, Run.lose),
                (27, Run.start),
                (45, Run.join),
                (65, Run.leave),
            ],
            "worker": [(15, Run.kill_worker)],
            "node": [(15, Run.lose), (15, Run.start)],
            "join": [(15, Run.join)],
            "leave": [(15, Run.join), (30, Run.leave)],
        }
    return {
        "all": [(13, Run.kill_worker), (27, Run.lose), (40, Run.join), (65, Run.leave)],
        "worker": [(15, Run.kill_worker)],
        "node": [(15, Run.lose)],
        "join": [(15, Run.lose), (30, Run.join)],
        "leave": [(15, Run.leave)],
    }


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[Point]]:
    """The curves of scripts that have run without a fault, by their names."""
    return {}


def reference(
    script: Script, undisturbed: dict[str, list[Point]], jobs: Callable[..., Job]
) -> list[Point]:
    if script.name not in undisturbed:
        run = Run(jobs(), script)
        run.start(nnodes="1", nproc=2)
        undisturbed[script.name] = run.finish()
    return undisturbed[script.name]


EACH = os.environ.get("TEST_FAULTS") == "each"
CASES = [
    pytest.param(script, name, id=f"{script.name}-{name}")
    for script in SCRIPTS
    if EACH or not script.name.startswith("with_")
    for name in (faults(script) if EACH else ["all"])
]


@pytest.mark.parametrize(("script", "fault"), CASES)
def test_the_curve_is_that_of_an_undisturbed_run(
    script: Script,
    fault: str,
    jobs: Callable[..., Job],
    undisturbed: dict[str, list[Point]],
) -> None:
    whole = reference(script, undisturbed, jobs)
    assert [p.step for p in whole] == [*range(1, STEPS + 1)]
    run = Run(jobs(), script)
    run.start()
    run.start()
    for step, act in faults(script)[fault]:
        run.reaches(step)
        act(run)
    curve = run.finish()

    again = sum(n - 1 for n in Counter(p.step for p in curve).values())
    differences = [abs(p.loss - whole[p.step - 1].loss) for p in curve]
    lrs = [abs(p.lr - whole[p.step - 1].lr) for p in curve]
    worlds = sorted({p.world for p in curve})
    print(f"{script.name} {fault}: again {again}, loss {max(differences)}, lr {max(lrs)}, {worlds}")
    assert {p.step for p in curve} == {p.step for p in whole}
    assert again <= run.failures * script.failure + run.changes * script.planned
    assert max(lrs) <= 1e-12
    if script.tolerance is None:
        assert mean(p.loss for p in curve[-10:]) < mean(p.loss for p in whole[-10:]) + 0.1
    else:
        assert max(differences) <= script.tolerance
    assert list(run.job.directory.glob("model*"))
