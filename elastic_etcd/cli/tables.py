"""Tables as plain text, for any terminal: names are the last to give way where there is no room."""

from __future__ import annotations

import shutil
import sys
from itertools import takewhile
from typing import TYPE_CHECKING
from unicodedata import east_asian_width

from elastic_etcd.cli.query import in_one_line

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

_CUT = "~"  # in the place of what is left out; an ASCII terminal has it, too
_SHORTEST = 8  # characters of a name
_GAP = "  "
UNBOUNDED = 1 << 20  # columns where nobody has a terminal


def width() -> int:
    """Columns of the terminal that shows what is printed."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else UNBOUNDED


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    room: int,
    *,
    soft: Sequence[int] = (),
    right: Collection[int] = (),
) -> list[str]:
    """The lines of a table in `room` columns of characters; the first column has names.

    soft: the columns that give way first, in this order. right: those of numbers. If that is not
    enough, names are cut where they are alike, then the ends of all lines.
    """
    columns = [[head, *map(in_one_line, cells)] for head, *cells in zip(heads, *rows, strict=True)]

    def over() -> int:
        return sum(_widest(column) + len(_GAP) for column in columns) - len(_GAP) - room

    for at in soft:
        most = max(len(heads[at]), _widest(columns[at]) - max(0, over()))
        columns[at] = [cut(cell, most) for cell in columns[at]]
    head, *names = columns[0]
    if names and over() > 0:
        columns[0] = [head, *told_apart(names, max(_SHORTEST, _widest(names) - over()))]
    placed = []
    for at, column in enumerate(columns):
        widest = _widest(column)
        spaces = [" " * (widest - columns_of(cell)) for cell in column]
        sides = (spaces, column) if at in right else (column, spaces)
        placed.append(["".join(both) for both in zip(*sides, strict=True)])
    return [cut(_GAP.join(cells), room) for cells in zip(*placed, strict=True)]


def _widest(texts: Sequence[str]) -> int:
    return max(map(columns_of, texts))


def columns_of(text: str) -> int:
    """The columns of a terminal that it takes: two for each wide character, as of Chinese."""
    return len(text) + sum(east_asian_width(c) in "FW" for c in text if not c.isascii())


def told_apart(names: Sequence[str], most: int) -> list[str]:
    """These names in so many characters, cut where all are alike, so that none looks as another."""
    head = _alike(names)
    tail = _alike([name[::-1] for name in names])
    if (over := _widest(names) - most) > 0 and (out := min(tail, over + 1)) > 1:
        names = [name[: len(name) - out] + _CUT for name in names]
        head = _alike(names)
    if (over := _widest(names) - most) > 0 and (out := min(head, over + 1)) > 1:
        names = [_CUT + name[out:] for name in names]
    return [cut(name, most) for name in names]


def _alike(names: Sequence[str]) -> int:
    """The number of characters with which all of them begin."""
    return sum(1 for _ in takewhile(lambda each: len(set(each)) == 1, zip(*names, strict=False)))


def cut(text: str, most: int) -> str:
    """A text of at most so many columns."""
    text = text.rstrip()
    if columns_of(text) <= most:
        return text
    text = text[: most - 1]
    while text and columns_of(text) >= most:
        text = text[:-1]
    return text + _CUT
