"""Everything of a job, read at one etcd revision, as immutable values.

Only the coordinator's view covers all of the job's keys. Everybody else's is narrow: the
round, the ledger, the outcome, the lines about hangs and stragglers, what people want and whether
they look, one page of the world, the coordinator's member key and the agent's own.
"""

from collections.abc import Mapping
from functools import lru_cache
from itertools import count, takewhile
from operator import attrgetter
from typing import TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from elastic_etcd.core import schema
from elastic_etcd.core.txn import Get, KeyValue, Snapshot

V = TypeVar("V", bound=schema.Value)
_BY_LEASE = attrgetter("lease")
_BY_RANK = attrgetter("group_rank")
# Parts of a key in a folder by generations.
_DEPTH = {"acks": 3, "reports": 3, "steps": 3, "history": 2}
_SHOWN = 256  # characters of a key, and of what is wrong with it


class Narrow(Struct, frozen=True, tag=True):
    """The keys that a job has once, one page, the own member key and a coordinator's."""

    coordinator: int | None = None  # its lease, as far as it is known
    page: int = 0


class Everything(Struct, frozen=True, tag=True):
    """All of the job's keys."""


Coverage: TypeAlias = Narrow | Everything


class View(Struct, frozen=True):
    """The job as one agent sees it. The `_mod` fields fence writes: 0 means no such key."""

    revision: int
    coverage: Coverage
    round: schema.Round | None = None
    round_mod: int = 0
    ledger: schema.Ledger = schema.Ledger()
    ledger_mod: int = 0
    coordinator: schema.Member | None = None
    members: tuple[schema.Member, ...] = ()
    page: schema.Page | None = None  # the one on which the agent is, if it takes part
    world: tuple[schema.Participant, ...] = ()  # the last one, in rank order
    acks: tuple[schema.Ready, ...] = ()
    reports: tuple[schema.Report, ...] = ()
    spec: schema.Spec | None = None
    outcome: schema.Outcome | None = None
    outcome_mod: int = 0  # of one that can't be read
    hang: schema.Hang | None = None
    hang_mod: int = 0
    wanted: schema.Requests | None = None
    wanted_mod: int = 0
    watched: schema.Watched | None = None
    stragglers: schema.Stragglers | None = None
    stragglers_mod: int = 0
    divergence: schema.Divergence | None = None
    steps: tuple[schema.NodeSteps, ...] = ()  # of the generation that trains
    step_times: tuple[schema.StepTime, ...] = ()  # of whatever generation each is
    unfit: tuple[schema.Unfit, ...] = ()  # nodes that were kept out lately
    history: tuple[tuple[int, str], ...] = ()
    acked: tuple[int, ...] = ()
    reported: tuple[int, ...] = ()
    stepped: tuple[int, ...] = ()
    unread: tuple[str, ...] = ()  # leases whose ack or report of now can't be read
    malformed: tuple[str, ...] = ()
    newer: int = 0  # a format version above ours that the run has or asks for

    @property
    def last(self) -> int:
        """The generation of the last world."""
        if self.round and self.round.phase is schema.Phase.FINAL:
            return self.round.generation
        return self.ledger.final

    @property
    def restarts(self) -> int:
        """The restarts that are used: a final round, which is seen before its ledger, has them."""
        now = self.round
        return (now if now and now.phase is schema.Phase.FINAL else self.ledger).restarts

    @property
    def trains(self) -> int:
        """The generation whose world trains; 0: none does, or its end is near.

        A world that ends for newcomers alone trains until its step is over.
        """
        now = self.round
        if now is None:
            return 0
        if now.phase is schema.Phase.FINAL:
            return now.generation
        return self.ledger.final if now.joins and now.phase is schema.Phase.JOINABLE else 0

    def part(self, lease: int) -> schema.Participant | None:
        """The member with `lease` in the last world, as far as it is known here."""
        return next((p for p in self.participants if p.lease == lease), None)

    @property
    def participants(self) -> tuple[schema.Participant, ...]:
        """Those of the last world, as far as they are known here."""
        return self.page.participants if self.page else self.world


def without(view: View, lease: int) -> View:
    """The view as it is once the key of this member is gone."""
    leads = view.coordinator is not None and view.coordinator.lease == lease
    members = tuple(member for member in view.members if member.lease != lease)
    return replace(view, members=members, coordinator=None if leads else view.coordinator)


