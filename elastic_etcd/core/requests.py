"""Reads what people want of a job, and says what follows from it for a node.

`elastic-etcd drain`, `undrain`, `scale` and `stop` write it into one key, which every agent
mirrors. It is a state and no message: an agent that sees it late, or again, does the same.
"""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from elastic_etcd.core import schema
from elastic_etcd.core.view import View


class Departure(Struct, frozen=True):
    """Says that a node is to go."""

    reason: str
    seconds: float | None = None  # that its workers have; None: as ever
    save: bool = True  # its workers may save


def departure(view: View, run: str, lease: int) -> Departure | None:
    """Whether the member of `run` with that lease is to go."""
    member = next((m for m in view.members if m.lease == lease), None)
    if member and (drain := drain_of(view, member)):
        return Departure(f"{member.node} is drained{by(drain)}", drain.deadline)
    if halt := halted(view, run):
        return Departure(f"the job is to stop{by(halt)}", save=halt.save)
    return None


def drained(view: View, node: str) -> schema.Drain | None:
    """Whether a node of that name is kept out, whichever member it would be."""
    return next((d for d in _drains(view) if d.node == node and not d.lease), None)


def halted(view: View, run: str) -> schema.Halt | None:
    """Whether `run` is to stop."""
    halt = view.wanted.stop if view.wanted else None
    return halt if halt and halt.run == run else None


def scaled(view: View, run: str, limits: schema.Limits) -> schema.Limits:
    """The limits of `run`, with how many nodes are to train now.

    Those of a spec that others have replaced since, when nobody was there, count no more.
    """
    asked = view.wanted.scale if view.wanted else None
    if asked is None or (asked.run, asked.instead_of) != (run, limits.nnodes):
        return limits
    return limits.with_sizes(asked)


def wanted_limits(view: View, spec: schema.Spec) -> schema.Limits:
    """Return the limits of the run of `spec`, with how many nodes are to train now."""
    return scaled(view, spec.run, spec.limits)


def with_drains(there: schema.Requests, drains: Sequence[schema.Drain]) -> schema.Requests | None:
    """Return `there` with these drains, instead of others of the same node or member.

    None where they are more than can be read: then nobody would heed any request.
    """
    same = {(d.node, d.lease) for d in drains}
    kept = (*(d for d in there.drains if (d.node, d.lease) not in same), *drains)
    return replace(there, drains=kept) if len(kept) <= schema.MOST_DRAINS else None


def leave_deadline(view: View, member: schema.Member, limits: schema.Limits) -> float:
    """The seconds that the workers of a leaving member have."""
    drain = drain_of(view, member)
    given = drain.deadline if drain else None
    return limits.leave_deadline if given is None else given


def why_stopped(view: View, run: str) -> str:
    """The reason why a run ends whose last node has left."""
    halt = halted(view, run)
    return f"stopped{by(halt)}" if halt else "the last node left"


def _drains(view: View) -> tuple[schema.Drain, ...]:
    return view.wanted.drains if view.wanted else ()


def drain_of(view: View, member: schema.Member) -> schema.Drain | None:
    """The drain that means this member, best one that names it."""
    own = ("", schema.hexed(member.lease))
    both = [d for d in _drains(view) if d.node == member.node and d.lease in own]
    return max(both, key=lambda d: d.lease, default=None)


def by(asked: schema.Drain | schema.Halt) -> str:
    """The user who has asked for it, if that is known, in words."""
    return f" by {asked.by}" if asked.by else ""
