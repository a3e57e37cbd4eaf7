"""A job on the nodes of the compose project, and the cluster of etcd members it meets through."""

import json
import os
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.etcd import tool
from tests.support.invariants import check
from tests.support.job import Job

from .engine import Container

CHECKPOINTS = Path("/checkpoints")
ENDPOINTS = os.environ.get("ELASTIC_ETCD_COMPOSE", "")
TRAINER_UID = 1000  # Dockerfile's
TTL = 4  # seconds; many times what a busy machine delays a keepalive for


class ComposeJob(Job):
    """The job whose id and arguments the nodes read when they start."""

    def __init__(
        self, nodes: dict[str, Container], trainer: str, ttl: int = TTL, step_time: float = 0.1
    ) -> None:
        name = os.urandom(4).hex()
        directory = CHECKPOINTS / name
        super().__init__(None, directory, f"job-{name}")
        self.nodes = nodes
        shutil.copy(trainer, directory)
        os.chown(directory, TRAINER_UID, TRAINER_UID)
        arguments = f"--job {self.name} --nnodes 1:{len(nodes)} --settle 30 --lease-ttl {ttl} "
        arguments += f"{directory / Path(trainer).name} --dir {directory} --step-time {step_time}"
        (CHECKPOINTS / "arguments").write_text(arguments)

    def begin(self) -> int:
        """Start all nodes; the generation in which all of them train."""
        for node in self.nodes.values():
            node.start()
        return self.trains(len(self.nodes), seconds=240)

    def first_step(self, generation: int) -> float:
        """When the slowest rank of a generation had done its first step."""
        first: dict[int, float] = {}
        for e in self.events("step"):
            if e.generation == generation:
                first.setdefault(e.rank, e.time)
        return max(first.values())

    def all_train(self, steps: int, seconds: float) -> None:
        """Wait until every node has done so many more steps in worlds of all of them."""

        def done() -> Counter[str]:
            return Counter(e.node for e in self.events("step") if e.world_size == len(self.nodes))

        before = done()
        self.wait(
            f"all nodes do {steps} more steps",
            lambda: all(done()[node] >= before[node] + steps for node in self.nodes),
            seconds,
        )

    def check(self) -> None:
        """The invariants, which take a pid for one process: here each container has its own."""
        processes = {p: i for i, p in enumerate({(e.node, e.pid): None for e in self.events()})}
        check([replace(e, pid=processes[e.node, e.pid]) for e in self.events()])

    def end(self) -> None:
        """Every node that runs ends with success."""
        self.stop()
        for node in self.nodes.values():
            if node.state()["Running"]:
                node.wait()
                code = node.state()["ExitCode"]
                assert code == 0, f"{node.service}: exit {code}\n{self.account()}"

    def account(self) -> str:
        logs = [f"--- {n.service} {n.state()['Status']}\n{n.output()}" for n in self.nodes.values()]
        return "\n".join([*logs, "--- last events", *map(str, self.events()[-8:])])

    def close(self) -> None:
        for node in self.nodes.values():
            node.kill()
        self._changes.close()


def status(endpoints: str = ENDPOINTS) -> list[dict[str, Any]]:
    """What the members that answer say of themselves."""
    command = [tool("etcdctl"), f"--endpoints={endpoints}", "--command-timeout=2s"]
    done = subprocess.run(
        [*command, "endpoint", "status", "-w", "json"], capture_output=True, text=True, check=False
    )
    found: list[dict[str, Any]] = json.loads(done.stdout or "[]")
    return found


def leader() -> str:
    """The service that leads etcd."""
    (name,) = [
        member["Endpoint"].partition(":")[0]
        for member in status()
        if member["Status"]["header"]["member_id"] == member["Status"]["leader"]
    ]
    return str(name)


def healthy(members: dict[str, Container]) -> None:
    """Wait until all members serve; it takes an election at most."""
    endpoints = ",".join(f"{name}:2379" for name in members)
    command = [tool("etcdctl"), f"--endpoints={endpoints}", "--command-timeout=30s"]
    subprocess.run([*command, "endpoint", "health"], check=True, capture_output=True)