def covered(keys: schema.Keys, coverage: Coverage, lease: int = 0) -> tuple[Get, ...]:
    """The keys that the member with `lease` mirrors: a constant number, unless everything."""
    if isinstance(coverage, Everything):
        return (Get(keys.root + "/", prefix=True),)
    own, page = Get(keys.member(lease)), Get(keys.page(coverage.page))
    whole = (keys.round, keys.ledger, keys.outcome, keys.hang, keys.wanted, keys.watched)
    watched = (*map(Get, whole), Get(keys.stragglers), page, own)
    if coverage.coordinator in (None, lease):
        return watched
    return (*watched, Get(keys.member(coverage.coordinator)))


def view_of(snapshot: Snapshot, keys: schema.Keys, coverage: Coverage) -> View:
    """The view that `snapshot` of those keys shows; members of other runs are left out."""
    bad: list[str] = []
    kvs = snapshot.kvs
    now = _value(schema.Round, kvs.get(keys.round), bad)
    outcome = _value(schema.Outcome, kvs.get(keys.outcome), bad)
    spec = _value(schema.Spec, kvs.get(keys.spec), bad)
    leader = kvs.get(keys.member(now.coordinator)) if now else None
    view = View(
        revision=snapshot.revision,
        coverage=coverage,
        round=now,
        round_mod=_mod(kvs.get(keys.round)),
        ledger=_value(schema.Ledger, kvs.get(keys.ledger), bad) or schema.Ledger(),
        ledger_mod=_mod(kvs.get(keys.ledger)),
        coordinator=_value(schema.Member, leader, bad),
        members=_members(kvs, keys, spec, bad),
        spec=spec,
        outcome=outcome,
        outcome_mod=0 if outcome else _mod(kvs.get(keys.outcome)),
        hang=_value(schema.Hang, kvs.get(keys.hang), bad),
        hang_mod=_mod(kvs.get(keys.hang)),
        wanted=_value(schema.Requests, kvs.get(keys.wanted), bad),
        wanted_mod=_mod(kvs.get(keys.wanted)),
        watched=_value(schema.Watched, kvs.get(keys.watched), bad),
        stragglers=_value(schema.Stragglers, kvs.get(keys.stragglers), bad),
        stragglers_mod=_mod(kvs.get(keys.stragglers)),
    )
    match coverage:
        case Everything():
            view = _with_parts(view, kvs, keys, bad)
        case Narrow(page=number):
            view = replace(view, page=_value(schema.Page, kvs.get(keys.page(number)), bad))
    return replace(view, malformed=tuple(bad), newer=_newer(kvs, keys))


def _newer(kvs: Mapping[str, KeyValue], keys: schema.Keys) -> int:
    """The highest format version that the run is written in or asks for, 0 if it is known here.

    To this version such a run looks absent, so that it would begin anew over a job that lives. A
    node that alone writes a newer format takes no part, and ends nobody.
    """
    once = (keys.spec, keys.round, keys.ledger, keys.outcome)
    newest = max((_format_of(kvs[key]) for key in once if key in kvs), default=0)
    return newest if newest > schema.VERSION else 0


def _members(
    kvs: Mapping[str, KeyValue], keys: schema.Keys, spec: schema.Spec | None, bad: list[str]
) -> tuple[schema.Member, ...]:
    start = keys.members
    found = (_value(schema.Member, kv, bad) for key, kv in kvs.items() if key.startswith(start))
    own = [m for m in found if m and (spec is None or m.run == spec.run)]
    return tuple(sorted(own, key=_BY_LEASE))


