"""Two agents with two DDP workers each train on digits; one is killed, and one added again.

Exits 0 only if the training went through the generations that this must give, and the model
is good.
"""

import asyncio
import re
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from rich.console import Console

from elastic_etcd.core.schema import PREFIX, History, Keys, decode, plain
from elastic_etcd.core.txn import Get
from elastic_etcd.etcd.access import EtcdConfig
from elastic_etcd.etcd.client import Client
from elastic_etcd.etcd.embedded import EmbeddedEtcd

JOB = "demo"
SCRIPT = Path(__file__).parents[1] / "examples" / "digits_ddp.py"
EPOCHS, KILL_AFTER, ADD_AFTER = 280, 30, 30
SHOWN_EPOCHS = 10  # every tenth of them
PATIENCE = 120.0
COLOURS = {"blue": "blue", "green": "green"}

console = Console(highlight=False, soft_wrap=True)


class Node:
    """An agent, whose lines go to a queue that all nodes share; None: it has ended."""

    def __init__(self, name: str, lines: "asyncio.Queue[tuple[str, str | None]]") -> None:
        self.name = name
        self._lines = lines

    async def start(self, endpoint: str, directory: str) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "elastic_etcd.launch"),
            *("--etcd", endpoint, "--job", JOB, "--node-name", self.name),
            # Both are waited for, also where one of them starts slowly.
            *("--nnodes", "1:2", "--nproc-per-node", "2", "--settle", str(PATIENCE / 2)),
            *(SCRIPT, "--epochs", str(EPOCHS), "--checkpoint-dir", directory),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout
        async for line in self.process.stdout:
            self._lines.put_nowait((self.name, line.decode(errors="replace").rstrip()))
        self._lines.put_nowait((self.name, None))

    def stop(self) -> None:
        if self.process.returncode is None:
            self.process.kill()


class Demo:
    """The job, shown on the console while it runs."""

    def __init__(self, endpoint: str, directory: str) -> None:
        self._endpoint, self._directory = endpoint, directory
        self._lines: asyncio.Queue[tuple[str, str | None]] = asyncio.Queue()
        self._nodes: list[Node] = []
        self._speaking = 0  # nodes whose output has not ended

    async def add(self, name: str) -> Node:
        node = Node(name, self._lines)
        await node.start(self._endpoint, self._directory)
        self._nodes.append(node)
        self._speaking += 1
        return node

    async def epoch(self, world: int, at_least: int) -> int:
        """Wait until a world of this size has trained so many epochs in all; how many."""
        async for line in self._shown():
            found = re.search(r"epoch (\d+)/\d+  world (\d+)", line)
            if found and int(found[2]) == world and int(found[1]) >= at_least:
                return int(found[1])
        raise RuntimeError(f"the training ended before a world of {world} had trained enough")

    async def accuracy(self) -> float:
        """Wait for the end of the training."""
        async for line in self._shown():
            found = re.search(r"accuracy (\d\.\d+)", line)
            if found:
                return float(found[1])
        raise RuntimeError("the training ended without a result")

    async def ended(self, node: Node) -> int:
        """Wait for an agent's end; its exit status."""
        async with asyncio.timeout(PATIENCE):
            return await node.process.wait()

    async def _shown(self) -> AsyncIterator[str]:
        """The lines of all nodes, shown as they come, until no node is left."""
        while self._speaking:
            async with asyncio.timeout(PATIENCE):
                name, line = await self._lines.get()
            if line is None:
                self._speaking -= 1
                continue
            if worth_showing(line):
                console.print(f"  {line}", style=COLOURS[name], markup=False)
            yield line

    def stop(self) -> None:
        for node in self._nodes:
            node.stop()


def worth_showing(line: str) -> bool:
    """Every tenth epoch; of a traceback (torch writes [rank0]: before its lines) only the error."""
    epoch = re.search(r"epoch (\d+)/", line)
    if epoch:
        return int(epoch[1]) % SHOWN_EPOCHS == 0
    return not re.search(r"\[rank\d+\]: (Traceback| )", line)


async def history(endpoint: str) -> list[dict[str, Any]]:
    """What etcd has kept of the job's generations, oldest first; shown as `events` shows it."""
    keys = Keys(f"{PREFIX}/{JOB}")
    async with Client(EtcdConfig((endpoint,))) as client:
        found = await client.range(Get(keys.history(), prefix=True), timeout=10)
    say(f"elastic-etcd events {JOB}")
    command = (sys.executable, "-m", "elastic_etcd", "events", JOB, "--etcd", endpoint)
    await (await asyncio.create_subprocess_exec(*command)).wait()
    entries = (plain(decode(History, kv.value)) for kv in found.kvs.values())
    return sorted(entries, key=lambda entry: entry["generation"])


def say(text: str) -> None:
    console.print(f"\n[bold]{text}[/]")


async def show(endpoint: str, directory: str) -> list[str]:
    """Run the demo; what went otherwise than it must."""
    demo = Demo(endpoint, directory)
    try:
        say("Two nodes, blue and green, start two workers each.")
        blue, green = await demo.add("blue"), await demo.add("green")
        epochs = await demo.epoch(world=4, at_least=KILL_AFTER)
        say("green is killed (SIGKILL). blue goes on alone when green's connection has ended.")
        green.process.kill()
        epochs = await demo.epoch(world=2, at_least=epochs + ADD_AFTER)
        say("green is started again, and taken in.")
        green = await demo.add("green")
        await demo.epoch(world=4, at_least=epochs)
        accuracy = await demo.accuracy()
        codes = [await demo.ended(node) for node in (blue, green)]
    finally:
        demo.stop()
    entries = await history(endpoint)
    say(f"The model's accuracy is {accuracy:.1%}; the agents exited {codes[0]} and {codes[1]}.")
    worlds = [entry["world_size"] for entry in entries]
    return [
        *([] if accuracy > 0.9 else [f"accuracy {accuracy} is not above 0.9"]),
        *([] if codes == [0, 0] else [f"exit codes {codes} instead of 0"]),
        *([] if worlds == [4, 2, 4] else [f"worlds of {worlds} instead of 4, 2 and 4 workers"]),
    ]


async def main() -> int:
    with tempfile.TemporaryDirectory(prefix="elastic_etcd-demo-") as directory:
        async with EmbeddedEtcd() as etcd:
            say(f"An etcd of our own runs at {etcd.endpoint}.")
            wrong = await show(etcd.endpoint, directory)
    for what in wrong:
        console.print(f"[bold red]Not as it must be:[/] {what}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
