"""The rank that is behind in a world that does not move, found by where all its workers are.

The agent that finds a worker too long in its step publishes where its workers are. The coordinator
then asks all agents, by a Hang without a line. If none of the ranks does what may take long it asks
once more, for evidence, and at last it says in one line who is behind and who waits. The agents of
those that stood publish it when they go on, until the line can be taken back. In a healthy world
nothing of this is written.
"""

import math
from collections.abc import Container, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from msgspec.structs import replace

from elastic_etcd.core.schema import Hang, NodeSteps, Participant, RankDoing, RankStep
from elastic_etcd.core.view import View
from elastic_etcd.core.words import NAMED, listed
from elastic_etcd.times import HANG_ANSWER, HANG_EVIDENCE, HANG_STACKS

# The stages of a start that are known to end soon.
STARTS = {
    RankDoing.BEFORE: "before {} process group",
    RankDoing.GROUP: "in {} process group",
    RankDoing.FIRST: "before {} first step",
}
_FARTHER = {RankDoing.INIT: 1, RankDoing.GROUP: 1, RankDoing.FIRST: 2}
_BEGINS = frozenset((RankDoing.STARTING, RankDoing.INIT, *STARTS))
MAY_LAST = _BEGINS | {RankDoing.COMMIT, RankDoing.SAVE, RankDoing.QUIET, RankDoing.TRACED}
_IN_STEP = frozenset((RankDoing.STEP, RankDoing.WAIT))
_LATE = _IN_STEP.union(STARTS)
_MOVING = _IN_STEP | {RankDoing.CHECK}
_GO_ON = "all ranks go on"


class At(NamedTuple):
    """A rank of a world, and where it is; None: its agent does not answer."""

    rank: int
    node: str
    step: RankStep | None


def of_now(view: View) -> Hang | None:
    """The question or the line about the world that trains."""
    hang = view.hang
    return hang if hang and hang.generation == view.trains else None


def that_lasts(view: View) -> Hang | None:
    """The line about ranks that hang, until it is known that all of them have gone on."""
    hang = of_now(view)
    return hang if hang and hang.alarm else None


def lead(view: View, waited: float) -> Hang | None:
    """The coordinator's next question or line; the last question has `waited` so many seconds."""
    if not view.trains:
        return None
    asked = of_now(view)
    if asked and not asked.line:
        answers = [s for s in view.steps if s.number >= asked.number]
        done = frozenset(r.lease for r in view.reports if r.failure is None)
        missing = {p.lease for p in view.world} - done - {s.lease for s in answers}
        if missing and waited < patience(asked):
            return None
        return answer(asked, _located(view.world, answers, done))
    number = asked.number if asked else 0
    asking = [s for s in view.steps if s.number == number + 1]
    if not asking:
        return _gone_on(view, asked) if asked and asked.alarm else None
    seconds = max((r.seconds for s in asking for r in s.ranks if r.doing in _LATE), default=0)
    return Hang(view.trains, number + 1, float(seconds))


def _gone_on(view: View, told: Hang) -> Hang | None:
    """The line that the hang which was told is over, once no rank is known to stand any more."""
    known = (rank for steps in view.steps if steps.number == told.number for rank in steps.ranks)
    if any(_is_still(rank, told.seconds) or _is_late(rank, told.seconds) for rank in known):
        return None
    return replace(told, number=told.number + 1, line=_GO_ON, alarm=False, rank=None)


def with_files(view: View, told: Hang) -> list[At]:
    """Those whose stacks are in a file on their node: the rank that is behind, else all of them."""
    answers = [s for s in view.steps if s.number == told.number]
    found = [at for at in _located(view.world, answers, ()) if at.step and at.step.file]
    return [at for at in found if at.rank == told.rank] or found


def patience(asked: Hang) -> float:
    """How long the answers to a question are waited for."""
    return HANG_ANSWER + (HANG_STACKS + HANG_EVIDENCE if asked.evidence else 0.0)