def _with_parts(view: View, kvs: Mapping[str, KeyValue], keys: schema.Keys, bad: list[str]) -> View:
    """The view with the world, acks, reports, steps and history, for the coordinator only."""
    now, found = view.round, _by_generation(kvs, keys)
    ready = found["acks"].get(now.generation, []) if now else []
    steps, _ = _read_all(schema.NodeSteps, found["steps"].get(view.trains, []), bad)
    times = [kv for key, kv in kvs.items() if key.startswith(keys.step_times)]
    step_times, _ = _read_all(schema.StepTime, times, bad)
    kept_out = [kv for key, kv in kvs.items() if key.startswith(keys.unfit)]
    unfit, _ = _read_all(schema.Unfit, kept_out, bad)
    acks, no_acks = _read_all(schema.Ready, ready, bad)
    reports, no_reports = _read_all(schema.Report, found["reports"].get(view.last, []), bad)
    awaited = {
        schema.Phase.JOINABLE: no_acks,
        schema.Phase.FINAL: no_reports,
    }  # in other phases nobody waits
    return replace(
        view,
        world=_world(view, kvs, keys, bad),
        acks=tuple(sorted(acks, key=_BY_LEASE)),
        reports=tuple(sorted(reports, key=lambda r: (r.revision, r.lease))),
        history=tuple(sorted((g, kv.value) for g, (kv,) in found["history"].items())),
        acked=tuple(sorted(found["acks"])),
        reported=tuple(sorted(found["reports"])),
        steps=tuple(sorted(steps, key=_BY_LEASE)),
        stepped=tuple(sorted(found["steps"])),
        step_times=tuple(sorted(step_times, key=_BY_LEASE)),
        unfit=tuple(sorted(unfit, key=attrgetter("node"))),
        divergence=_value(schema.Divergence, kvs.get(keys.divergence), bad),
        unread=tuple(sorted(awaited.get(now.phase, []))) if now else (),
    )


def _world(
    view: View, kvs: Mapping[str, KeyValue], keys: schema.Keys, bad: list[str]
) -> tuple[schema.Participant, ...]:
    """The last world from all of its pages, in rank order, without what is left of older ones."""
    on = takewhile(kvs.__contains__, map(keys.page, count()))
    found = (_value(schema.Page, kvs[key], bad) for key in on)
    pages = [page for page in found if page and page.generation == view.last]
    world = [participant for page in pages for participant in page.participants]
    return tuple(sorted(world, key=_BY_RANK))


def _by_generation(
    kvs: Mapping[str, KeyValue], keys: schema.Keys
) -> dict[str, dict[int, list[KeyValue]]]:
    """The keys that belong to a generation, by the folder that they are in."""
    found: dict[str, dict[int, list[KeyValue]]] = {folder: {} for folder in _DEPTH}
    start = len(keys.root) + 1
    for key, kv in kvs.items():
        folder, generation = _folder_and_generation(key, start)
        if folder:
            found[folder].setdefault(generation, []).append(kv)
    return found


@lru_cache(maxsize=1 << 16)
def _folder_and_generation(key: str, start: int) -> tuple[str, int]:
    """The folder and generation of a key below a job's, "" where it has none."""
    parts = key[start:].split("/", 3)
    generation = schema.decimal(parts[1]) if _DEPTH.get(parts[0]) == len(parts) else None
    return ("", 0) if generation is None else (parts[0], generation)


def _read_all(kind: type[V], kvs: list[KeyValue], bad: list[str]) -> tuple[list[V], list[str]]:
    """The values of these keys, and the leases of those that can't be read."""
    values, unread = [], []
    for kv in kvs:
        if value := _value(kind, kv, bad):
            values.append(value)
        else:
            unread.append(kv.key.rpartition("/")[2])
    return values, unread


# --- values -------------------------------------------------------------------------------


def _mod(kv: KeyValue | None) -> int:
    return kv.mod if kv else 0


def _value(kind: type[V], kv: KeyValue | None, bad: list[str]) -> V | None:
    """The value of a key; None if it is absent, or, with a line in `bad`, can't be read."""
    if kv is None:
        return None
    decode_once = _decode_of_node if kind.FROM_KEY else _decode_of_job
    try:
        value: V = decode_once(kind, kv)
    except ValueError as error:
        bad.append(f"{kv.key[:_SHOWN]}: {str(error)[:_SHOWN]}")
        return None
    return value


def _decode(kind: type[V], kv: KeyValue) -> V:
    if not kind.FROM_KEY:
        return schema.decode(kind, kv.value)
    lease = schema.unhexed(kv.key.rpartition("/")[2])
    from_key = {"lease": lease, "revision": kv.mod}
    return schema.decode(kind, kv.value, **{name: from_key[name] for name in kind.FROM_KEY})


# Values change far less often than views are made: each is decoded once. A job has many nodes, and
# few keys beside theirs, whose values may be long: a page of the world.
_decode_of_node, _decode_of_job = lru_cache(1 << 16)(_decode), lru_cache(1 << 8)(_decode)


@lru_cache(maxsize=1 << 16)
def _format_of(kv: KeyValue) -> int:
    return schema.format_of(kv.value)
