"""The flight recorder: the last events of an agent's lifecycle, and the actions that followed.

The agent's loop records each event before it steps through it, so that a step that raises is in
the record, too. `write` makes a file of one JSON object a line, which tests/support/replay.py steps
through once more.
"""

import tempfile
from collections import deque
from pathlib import Path

import msgspec

from elastic_etcd.core import lifecycle

STEPS = 10_000
_FINDINGS = 1_000  # of followers, which change no state: a viewer has one told every second
_MEMBERS = 1_000_000  # in the views of all steps together: some 20 MB


class Head(msgspec.Struct):
    """The first line of a file: what the first step began with."""

    state: lifecycle.State | None  # None: nothing was recorded


class Step(msgspec.Struct):
    """Each other line: a step's event, and its actions (None: it raised)."""

    at: float  # on the agent's monotonic clock, in seconds
    event: lifecycle.Event
    actions: list[lifecycle.Action] | None = None


class FlightRecorder:
    """The last STEPS steps, fewer if their views are of a very large job.

    Findings of followers have a room of their own, so that they push nothing else out, and without
    the state, which none of them changes.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[lifecycle.State, Step]] = deque()
        self._findings: deque[Step] = deque(maxlen=_FINDINGS)
        self._members = 0

    def record(self, before: lifecycle.State, at: float, event: lifecycle.Event) -> Step:
        """Remember a step that is about to be made; its actions are the caller's to add."""
        step = Step(at, event)
        if isinstance(event, lifecycle.Finding | lifecycle.Published):
            self._findings.append(step)
            return step
        self._steps.append((before, step))
        self._members += _size(event)
        while len(self._steps) > STEPS or self._members > _MEMBERS:
            _, oldest = self._steps.popleft()
            self._members -= _size(oldest.event)
        return step

    def write(self, folder: str | None = None) -> Path:
        """Write a new file in `folder`, by default that for temporary files. Raises OSError.

        In any thread: what is recorded meanwhile is left out.
        """
        kept, findings = list(self._steps), list(self._findings)
        head = Head(kept[0][0] if kept else None)
        steps = [step for _, step in kept]
        steps += [finding for finding in findings if steps and finding.at >= steps[0].at]
        steps.sort(key=lambda step: step.at)
        descriptor, name = tempfile.mkstemp(".jsonl", "elastic_etcd-flight-", folder)
        with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor
            file.write(lifecycle.to_json(head) + b"\n")
            file.writelines(lifecycle.to_json(step) + b"\n" for step in steps)
        return Path(name)


def _size(event: lifecycle.Event) -> int:
    return len(event.view.members) if isinstance(event, lifecycle.ViewChanged) else 0
