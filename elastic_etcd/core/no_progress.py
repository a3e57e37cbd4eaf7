"""Restarts that come no further than those before: they end a job that would go on so for hours.

A failure makes progress if it comes at a place of the training beyond the furthest at which any
failure came: after a newer commit, or more steps after the same one. Failures count where they use
a restart, a hang like any other. Nodes that are lost, leave, join or are left out, and their
victims, neither count nor are they progress. Nor is a failure without a place, as of a script that
tells none, or of one that had not come to its training in this world: for minutes a file server
or a network may fail every start, and --max-restarts bounds that.
"""

from collections.abc import Iterable, Sequence
from itertools import takewhile

from msgspec import UNSET
from msgspec.structs import replace

from elastic_etcd.core.schema import Failure, TrainingPlace
from elastic_etcd.core.words import counted, signal_name

_LONGEST = 200  # characters of an error that is kept
_SHOWN = 4  # indices of a batch that are named


def noted(before: tuple[Failure, ...], failure: Failure, most: int) -> tuple[Failure, ...]:
    """The failure that came furthest and those since, with this one, in short.

    `before` are those until now. `most` is --stop-after-no-progress: with 0 nothing is remembered.
    """
    if not most or not failure.place:
        return before
    error = failure.last_words[:_LONGEST]
    short = replace(failure, message=error, pid=0, uptime=0.0, at="", step=UNSET)
    furthest = before[0].place if before else UNSET
    if not furthest or _is_further(failure.place, furthest):
        return (short,)
    return (before[0], *before[1:], short)[: most + 1]


def why_final(stalled: Sequence[Failure], most: int) -> str:
    """The reason for which the job ends, "" while restarts make progress."""
    if not most or len(stalled) <= most:
        return ""
    restarts = counted(most, "restart has", "restarts in a row have")
    told = in_common(stalled[-most:]) or "these failures have nothing in common"
    return f"{restarts} come no further (--stop-after-no-progress); {told}"


def repeated(stalled: Sequence[Failure]) -> str:
    """The last failures that came at one place by one error, in words; "" if they did not."""
    if not stalled:
        return ""
    place, error = _step(stalled[-1]), _error(stalled[-1])
    alike = takewhile(lambda f: (_step(f), _error(f)) == (place, error), reversed(stalled))
    return in_common(failures) if len(failures := [*alike]) > 1 else ""


def in_common(failures: Sequence[Failure]) -> str:
    """The facts that are the same in all these failures, in words; "" if none is."""
    rank = _same(f"of rank {f.rank}" for f in failures)
    node = _same(f"on {f.node}" for f in failures)
    who = " ".join(filter(None, (rank, node))) if all(f.node for f in failures) else ""
    error = _same(map(_error, failures))
    facts = [_where(failures), who, f"by {error}" if error else ""]
    told = ", ".join(filter(None, facts))
    were = "failure was" if len(failures) == 1 else f"{len(failures)} failures were"
    return f"the last {were} {told}" if told else ""


def _same(words: Iterable[str]) -> str:
    """The words of all, if these are the same."""
    first, *others = {*words} or {""}
    return "" if others else first


def _is_further(place: TrainingPlace, than: TrainingPlace) -> bool:
    """Whether it is, as far as both are told alike."""
    if (place.commit is UNSET) != (than.commit is UNSET):
        return True
    return (place.commit or 0, place.step) > (than.commit or 0, than.step)


def _where(failures: Sequence[Failure]) -> str:
    """The batch that all were in, or else the step, and the indices that their batches share."""
    places = [f.place for f in failures if f.place]
    batches = ("" if p.batch is UNSET else f"in batch {p.batch} of epoch {p.epoch}" for p in places)
    where = _same(batches) or _same(map(_step, failures))
    first = places[0].indices if places else ()
    shared = [index for index in first if all(index in place.indices for place in places)]
    if not shared:
        return where
    shown = ", ".join(map(str, shared[:_SHOWN])) + (", …" if len(shared) > _SHOWN else "")
    indices = f"{'index' if len(shared) == 1 else 'indices'} {shown}"
    return f"{where} ({indices})" if where else f"in batches with {indices}"


def _step(failure: Failure) -> str:
    """The step at which it came, in words."""
    place = failure.place
    if not place:
        return ""
    if place.commit is UNSET:
        return f"after step {place.step}"
    return f"in step {place.step + 1} after commit {place.commit}"


def _error(failure: Failure) -> str:
    """A hang says of each time how long it was."""
    if failure.hang:
        return "a hang"
    code = signal_name(-failure.code) if failure.code < 0 else f"exit code {failure.code}"
    return failure.last_words[:_LONGEST] or code
