"""Decides from a run's failures: its budget, back-off, suspects, and when no restart helps.

A freeze notes the end of the last world in the log of the round, which becomes the ledger's when
the round is final (`Past` in schema.py). Each policy is a function of that log:

    budget           restarts_used        the restarts of --max-restarts that are used
    back-off         backoff              seconds before the next start, if workers fail at once
    suspects         doubted, left_out    nodes that had better not take part
    the same error   final_error          another start would only repeat it
    no progress      no_progress          restarts come no further than those before

All times are seconds that worlds of the run have trained, so that no clock outlives a coordinator.
The log has the newest failures of workers, at most MOST_FAILURES, and in the rest of its lines the
newest nodes that went: a rack that goes makes no failure forgotten. A budget may be larger than the
log, so the number of used restarts stands beside it, forgiven all at once.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import takewhile

from msgspec import UNSET
from msgspec.structs import replace

from elastic_etcd.core import schema
from elastic_etcd.core.peers import blames_peers
from elastic_etcd.core.words import counted, signal_name
from elastic_etcd.times import LONGEST_BACKOFF

FIRST = 10.0  # a node that has gone is left out for so long, then for twice as long each time
LONGEST = 600.0  # at most; and whose workers failed, at once
LONG = 600.0  # seconds; a script has trained by then, though nobody may see its steps
_CHARACTERS = 200  # of an error, and of the line that raised it
_SHOWN = 4  # indices of a batch that are named

_USAGE = "elastic_etcd.errors.UsageError: "
_UNREADABLE = ("SyntaxError: ", "IndentationError: ", "TabError: ")
# Another process, also of the world before, may have a device or its memory a while longer.
_BUSY = ("CUDA error", "HIP error", "out of memory")
_FRAME = "  File "


class Suspect(schema.Value, frozen=True):
    """A node that failed or went lately, by name: one that comes back is another member."""

    node: str
    failed: int = 0  # times in a row that a worker of it failed right after its start, or hung
    went: int = 0  # times that it was lost or left
    since: float = 0.0  # seconds that worlds have trained since the last of these


# --- what is noted ------------------------------------------------------------------------


def after(past: schema.Past, seconds: float) -> schema.Past:
    """Return `past` after so much more of training."""
    return replace(past, trained=round(past.trained + seconds, 3))


def with_gone(past: schema.Past, nodes: Iterable[str], limits: schema.Limits) -> schema.Past:
    """Note that these nodes are no longer there, though their world was not finished."""
    if not limits.suspect_after:
        return past
    gone = (
        schema.PastFailure(node, schema.FailureKind.GONE, past.trained) for node in sorted({*nodes})
    )
    return _with(past, *gone)


def with_failure(
    past: schema.Past, failure: schema.Failure, limits: schema.Limits, *, free: bool = False
) -> schema.Past:
    """Note the failure that ended the last world; a `free` one used no restart."""
    error, frame = _error(failure)
    kind = schema.FailureKind.ERROR
    if failure.hang:
        kind, error, frame = schema.FailureKind.HANG, "", ""
    elif blames_peers(failure):
        kind = schema.FailureKind.PEERS
    before = next(_failures(past), None)
    trained = failure.step or seconds_since_restart(past) >= LONG
    early = not trained and (before is None or before.early)
    noted = schema.PastFailure(
        node=failure.node,
        kind=kind,
        at=past.trained,
        rank=failure.rank,
        code=failure.code,
        what=error[:_CHARACTERS],
        frame=frame[:_CHARACTERS] if early else "",
        rapid=failure.uptime < limits.min_uptime,
        early=early,
        free=free,
        place=failure.place if limits.stop_after_no_progress else UNSET,
    )
    return _with(past, noted)


def _with(past: schema.Past, *newest: schema.PastFailure) -> schema.Past:
    """Newest last; of too many the oldest is forgotten."""
    log = (*past.failures, *newest)
    failed = [f for f in log if f.kind is not schema.FailureKind.GONE][-schema.MOST_FAILURES :]
    gone = [f for f in log if f.kind is schema.FailureKind.GONE][len(failed) - schema.MOST_PAST :]
    kept = {id(f) for f in (*failed, *gone)}
    return replace(past, failures=tuple(f for f in log if id(f) in kept))


def _failures(past: schema.Past) -> Iterator[schema.PastFailure]:
    """The failures of workers, newest first."""
    return (f for f in reversed(past.failures) if f.kind is not schema.FailureKind.GONE)


# --- the budget, and back-off -------------------------------------------------------------


def seconds_since_restart(past: schema.Past) -> float:
    """Return how long worlds have trained since a failure used a restart, or in the whole run."""
    return past.trained - next((f.at for f in _failures(past) if not f.free), 0.0)


def restarts_used(past: schema.Past, limits: schema.Limits) -> int:
    """Return the restarts that are used and not forgiven before the next failure is noted."""
    return 0 if seconds_since_restart(past) >= limits.restart_window else past.restarts


def rapid_failures(past: schema.Past) -> int:
    """Return how many workers in a row have failed right after their start."""
    return sum(1 for _ in takewhile(lambda f: f.rapid and not f.free, _failures(past)))


def backoff(past: schema.Past) -> float:
    """Return the seconds before the next start: none after one rapid failure, then 1, 2, 4 ..."""
    rapid = rapid_failures(past)
    return 0.0 if rapid < 2 else min(LONGEST_BACKOFF, 2.0 ** (rapid - 2))


# --- suspects -----------------------------------------------------------------------------


def suspects(past: schema.Past, limits: schema.Limits) -> dict[str, Suspect]:
    """Return the nodes that failed or went lately, by name, in the order of the last time.

    A failure that is not rapid ends a node's row. A node that was good for long is forgotten.
    """
    found: dict[str, Suspect] = {}
    for failure in past.failures if limits.suspect_after else ():
        if not (node := failure.node):
            continue
        since = round(past.trained - failure.at, 3)
        known = found.pop(node, Suspect(node))
        if known.since - since >= _term(known, limits) + LONGEST:
            known = Suspect(node)
        if failure.kind is schema.FailureKind.GONE:
            found[node] = replace(known, went=known.went + 1, since=since)
        elif failure.rapid or failure.kind is schema.FailureKind.HANG:
            found[node] = replace(known, failed=known.failed + 1, since=since)
        elif known.went:
            found[node] = replace(known, failed=0)
    return {node: s for node, s in found.items() if s.since < _term(s, limits) + LONGEST}


def _term(suspect: Suspect, limits: schema.Limits) -> float:
    """The seconds for which it is left out."""
    if suspect.failed >= limits.suspect_after:
        return LONGEST
    again = suspect.went - limits.suspect_after
    return min(LONGEST, FIRST * 2.0 ** min(again, 10)) if again >= 0 else 0.0


def left_out(past: schema.Past, limits: schema.Limits) -> dict[str, float]:
    """Return the nodes that are left out, and for how many seconds still."""
    left = ((s.node, _term(s, limits) - s.since) for s in suspects(past, limits).values())
    return {node: seconds for node, seconds in left if seconds > 0}


def why_left_out(past: schema.Past, node: str, limits: schema.Limits) -> str:
    """Say that `node` is left out, for how long and why; "" if it is not."""
    if not (seconds := left_out(past, limits).get(node)):
        return ""
    known = suspects(past, limits)[node]
    failed = known.failed >= limits.suspect_after
    why = _failed(known) if failed else f"it went {counted(known.went, 'time')} lately"
    return f"{node} is left out for {seconds:.0f} s of training, {why} (--suspect-after)"


def were_left_out(past: schema.Past, world: Collection[str], limits: schema.Limits) -> str:
    """Say which nodes were no part of the last `world`, and why; "" if there are none."""
    known = (s for s in suspects(past, limits).values() if s.failed >= limits.suspect_after)
    out = [s for s in known if s.node not in world]
    return "".join(f"; {s.node} was left out, {_failed(s)} (--suspect-after)" for s in out)


def _failed(known: Suspect) -> str:
    return f"workers failed {counted(known.failed, 'time')} right after their start or hung"


def doubted(past: schema.Past, limits: schema.Limits) -> frozenset[str]:
    """Return the nodes without which a world begins, if it can: whose workers failed at once.

    A node that only goes is left out, too, but costs nothing where a world begins anyway.
    """
    known, out = suspects(past, limits), left_out(past, limits)
    return frozenset(node for node in out if known[node].failed >= limits.suspect_after)


def trusted(
    ready: Sequence[schema.Member], doubt: frozenset[str], last: Iterable[int], least: int
) -> list[schema.Member]:
    """`ready` without nodes in `doubt`, but for as many as `least` needs: survivors of `last`."""
    fit = [m for m in ready if m.node not in doubt]
    survivors = frozenset(last)
    rest = sorted((m for m in ready if m.node in doubt), key=lambda m: m.lease not in survivors)
    return fit + rest[: max(0, least - len(fit))]


# --- an error that another start would only repeat ----------------------------------------


def is_usage_error(failure: schema.PastFailure) -> bool:
    """True if a worker has ended by a UsageError of this package, which says what is wrong."""
    return failure.what.startswith(_USAGE)


def final_error(past: schema.Past) -> str:
    """Say why another start would not help after the newest failure, "" if it may.

    A UsageError says itself what the script does wrong, and a script that can't be read stays so.
    Any other error may be one node's or one moment's. So it has to come twice in a row, the same at
    the same place, before the run has trained any step: what has run once may run again.
    """
    newest, before = [*_failures(past), None][:2]
    if newest is None:
        return ""
    if is_usage_error(newest):
        return "a UsageError, which no restart mends"
    if not _says_why(newest):
        return ""
    if newest.what.startswith(_UNREADABLE):
        return "a script that can't be read, which no restart mends"
    errors = [(f.code, f.what, f.frame) for f in (newest, before) if f and _says_why(f)]
    again = len(errors) == 2 and errors[0] == errors[1]
    return "the same error twice before the first step" if again else ""


def _says_why(failure: schema.PastFailure) -> bool:
    """Whether its error comes from the script, as far as it says, and before any step."""
    told = failure.kind is schema.FailureKind.ERROR and failure.code >= 0 and bool(failure.what)
    return told and failure.early and not any(words in failure.what for words in _BUSY)


def _error(failure: schema.Failure) -> tuple[str, str]:
    """The line of the error that a worker has ended by, and where that was raised, if it says so.

    After a traceback there may be more, such as what is said at exit.
    """
    lines = failure.message.rpartition("Traceback (most recent call last):")[2].splitlines()
    if failure.message.startswith("out of memory: "):
        return failure.message.partition("\n")[0].strip(), ""
    frames = [at for at, line in enumerate(lines) if line.startswith(_FRAME)]
    if not frames:
        return next((line.strip() for line in reversed(lines) if line.strip()), ""), ""
    below = (line for line in lines[frames[-1] :] if line.strip() and not line.startswith(" "))
    return next(below, ""), lines[frames[-1]].strip()


# --- restarts that come no further --------------------------------------------------------


def stalled(past: schema.Past) -> tuple[schema.PastFailure, ...]:
    """Return the failure that came furthest in the training, and those since.

    A failure makes progress if it comes at a place beyond the furthest at which any came: after a
    newer commit, or more steps after the same one. Failures that use a restart count, hangs too. A
    failure without a place counts neither way: a script tells none, or had not come to its training
    in this world, since a file server or a network may fail every start for minutes.
    """
    since: list[schema.PastFailure] = []
    for failure in past.failures:
        if failure.free or not failure.place:
            continue
        furthest = since[0].place if since else UNSET
        if not furthest or _is_further(failure.place, furthest):
            since = []
        since.append(failure)
    return tuple(since)


def no_progress(past: schema.Past, limits: schema.Limits) -> str:
    """Say why the job ends, "" while restarts make progress."""
    most, since = limits.stop_after_no_progress, stalled(past)
    if not most or len(since) <= most:
        return ""
    restarts = counted(most, "restart has", "restarts in a row have")
    told = _in_common(since[-most:]) or "these failures have nothing in common"
    return f"{restarts} come no further (--stop-after-no-progress); {told}"


def repeated(past: schema.Past) -> str:
    """Say that the last failures came at one place by one error; "" if they did not."""
    since = stalled(past)
    if not since:
        return ""
    place, error = _step(since[-1]), _named(since[-1])
    alike = takewhile(lambda f: (_step(f), _named(f)) == (place, error), reversed(since))
    return _in_common(failures) if len(failures := [*alike]) > 1 else ""


def _is_further(place: schema.TrainingPlace, than: schema.TrainingPlace) -> bool:
    """Whether it is, as far as both are told alike."""
    if (place.commit is UNSET) != (than.commit is UNSET):
        return True
    return (place.commit or 0, place.step) > (than.commit or 0, than.step)


def _in_common(failures: Sequence[schema.PastFailure]) -> str:
    """The facts that are the same in all these failures, in words; "" if none is."""
    rank = _same(f"of rank {f.rank}" for f in failures)
    node = _same(f"on {f.node}" for f in failures)
    who = " ".join(filter(None, (rank, node))) if all(f.node for f in failures) else ""
    error = _same(map(_named, failures))
    facts = [_where(failures), who, f"by {error}" if error else ""]
    told = ", ".join(filter(None, facts))
    were = "failure was" if len(failures) == 1 else f"{len(failures)} failures were"
    return f"the last {were} {told}" if told else ""


def _same(words: Iterable[str]) -> str:
    """The words of all, if these are the same."""
    first, *others = {*words} or {""}
    return "" if others else first


def _where(failures: Sequence[schema.PastFailure]) -> str:
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


def _step(failure: schema.PastFailure) -> str:
    """The step at which it came, in words."""
    place = failure.place
    if not place:
        return ""
    if place.commit is UNSET:
        return f"after step {place.step}"
    return f"in step {place.step + 1} after commit {place.commit}"


def _named(failure: schema.PastFailure) -> str:
    """Its error. A hang says of each time how long it was."""
    if failure.kind is schema.FailureKind.HANG:
        return "a hang"
    code = signal_name(-failure.code) if failure.code < 0 else f"exit code {failure.code}"
    return failure.what or code