def answer(asked: Hang, ranks: Sequence[At]) -> Hang:
    """A question for evidence, or the line, by the answers."""
    found = judged(asked, ranks)
    if found.alarm and not asked.evidence:
        return replace(asked, number=asked.number + 1, evidence=True)
    return found


def judged(asked: Hang, ranks: Sequence[At]) -> Hang:
    """The hang that was asked about with the verdict in it: who is behind, and who only waits.

    - The ranks in the lowest step are behind.
    - A rank that has ended waits for nobody. If at least as many have as stand, of which none waits
      in a collective, these train no more either: it is no hang. Else one that has ended is the
      culprit: nothing stands there that could be begun anew.
    - If all are in one step, as they mostly are, or steps can't be compared, the ranks that
      stand in no collective are behind, if they are no more than those that wait in one. Else
      nobody moves, and the rank can't be known.
    - It is no hang where a rank excuses those that wait for it. It does so if it does what may take
      long, or if its agent gives no answer: then the agent's lease may be about to end. If all that
      stand wait in a collective, a rank that moves again in their step or the one before, as after
      `ee.quiet`, excuses them, too: it is asked about when it stands itself.
    """
    still = [at for at in ranks if at.step and _is_still(at.step, asked.seconds)]
    if not still:
        return _judged_start(asked, ranks)
    ended = _ended(ranks)
    few = len(still) <= len(ended)
    if few and asked.evidence and not any(_waits(at) for at in still):
        return replace(asked, line=_after_training(still, ended))
    low = _lowest(still) if _are_comparable(ranks) else math.inf
    longest = _longest(still)
    excuses = [at for at in ranks if _excuses(at.step, low, longest)]
    if all(at.step and at.step.doing is RankDoing.WAIT for at in still):
        excuses += [at for at in ranks if at.step and _comes(at.step, low, asked.seconds)]
    if excuses:
        return replace(asked, line=_excused(still, excuses))
    behind = _behind(still, ranks, asked.seconds)
    nodes = {at.node for at in behind}
    culprit = behind[0].rank if len(nodes) == 1 else None
    culprit = ended[0].rank if ended else culprit
    return replace(asked, line=_line(ranks, still, behind, asked.seconds), alarm=True, rank=culprit)


def _judged_start(asked: Hang, ranks: Sequence[At]) -> Hang:
    """The same where nobody stands in a step: a start may take too long.

    The ranks in the earliest stage are behind: those that are known to take too long, if there are
    any. A rank excuses the others if it gives no answer, or does what may take long and is no part
    of a start.
    """
    late = [at for at in ranks if at.step and _is_late(at.step, asked.seconds)]
    if not late:
        return replace(asked, line=_GO_ON)
    if excuses := [at for at in ranks if at.step is None or at.step.doing in MAY_LAST - _BEGINS]:
        return replace(asked, line=_excused(late, excuses))
    begin = [at for at in ranks if at.step and at.step.doing in _BEGINS]
    low = min(_FARTHER.get(at.step.doing, 0) for at in begin if at.step)
    first = [at for at in begin if at.step and _FARTHER.get(at.step.doing, 0) == low]
    behind = [at for at in first if at in late] or first
    culprit = behind[0].rank if len({at.node for at in behind}) == 1 else None
    culprit = ended[0].rank if (ended := _ended(ranks)) else culprit
    line = _start_line(behind, [at for at in late if at not in behind], ended)
    return replace(asked, line=line, alarm=True, start=True, rank=culprit)


def _is_late(step: RankStep, seconds: float) -> bool:
    return step.doing in STARTS and step.seconds >= seconds / 2


def _located(
    world: Sequence[Participant], answers: Iterable[NodeSteps], done: Container[int]
) -> list[At]:
    """Every rank of the world, in order; of an agent that answers, one it leaves out has ended.

    An agent whose workers are all `done` does not answer.
    """
    by_lease = {s.lease: s for s in answers}
    ranks = []
    for part in world:
        steps = by_lease.get(part.lease)
        known = {r.rank: r for r in steps.ranks} if steps else {}
        for rank in range(part.first_rank, part.first_rank + part.nproc):
            has_ended = steps or part.lease in done
            ended = RankStep(rank, 0, RankDoing.DONE, 0.0) if has_ended else None
            ranks.append(At(rank, part.node, known.get(rank, ended)))
    return ranks


