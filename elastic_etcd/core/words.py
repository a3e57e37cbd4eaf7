"""The words that all texts share: numbers with their nouns, names of many, ends of processes."""

import signal
from collections.abc import Iterator, Mapping, Sequence

NAMED = 3  # of many, in a line


def counted(number: int, one: str, many: str = "") -> str:
    """`1 step`, `2 steps`; `many` is for what gets no s."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def listed(names: Sequence[str], on: str = "") -> str:
    """`n1`, `n1 and n2`; of many nodes the first few, and how many more."""
    more = len(names) - NAMED
    *first, last = (*names[:NAMED], on + counted(more, "more node")) if more > 0 else names
    return " and ".join(filter(None, (", ".join(first), last)))


def fields(record: Mapping[str, object]) -> Iterator[str]:
    """Each field of a record that says something, by its name in JSON: `stop 0.75`.

    None is `unknown`; what is empty or 0 is left out, and lists, which are for programs only.
    """
    for name, value in record.items():
        if isinstance(value, Mapping):
            if within := ", ".join(fields(value)):
                yield f"{name} ({within})"
        elif value is None:
            yield f"{name} unknown"
        elif value and not isinstance(value, list):
            yield f"{name} {value}"


def shown(size: int) -> str:
    """A number of bytes: `1.50 GiB`."""
    return f"{size / (1 << 30):.2f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.2f} MiB"


def ended(code: int) -> str:
    """The end of a process with this exit code: `exited 1`, `was killed by SIGKILL`."""
    return f"exited {code}" if code >= 0 else f"was killed by {signal_name(-code)}"


def signal_name(number: int) -> str:
    """`SIGKILL`; `signal 40` for one of those that have no name."""
    known = number in set(signal.Signals)
    return signal.Signals(number).name if known else f"signal {number}"
