"""The recipes of docs/frameworks.md, as they stand there: a killed worker, a killed node, a join.

By default those of three frameworks; with TEST_FAULTS=each that of DeepSpeed, too, which needs a
C++ compiler and an environment of its own.
"""

import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.accelerate_recipe import FILE, PAGE, variables
from tests.support.job import Agent, Job
from tests.support.processes import send
from tests.support.savers import LATE, memory_dir
from tests.support.venv import FRAMEWORKS, venv_or_skip

pytestmark = [
    pytest.mark.timeout(1800),  # the first time, pip has to download
    pytest.mark.nightly(part="frameworks"),
]

RECIPES = dict(
    re.findall(
        r"^## (\S+)[^\n]*$(?:(?!^## ).)*?```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE
    )
)
PATIENCE = 300
EVERY = 10  # steps between two checkpoints
STEP = re.compile(r"step (\d+): generation (\d+) rank (\d+) of (\d+) pid (\d+)")
PRELOAD = {
    "accelerate": "accelerate",
    "Lightning": "lightning.pytorch",
    "transformers": "transformers.trainer",
    "DeepSpeed": "deepspeed",
    "ee.run": "accelerate",
}
DEEPSPEED = (
    "torch==2.13.0",
    "deepspeed==0.19.*",
    "grpcio",
    "protobuf",
    "tenacity",
    "msgspec",
    "xxhash",
)
EACH = os.environ.get("TEST_FAULTS") == "each"


class Run:
    """A job of one recipe."""

    def __init__(self, job: Job, framework: str) -> None:
        self.job, self.framework = job, framework
        names = ("deepspeed", *DEEPSPEED, "rich")
        self.python = venv_or_skip(
            *(names if framework == "DeepSpeed" else ("frameworks", *FRAMEWORKS))
        )
        (job.directory / "train.py").write_text(RECIPES[framework])
        shutil.copy(Path(__file__).with_name("mine.py"), job.directory)

    def start(self, node: str) -> Agent:
        flags: dict[str, Any] = LATE | {"preload": PRELOAD[self.framework]}
        env = {"OMP_NUM_THREADS": "1"}
        if self.framework == "accelerate":
            env |= variables(FILE, self.python, self.job.directory)
        return self.job.start(
            node,
            nnodes="1:2",
            python=self.python,
            script=("train.py",),
            env=env,
            memory_dir=memory_dir(self.job),
            lease_ttl=20,  # the machine may be busy
            **flags,
        )

    def steps(self) -> list[tuple[int, ...]]:
        """(step, generation, rank, world size, pid) of each step of each rank."""
        output = "".join(agent.output for agent in self.job.agents)
        return [tuple(map(int, found)) for found in STEP.findall(output)]

    def trains(self, world: int, after: int) -> tuple[int, int, dict[int, int]]:
        """Wait for a checkpoint of a later generation; that, its first step, its pids by rank."""

        def look() -> tuple[int, int, dict[int, int]] | None:
            mine = [step for step in self.steps() if step[1] > after and step[3] == world]
            for g in {g for _, g, *_ in mine}:
                first = min(step for step, each, *_ in mine if each == g)
                pids = {rank: pid for _, each, rank, _, pid in mine if each == g}
                done = max(step for step, each, *_ in mine if each == g) - first
                if len(pids) == world and done >= EVERY + 3:
                    return g, first, pids
            return None

        return self.job.wait(f"a world of {world} after generation {after}", look, PATIENCE)

    def last(self) -> int:
        return max(step for step, *_ in self.steps())


@pytest.mark.parametrize("framework", [each for each in PRELOAD if EACH or each != "DeepSpeed"])
def test_a_recipe_outlives_a_worker_a_node_and_a_join(job: Job, framework: str) -> None:
    run = Run(job, framework)
    agents = {name: run.start(name) for name in ("n1", "n2")}
    g, first, pids = run.trains(2, after=0)
    assert first == 1

    last, survivor = run.last(), pids[0]
    send(signal.SIGKILL, [pids[1]])
    g, first, pids = run.trains(2, after=g)
    assert first >= last - EVERY
    assert (pids[0] == survivor) == (framework == "ee.run")

    (lost,) = [name for name, agent in agents.items() if pids[0] in agent.others()]
    last = run.last()
    agents.pop(lost).node_kill()
    g, first, _ = run.trains(1, after=g)
    assert first >= last - EVERY

    last = run.last()
    agents["n3"] = run.start("n3")
    g, first, _ = run.trains(2, after=g)
    assert first >= last - EVERY
    (job.directory / "fast").touch()
    for agent in agents.values():
        job.exits(agent, 0, PATIENCE)