def _is_still(step: RankStep, seconds: float) -> bool:
    """Whether it does not move: those that wait for another came to it within half of its time."""
    return step.doing in _MOVING and step.seconds >= seconds / 2


def _ended(ranks: Iterable[At]) -> list[At]:
    return [at for at in ranks if at.step and at.step.doing is RankDoing.DONE]


def _waits(at: At) -> bool:
    """Whether it needs other ranks to go on, as far as is known."""
    return at.step is not None and at.step.doing in (RankDoing.WAIT, RankDoing.CHECK)


def _excuses(step: RankStep | None, low: float, longest: float) -> bool:
    """Whether it may do what takes long, and others can't be further without it."""
    if step is None:
        return True
    return step.doing in MAY_LAST and step.step <= low and not _tells_nothing(step, longest)


def _comes(step: RankStep, low: float, seconds: float) -> bool:
    """Whether it moves, and is as far as those that wait for it, or about to be."""
    return _moves(step, seconds) and low - 1 <= step.step <= low


def _tells_nothing(step: RankStep, longest: float) -> bool:
    """Whether the others went on for longer than they stand, while it seemed to begin."""
    return step.doing in _BEGINS and step.step == 1 and step.seconds > 2 * longest


def _are_comparable(ranks: Sequence[At]) -> bool:
    """Whether all count the same steps: those that are told, or those of optimizers."""
    return len({at.step.told for at in ranks if at.step and at.step.step > 1}) <= 1


def _moves(step: RankStep, seconds: float) -> bool:
    return step.doing in _MOVING and not _is_still(step, seconds)


def _behind(still: list[At], ranks: Sequence[At], seconds: float) -> list[At]:
    low = _lowest(still)
    lowest = [at for at in still if at.step and at.step.step == low]
    if len(ranks) == 1 or (len(lowest) < len(still) and _are_comparable(ranks)):
        return lowest
    stand = [at for at in still if at.step and at.step.doing is RankDoing.STEP]
    if any(at.step and _moves(at.step, seconds) for at in ranks):
        return stand or still
    return stand if len(stand) <= len(still) - len(stand) else []


def _lowest(some: Iterable[At]) -> int:
    return min(at.step.step for at in some if at.step)


def _longest(some: Iterable[At]) -> float:
    return max(at.step.seconds for at in some if at.step)


# --- its words ----------------------------------------------------------------------------


def _line(ranks: Sequence[At], still: list[At], behind: list[At], seconds: float) -> str:
    longest = _longest(still)
    mute = [at for at in ranks if at.step and _tells_nothing(at.step, longest)]
    parts = []
    if behind:
        parts.append(f"{_are(behind, f'in {_steps(behind)}')} for {_longest(behind):.0f} s")
    if mute:
        parts.append(f"{who(mute)} {_verb(mute, 'tells', 'tell')} no steps")
    if ended := _ended(ranks):
        parts.append(_are_at_end(ended))
    if not parts:
        why = _apart(still) or "storage? network? an evaluation outside ee.quiet?"
        return f"nobody has moved for {longest:.0f} s ({why})"
    named = {at.rank for at in behind}
    if waiting := [at for at in still if at.rank not in named]:
        parts.append(_waiting(waiting, "" if behind else f" for {longest:.0f} s"))
    if moving := sum(1 for at in ranks if at.step and _moves(at.step, seconds)):
        parts.append(f"{moving} {'goes' if moving == 1 else 'go'} on")
    where = behind[0].step.what if len(behind) == 1 and behind[0].step else ""
    return ", ".join(parts) + (f" ({where})" if where else "")


