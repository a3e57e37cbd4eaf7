"""The tutorials, done as they say: files are written, and lines are typed into terminals.

In a page a block of code with a title is a file, or something in the terminal of that name: what is
typed (`sh`), or what appears there then (`text`), in whatever order; … stands for any text.
"""

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from elastic_etcd.etcd.embedded import free_ports
from tests.support.job import PATIENCE, ROOT
from tests.support.processes import MARK, Changes, command, marked, send

pytestmark = [pytest.mark.timeout(600), pytest.mark.nightly(part="jobs")]

BLOCK = re.compile(r'^```(\w+) title="([^"]+)"\n(.*?)^```$', re.DOTALL | re.MULTILINE)
PORT = "2379"  # in the pages; here it is one that is free


class Terminal:
    """A shell in a folder, and what has appeared on its screen."""

    def __init__(self, folder: Path, name: str, env: dict[str, str]) -> None:
        self._screen = folder / f"{name}.screen"
        self._seen = 0  # so many characters of it
        self._changes = Changes(folder)
        with self._screen.open("wb") as screen:
            self._shell = subprocess.Popen(
                ["bash"], cwd=folder, env=env, stdin=subprocess.PIPE, stdout=screen, stderr=screen
            )

    def type(self, lines: str) -> None:
        assert self._shell.stdin
        self._shell.stdin.write(lines.encode())
        self._shell.stdin.flush()

    def shows(self, lines: str) -> None:
        """Wait until each of these lines has appeared, after those that were waited for before."""
        wanted = [re.compile(pattern(line), re.MULTILINE) for line in lines.splitlines()]

        def ends() -> list[int]:
            text = self.text()
            found = [line.search(text, self._seen) for line in wanted]
            return [each.end() for each in found if each] if all(found) else []

        seen = self._changes.wait(ends, PATIENCE)
        assert seen, f"{self._screen.stem} does not show\n{lines}\nbut\n{self.text()[self._seen :]}"
        self._seen = max(seen)

    def text(self) -> str:
        return self._screen.read_text(errors="replace")

    def leave(self) -> None:
        """When what was typed has ended, which must have gone well."""
        assert self._shell.stdin
        self._shell.stdin.close()
        assert self._shell.wait(PATIENCE) == 0, f"{self._screen.stem}:\n{self.text()}"

    def close(self) -> None:
        self._shell.kill()
        self._shell.communicate()
        self._changes.close()


def pattern(line: str) -> str:
    """Of a whole line; the agent's have the time off a terminal."""
    time = r"(?:20\d\d-\S+Z )?" if line.startswith("elastic_etcd") else ""
    return f"^{time}{'.*'.join(map(re.escape, line.split('…')))}$"


def blocks(page: str) -> list[tuple[str, str, str]]:
    """Language, title and text of each that has a title."""
    return BLOCK.findall((ROOT / "docs" / f"{page}.md").read_text())


@contextmanager
def environment(port: int, peers: int) -> Iterator[dict[str, str]]:
    """Of the terminals, in which `etcd` listens at these ports; nothing of theirs may be left."""
    mark = uuid.uuid4().hex
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peers}"
    own = {
        MARK: mark,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "ETCD_LISTEN_CLIENT_URLS": client,
        "ETCD_ADVERTISE_CLIENT_URLS": client,
        "ETCD_LISTEN_PEER_URLS": peer,
        "ETCD_INITIAL_ADVERTISE_PEER_URLS": peer,
        "ETCD_INITIAL_CLUSTER": f"default={peer}",
    }
    try:
        yield {name: text for name, text in os.environ.items() if "ETCD" not in name} | own
    finally:
        left = {pid: command(pid) for pid in marked(mark)}
        send(signal.SIGKILL, left)
    assert left == {}


@pytest.mark.parametrize(
    "page", ["start", "tutorial_nodes", "tutorial_in_process", "tutorial_sharded"]
)
def test_all_of_it_goes_as_the_page_says(page: str, tmp_path: Path) -> None:
    port, peers = free_ports(2)
    terminals: dict[str, Terminal] = {}
    for _, file, text in (each for each in (*blocks("start"), *blocks(page)) if is_file(each)):
        (tmp_path / file).write_text(text)
    with environment(port, peers) as env, ExitStack() as scope:
        for language, title, text in (each for each in blocks(page) if not is_file(each)):
            if title not in terminals:
                terminals[title] = Terminal(tmp_path, title, env)
                scope.callback(terminals[title].close)
            lines = text.replace(PORT, str(port))
            act = {"sh": terminals[title].type, "text": terminals[title].shows}
            act[language](lines)
        for terminal in terminals.values():
            terminal.leave()


def is_file(block: tuple[str, str, str]) -> bool:
    return block[0] == "python"
