"""Steps the file of a flight recorder through `step` once more, and shows the first difference.

python -m tests.support.replay FILE
"""

import argparse
import gzip
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elastic_etcd.agent.followers.recorder import Head, Step
from elastic_etcd.core.lifecycle import from_json, step
from tests.support import version_1


def replay(path: Path) -> str:
    """The first step whose actions are others than the recorded ones, "" if none is.

    Raises ValueError for a file that no flight recorder has written.
    """
    return next((text for _, text in differences(path)), "")


def differences(path: Path) -> Iterator[tuple[int, str]]:
    """The lines whose steps have other actions than the recorded ones, and what is different.

    The file may be compressed (`.gz`). Raises ValueError, as above.
    """
    content = path.read_bytes()
    content = gzip.decompress(content) if path.suffix == ".gz" else content
    old = version_1.is_of_it(content)
    head, *lines = map(version_1.converted, content.splitlines()) if old else content.splitlines()
    state = from_json(Head, head).state
    for number, line in enumerate(lines, 2):
        entry = from_json(Step, line)
        assert state is not None
        try:
            state, actions = step(state, entry.event, entry.at)
        except Exception as error:
            if entry.actions is None:
                yield number, f"line {number}: {entry.event}\n  as recorded, it raises {error!r}"
                return
            raise
        both: list[Any] = [actions, entry.actions]
        if old:
            both = [version_1.in_short(each, state.limits) for each in both]
        if both[0] != both[1]:
            recorded = "it raised" if entry.actions is None else entry.actions
            text = (
                f"line {number}: {entry.event}\n"
                f"  recorded: {recorded}\n"
                f"  now:      {actions}\n"
                f"  state:    {state}"
            )
            yield number, text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, help="elastic_etcd-flight-....jsonl, or compressed")
    difference = replay(parser.parse_args().file)
    print(difference or "each step has the recorded actions")
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main())