def _start_line(behind: list[At], waiting: list[At], ended: list[At]) -> str:
    parts = [begins(behind)]
    if waiting:
        waits = _verb(waiting, "other waits", "others wait")
        parts.append(f"{len(waiting)} {waits} {_stage(waiting)}")
    if ended:
        parts.append(_are_at_end(ended))
    where = _apart(behind) if len(behind) > 1 else behind[0].step and behind[0].step.what
    return ", ".join(parts) + (f" ({where})" if where else "")


def begins(some: list[At]) -> str:
    """`rank 3 on n2 has been in its imports for 60 s`; all of `some` are in one stage."""
    known = some[0].step is not None and some[0].step.doing in STARTS
    been = f"{_verb(some, 'has', 'have')} been {_stage(some)} for {_longest(some):.0f} s"
    return f"{who(some)} {been}{'' if known else ', as far as is known'}"


def _stage(some: list[At]) -> str:
    first = STARTS[RankDoing.FIRST]
    stage = STARTS.get(some[0].step.doing, first) if some[0].step else first
    return stage.format(_verb(some, "its", "their"))


def _apart(still: list[At]) -> str:
    """Which ranks wait in another collective than the others, if that is known of all."""
    by_place: dict[str, list[At]] = {}
    for at in still:
        by_place.setdefault(at.step.what if at.step else "", []).append(at)
    if len(by_place) == 1 or "" in by_place:
        return ""
    (usual, _), *rest = sorted(by_place.items(), key=lambda item: -len(item[1]))
    place, few = rest[0]
    return f"{who(few)} {_verb(few, 'waits', 'wait')} in {place}, others in {usual}"


def _waiting(waiting: list[At], seconds: str) -> str:
    where = _steps(waiting).partition(" ")[2]
    return f"{len(waiting)} {_verb(waiting, 'other waits', 'others wait')} in {where}{seconds}"


def _after_training(still: list[At], ended: list[At]) -> str:
    have, seconds = _verb(still, "has", "have"), _longest(still)
    worked = f"{who(still)} {have} worked for {seconds:.0f} s since the last step"
    return f"{worked}, {_are_at_end(ended)}, no rank is seen in a collective"


def _excused(still: list[At], excuses: list[At]) -> str:
    waits = f"{who(still)} {_verb(still, 'waits', 'wait')} in {_steps(still)}"
    known = [at for at in excuses if at.step]
    if not known:
        return f"{waits} for {who(excuses)} (no answer)"
    first = max((at.step for at in known if at.step), key=attrgetter("seconds"))
    what = f": {first.what}" if first.what else ""
    return f"{waits} for {who(known)} ({first.doing}{what}, for {first.seconds:.0f} s)"


def _steps(some: list[At]) -> str:
    """`step 1042`, `steps 1042 to 1043`."""
    steps = {at.step.step for at in some if at.step}
    return f"steps {min(steps)} to {max(steps)}" if len(steps) > 1 else f"step {min(steps)}"


def _are(some: list[At], where: str) -> str:
    return f"{who(some)} {_verb(some, 'is', 'are')} {where}"


def _are_at_end(ended: list[At]) -> str:
    return _are(ended, f"at {_verb(ended, 'its', 'their')} end")


def _verb(some: list[At], one: str, several: str) -> str:
    return one if len(some) == 1 else several


def who(some: Sequence[At]) -> str:
    """`rank 5 on n3`, `ranks 0-7 on n1 and 8-11 on n2`; of many nodes the first few."""
    by_node: dict[str, list[int]] = {}
    for at in some:
        by_node.setdefault(at.node, []).append(at.rank)
    named = [f"{_spans(ranks)} on {node}" for node, ranks in by_node.items()]
    return f"{'ranks' if len(some) > 1 else 'rank'} {listed(named, 'on ')}"


def _spans(ranks: list[int]) -> str:
    """`0-3, 7`; of many spans the first few."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [f"{a}" if a == b else f"{a}-{b}" for a, b in spans[:NAMED]]
    return ", ".join(texts) + (", ..." if len(spans) > NAMED else "")
