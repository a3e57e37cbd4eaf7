"""Nodes that fail or go again and again: how many times, and for how long they are left out.

They are remembered by name, since a node that comes back is another member. All seconds are
seconds that worlds have trained, so that no clock is needed that outlives a coordinator.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import TypeAlias

from msgspec.structs import replace

from elastic_etcd.core.schema import Member, Suspect
from elastic_etcd.core.words import counted

FIRST = 10.0  # a node that has gone is left out for so long, then for twice as long each time
LONGEST = 600.0  # at most; and whose workers failed, at once
MOST = 32  # names

Suspects: TypeAlias = tuple[Suspect, ...]


def term(suspect: Suspect, after: int) -> float:
    """The seconds for which it is left out; `after` is --suspect-after."""
    if not after:
        return 0.0
    if suspect.failed >= after:
        return LONGEST
    again = suspect.went - after
    return min(LONGEST, FIRST * 2.0 ** min(again, 10)) if again >= 0 else 0.0


def left(suspects: Suspects, node: str, after: int) -> float:
    """The seconds for which `node` is still left out."""
    known = _find(suspects, node)
    return max(0.0, term(known, after) - known.since)


def why_left_out(suspects: Suspects, node: str, after: int) -> str:
    """That `node` is left out, for how long and why; "" if it is not."""
    known, seconds = _find(suspects, node), left(suspects, node, after)
    if not seconds:
        return ""
    times = counted(known.went, "time")
    why = _failed(known) if known.failed >= after else f"it went {times} lately"
    return f"{node} is left out for {seconds:.0f} s of training, {why} (--suspect-after)"


def were_left_out(suspects: Suspects, world: Collection[str], after: int) -> str:
    """The nodes that were no part of the last `world`, and why; "" if there are none."""
    out = [s for s in suspects if after and s.failed >= after and s.node not in world]
    return "".join(f"; {s.node} was left out, {_failed(s)} (--suspect-after)" for s in out)


def _failed(known: Suspect) -> str:
    times = counted(known.failed, "time")
    return f"workers failed {times} right after their start or hung"


def doubted(suspects: Suspects, after: int) -> frozenset[str]:
    """Nodes without which a world begins, if it can: whose workers failed right after their start.

    A node that only goes is left out, too, but costs nothing where a world begins anyway.
    """
    failing = (s.node for s in suspects if s.failed >= after)
    return frozenset(node for node in failing if left(suspects, node, after))


def trusted(
    ready: Sequence[Member], doubt: frozenset[str], last: Iterable[int], least: int
) -> list[Member]:
    """`ready` without nodes in `doubt`, but for as many as `least` needs: survivors of `last`."""
    fit = [m for m in ready if m.node not in doubt]
    survivors = frozenset(last)
    rest = sorted((m for m in ready if m.node in doubt), key=lambda m: m.lease not in survivors)
    return fit + rest[: max(0, least - len(fit))]


# --- what is remembered -------------------------------------------------------------------


def aged(suspects: Suspects, seconds: float, after: int) -> Suspects:
    """The suspects after so much more of training; a node that was good for long is forgotten."""
    older = (replace(s, since=round(s.since + seconds, 3)) for s in suspects if after)
    return tuple(s for s in older if s.since < term(s, after) + LONGEST)


def failed(suspects: Suspects, node: str, *, rapid: bool) -> Suspects:
    """A worker of `node` has failed: a `rapid` one is one more in a row, another ends the row.

    A worker that hung counts like a rapid failure, however long it had trained before.
    """
    known = _find(suspects, node)
    if rapid:
        return _with(suspects, replace(known, failed=known.failed + 1, since=0.0))
    others = tuple(s for s in suspects if s.node != node)
    return (*others, replace(known, failed=0)) if known.went else others


def went(suspects: Suspects, nodes: Iterable[str]) -> Suspects:
    """These nodes are no longer there, though their world was not finished."""
    for node in sorted(set(nodes)):
        known = _find(suspects, node)
        suspects = _with(suspects, replace(known, went=known.went + 1, since=0.0))
    return suspects


def _find(suspects: Suspects, node: str) -> Suspect:
    return next((s for s in suspects if s.node == node), Suspect(node))


def _with(suspects: Suspects, newest: Suspect) -> Suspects:
    """Newest last; of too many the oldest is forgotten."""
    others = (s for s in suspects if s.node != newest.node)
    return (*others, newest)[-MOST:]
