"""The scenarios in this folder: what agents see and do, in plain text.

`REWRITE=1 python -m pytest tests/scenarios` writes what happens now into the files;
read the difference before it is committed.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scenarios.commands import Commands

FILES = sorted(Path(__file__).parent.glob("*.txt"))


def played(text: str) -> Iterator[str]:
    """The text with what happens after each "----", up to the next empty line."""
    commands = Commands()
    happened: list[str] = []
    expected = False
    for line in text.splitlines():
        if expected and line:
            continue
        expected = line == "----"
        yield line
        if expected:
            yield from happened or ["(nothing)"]
            happened = []
        elif line and not line.startswith("#"):
            happened += commands.do(line)
    assert not happened, f"nothing is expected of the last commands: {happened}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_scenario(file: Path) -> None:
    text = file.read_text()
    new = "\n".join(played(text)) + "\n"
    if os.environ.get("REWRITE"):
        file.write_text(new)
    assert new == text


def test_there_are_scenarios() -> None:
    assert len(FILES) > 20
