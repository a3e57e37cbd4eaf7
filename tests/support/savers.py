"""Jobs of scripts that are restarted, with checkpoints in memory: what their workers have said."""

import re
import signal
from collections.abc import Callable
from pathlib import Path

from tests.support.job import TRAINERS, Agent, Job
from tests.support.processes import send

PATIENCE = 120
LATE = {"join_settle": 0, "min_uptime": 0, "suspect_after": 0}


def start(
    job: Job,
    node: str,
    *arguments: str,
    program: Path = TRAINERS / "saver.py",
    nproc: int = 1,
    **flags: object,
) -> Agent:
    """An agent with such a script."""
    script = (str(program), "--dir", str(job.directory), *arguments)
    flags = {"memory_dir": memory_dir(job), **LATE} | flags
    return job.start(node, script=script, nproc=nproc, **flags)  # type: ignore[arg-type]


def memory_dir(job: Job) -> Path:
    """Of all nodes of the job."""
    return job.directory / "memory"


def said(job: Job, what: str) -> list[tuple[int, int, list[int]]]:
    """(generation, rank, numbers) of what workers have said."""
    found = []
    for agent in job.agents:
        lines = re.findall(rf"{what}: generation (\d+) rank (\d+) ([\d ]+)", agent.output)
        found += [(int(g), int(rank), [*map(int, rest.split())]) for g, rank, rest in lines]
    return found


def begun(job: Job, world: int, after: int = 0) -> tuple[int, int, dict[int, int]]:
    """Wait for a world after generation `after`: its generation, its first step, pids by rank."""

    def look() -> tuple[int, int, dict[int, int]] | None:
        begins = [each for each in said(job, "begins") if each[0] > after]
        for g in {g for g, *_ in begins}:
            of_g = {rank: numbers for each, rank, numbers in begins if each == g}
            if len(of_g) == world:
                (step,) = {step for step, _ in of_g.values()}
                return g, step, {rank: pid for rank, (_, pid) in of_g.items()}
        return None

    return job.wait(f"a world of {world} after generation {after}", look, PATIENCE)


def saved(job: Job, generation: int, more: int = 1, rank: int = 0) -> int:
    """Wait until a rank of a generation has saved so often; the last step that it has saved."""

    def steps() -> list[int]:
        found = [numbers[0] for *who, numbers in said(job, "saved") if who == [generation, rank]]
        return found if len(found) >= more else []

    return max(job.wait(f"generation {generation} saves", steps, PATIENCE))


def outlives_a_kill_a_loss_and_a_join(
    job: Job, node: Callable[[str], Agent], world: int, seconds: float = PATIENCE
) -> None:
    """Three nodes, n3 of one worker; a change costs the steps since a checkpoint at most."""
    agents = {name: node(name) for name in ("n1", "n2", "n3")}
    g, step, pids = begun(job, world)
    assert step == 0
    last = saved(job, g, more=2)
    send(signal.SIGKILL, [pids[1]])
    g, step, _ = begun(job, world, after=g)
    assert step >= last > 0
    last = saved(job, g, more=2)
    agents.pop("n3").node_kill()
    g, step, _ = begun(job, world - 1, after=g)
    assert step >= last
    last = saved(job, g, more=2)
    agents["n3"] = node("n3")
    g, step, _ = begun(job, world, after=g)
    assert step >= last
    saved(job, g, more=2)
    job.finish(*agents.values(), seconds=seconds)
