"""The stories of tests/scenarios: what agents see and do, in plain text.

`REWRITE=1 python -m pytest tests/unit/test_scenarios.py` writes what happens now into the files;
read the difference before it is committed.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scenarios.story import Story

FOLDER = Path(__file__).parents[1] / "scenarios"
FILES = sorted(FOLDER.glob("*.txt"))
STORIES = [pytest.param(f, id=f.stem) for f in FILES]


def told(text: str) -> Iterator[str]:
    """The text with what happens after each "----", up to the next empty line."""
    story = Story()
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
            happened += story.tell(line)
    assert not happened, f"nothing is expected of the last commands: {happened}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_story(file: Path) -> None:
    text = file.read_text()
    new = "\n".join(told(text)) + "\n"
    if os.environ.get("REWRITE"):
        file.write_text(new)
    assert new == text


def test_there_are_stories() -> None:
    assert len(FILES) > 20
