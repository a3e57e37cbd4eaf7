"""Who is behind in a world that does not move: the coordinator's line, and what it asks before."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from elastic_etcd.core import hangs, writes
from elastic_etcd.core.hangs import At
from elastic_etcd.core.rules import Local, Open
from elastic_etcd.core.schema import (
    Cause,
    Hang,
    History,
    Keys,
    Ledger,
    Master,
    NodeSteps,
    Page,
    Participant,
    Phase,
    RankDoing,
    RankStep,
    Report,
    Round,
    decode,
    encode,
)
from elastic_etcd.core.txn import Delete, KeyValue, Put, Snapshot
from elastic_etcd.core.view import Everything, View, view_of

KEYS = Keys("/elastic_etcd/j")
STEP, WAIT, DONE = RankDoing.STEP, RankDoing.WAIT, RankDoing.DONE
STARTING, START, GROUP = RankDoing.STARTING, RankDoing.BEFORE, RankDoing.GROUP
BEFORE = RankDoing.FIRST
ASKED = Hang(generation=3, number=2, seconds=70.0, evidence=True)
LONG = 71.0


def rank(
    number: int,
    step: int = 1042,
    doing: RankDoing = WAIT,
    seconds: float = LONG,
    what: str = "",
    per_node: int = 4,
    *,
    told: bool = False,
) -> At:
    step_of = RankStep(number, step, doing, seconds, what, told)
    return At(number, f"n{number // per_node + 1}", step_of)


def silent(number: int) -> At:
    return At(number, f"n{number // 4 + 1}", None)


def begin(size: int, stage: RankDoing, *others: At) -> list[At]:
    """All are in this stage of their start but these."""
    return world(size, *(rank(n, 1, stage) for n in range(size)), *others)


def world(size: int, *others: At) -> list[At]:
    """All wait in step 1042 but these."""
    ranks = {at.rank: at for at in map(rank, range(size))} | {at.rank: at for at in others}
    return [ranks[number] for number in sorted(ranks)]


@pytest.mark.parametrize(
    ("ranks", "line", "culprit"),
    [
        (
            world(16, rank(9, 1041, STEP)),
            "rank 9 on n3 is in step 1041 for 71 s, 15 others wait in 1042",
            9,
        ),
        (
            world(16, rank(9, 1041, STEP, what="train.py:9 in sleeps")),
            "rank 9 on n3 is in step 1041 for 71 s, 15 others wait in 1042 (train.py:9 in sleeps)",
            9,
        ),
        (
            world(2, rank(1, 6, STEP), rank(0, 6)),
            "rank 1 on n1 is in step 6 for 71 s, 1 other waits in 6",
            1,
        ),
        (
            world(16, *(rank(n, 1041, STEP) for n in (4, 5, 6, 7))),
            "ranks 4-7 on n2 are in step 1041 for 71 s, 12 others wait in 1042",
            4,
        ),
        (
            world(16, *(rank(n, 1041, STEP) for n in (3, 4, 6))),
            "ranks 3 on n1 and 4, 6 on n2 are in step 1041 for 71 s, 13 others wait in 1042",
            None,
        ),
        (
            world(8, rank(0, 1041, STEP), rank(1, 1043)),
            "rank 0 on n1 is in step 1041 for 71 s, 7 others wait in 1042 to 1043",
            0,
        ),
        (
            world(16),
            "nobody has moved for 71 s (storage? network? an evaluation outside ee.quiet?)",
            None,
        ),
        (  # It has left out a collective, and waits for the others at a commit.
            world(2, rank(0, what="all_reduce"), rank(1, what="all_gather")),
            "nobody has moved for 71 s (rank 1 on n1 waits in all_gather, others in all_reduce)",
            None,
        ),
        # On a GPU a rank that waits looks like one that computes.
        (
            world(8, *(rank(n, 1042, STEP) for n in range(5))),
            "nobody has moved for 71 s (storage? network? an evaluation outside ee.quiet?)",
            None,
        ),
        (
            world(8, *(rank(n, 1042, STEP) for n in range(4))),
            "ranks 0-3 on n1 are in step 1042 for 71 s, 4 others wait in 1042",
            0,
        ),
        # Steps that the script tells are not those of optimizers: the stacks say who is behind.
        (
            world(4, rank(0, 40, told=True), rank(3, 1042, STEP)),
            "rank 3 on n1 is in step 1042 for 71 s, 3 others wait in 40 to 1042",
            3,
        ),
        (
            world(4, rank(0, 40, told=True)),
            "nobody has moved for 71 s (storage? network? an evaluation outside ee.quiet?)",
            None,
        ),
        (
            world(4, rank(0, 40, STEP, told=True), rank(3, 1042, STEP)),
            "ranks 0, 3 on n1 are in steps 40 to 1042 for 71 s, 2 others wait in 1042",
            0,
        ),
        # A start that takes too long: the earliest stage is behind, and what is not known is early.
        (
            begin(
                4, GROUP, rank(3, 1, START, 61.0, "train.py:3 in <module>"), rank(1, 1, STARTING)
            ),
            (
                "rank 3 on n1 has been before its process group for 61 s, 2 others wait in their "
                "process group (train.py:3 in <module>)"
            ),
            3,
        ),
        (
            begin(8, GROUP, *(rank(n, 1, STARTING) for n in (5, 6))),
            (
                "ranks 5-6 on n2 have been before their first step for 71 s, as far as is known, "
                "6 others wait in their process group"
            ),
            5,
        ),
        (
            begin(4, BEFORE, rank(3, 1, GROUP)),
            (
                "rank 3 on n1 has been in its process group for 71 s, 3 others wait before their "
                "first step"
            ),
            3,
        ),
        (
            begin(2, STARTING, rank(1, 1, START, 61.0)),
            "rank 1 on n1 has been before its process group for 61 s",
            1,
        ),
        (
            begin(8, BEFORE),
            "ranks 0-3 on n1 and 4-7 on n2 have been before their first step for 71 s",
            None,
        ),
        (
            world(2, rank(0, 1, GROUP), rank(1, 1, DONE)),
            "rank 0 on n1 has been in its process group for 71 s, rank 1 on n1 is at its end",
            1,
        ),
        # The others went on without it for longer than they stand.
        (
            world(4, rank(0, 1, RankDoing.STARTING, 3600.0), rank(3, 1042, STEP)),
            (
                "rank 3 on n1 is in step 1042 for 71 s, rank 0 on n1 tells no steps, "
                "2 others wait in 1042"
            ),
            3,
        ),
        (
            world(4, rank(0, 1, RankDoing.STARTING, 3600.0)),
            "rank 0 on n1 tells no steps, 3 others wait in 1042 for 71 s",
            None,
        ),
        (
            world(4, rank(3, 0, DONE, 0.0)),
            "rank 3 on n1 is at its end, 3 others wait in 1042 for 71 s",
            3,
        ),
        (
            world(4, rank(0, 1041, STEP), rank(3, 0, DONE, 0.0)),
            (
                "rank 0 on n1 is in step 1041 for 71 s, rank 3 on n1 is at its end, "
                "2 others wait in 1042"
            ),
            3,
        ),
        # On a GPU they wait, and it is not seen.
        (
            world(4, *(rank(n, 1042, STEP) for n in range(3)), rank(3, 0, DONE, 0.0)),
            "rank 3 on n1 is at its end, 3 others wait in 1042 for 71 s",
            3,
        ),
        (
            world(2, rank(0, 0, DONE, 0.0), rank(1, 6, RankDoing.CHECK)),
            "rank 0 on n1 is at its end, 1 other waits in 6 for 71 s",
            0,
        ),
        (
            world(4, rank(3, 7, STEP), *(rank(n, 900, STEP, 0.1) for n in range(3))),
            "rank 3 on n1 is in step 7 for 71 s, 3 go on",
            3,
        ),
        (
            world(4, *(rank(n, 900, STEP, 0.1) for n in range(2))),
            "ranks 2-3 on n1 are in step 1042 for 71 s, 2 go on",
            2,
        ),
        ([rank(0, 6, STEP)], "rank 0 on n1 is in step 6 for 71 s", 0),
        # A step ahead of those that wait is no reason to wait.
        (
            world(4, rank(0, 1041, STEP), rank(3, 1043, RankDoing.SAVE)),
            "rank 0 on n1 is in step 1041 for 71 s, 2 others wait in 1042",
            0,
        ),
    ],
)
def test_a_hang_in_one_line(ranks: list[At], line: str, culprit: int | None) -> None:
    found = hangs.judged(ASKED, ranks)
    assert (found.line, found.rank, found.alarm) == (line, culprit, True)


@pytest.mark.parametrize(
    ("ranks", "line"),
    [
        *(
            (
                world(4, rank(0, step, doing, 90.0)),
                f"ranks 1-3 on n1 wait in step 1042 for rank 0 on n1 ({doing}, for 90 s)",
            )
            for step, stages in ((1042, hangs.MAY_LAST), (1, (STARTING, RankDoing.INIT)))
            for doing in sorted(stages)
        ),
        (
            world(2, rank(0, 1042, RankDoing.QUIET, 90.0, "evaluation")),
            "rank 1 on n1 waits in step 1042 for rank 0 on n1 (quiet: evaluation, for 90 s)",
        ),
        (  # Their steps cannot be compared.
            world(4, rank(0, 1044, RankDoing.SAVE, 90.0, told=True), rank(3, 40)),
            "ranks 1-3 on n1 wait in steps 40 to 1042 for rank 0 on n1 (save, for 90 s)",
        ),
    ],
)
def test_what_may_last_is_waited_for(ranks: list[At], line: str) -> None:
    found = hangs.judged(ASKED, ranks)
    assert (found.line, found.alarm, found.rank) == (line, False, None)


@pytest.mark.parametrize("doing", sorted({*hangs.MAY_LAST} - {*hangs.STARTS}))
def test_what_may_last_excuses_those_that_begin(doing: RankDoing) -> None:
    found = hangs.judged(ASKED, begin(2, GROUP, rank(0, 1, doing, 4.0)))
    is_start = doing in (STARTING, RankDoing.INIT)
    assert (found.alarm, found.start) == (is_start, is_start)


def test_a_start_goes_on_or_is_waited_for_without_an_answer() -> None:
    moves = begin(2, GROUP, *(rank(n, 1, GROUP, 4.0) for n in range(2)))
    assert hangs.judged(ASKED, moves).line == "all ranks go on"
    found = hangs.judged(ASKED, begin(8, GROUP, silent(7)))
    assert (found.alarm, found.rank) == (False, None)
    assert found.line.endswith("for rank 7 on n2 (no answer)")


@pytest.mark.parametrize("begins", [False, True])
def test_a_start_that_took_too_long_lasts_until_it_is_known_to_be_over(begins: bool) -> None:
    told = Hang(3, 2, 70.0, line="a start", alarm=True, rank=1, start=True)
    step = RankStep(1, 1, STEP, 0.1) if begins else RankStep(1, 1, GROUP, 71.0)
    steps = NodeSteps(11, 2, (step,))
    page = Page(3, (Participant(11, "n1", 1, 0, 1),))
    now = Round(3, Phase.FINAL, 11, "why", "r", "n1", 1, 1, Master("n1", 80))
    view = View(9, Everything(), round=now, page=page, hang=told, steps=(steps,))
    found = hangs.lead(view, 0.0)
    assert (found.line if found else "") == ("all ranks go on" if begins else "")


def test_f3_who_works_on_after_others_have_ended_does_not_hang() -> None:
    """The training is over: it exports, or has another rank's upload to wait for."""
    ranks = [rank(0, 11, STEP), rank(1, 0, DONE, 0.0)]
    found = hangs.answer(ASKED, ranks)
    assert (found.alarm, found.rank) == (False, None)
    assert found.line == (
        "rank 0 on n1 has worked for 71 s since the last step, rank 1 on n1 is at its end, "
        "no rank is seen in a collective"
    )
    several = hangs.answer(ASKED, world(6, *(rank(n, 11, STEP) for n in (0, 1)), *(
        rank(n, 11, DONE, 80.0) for n in range(2, 6))))  # fmt: skip
    assert several.line == (
        "ranks 0-1 on n1 have worked for 71 s since the last step, "
        "ranks 2-3 on n1 and 4-5 on n2 are at their end, no rank is seen in a collective"
    )
    # Whether it waits in a collective is not known before its stack is.
    first = replace(ASKED, evidence=False)
    assert hangs.answer(first, ranks) == replace(first, number=3, evidence=True)


@pytest.mark.parametrize("step", [1040, 1042])
def test_who_does_not_answer_may_be_quiet(step: int) -> None:
    """Its agent is cut off from etcd; if that lasts, its lease ends."""
    found = hangs.judged(ASKED, world(8, rank(0, step, STEP), silent(6), silent(7)))
    assert found.line.startswith("ranks 0-3 on n1 and 4-5 on n2 wait in step")
    assert found.line.endswith("for ranks 6-7 on n2 (no answer)")
    assert (found.alarm, found.rank) == (False, None)


def test_who_waits_for_one_that_moves_again_is_not_behind() -> None:
    """It was in ee.quiet until a moment ago, and the others have come to the same step."""
    moves = rank(1, 1042, STEP, 1.0)
    found = hangs.judged(ASKED, world(2, moves))
    assert (found.line, found.alarm, found.rank) == (
        "rank 0 on n1 waits in step 1042 for rank 1 on n1 (step, for 1 s)",
        False,
        None,
    )
    before = hangs.judged(ASKED, world(2, rank(1, 1041, STEP, 1.0)))
    assert (before.alarm, before.rank) == (False, None)
    far = hangs.judged(ASKED, world(2, rank(1, 1040, STEP, 1.0)))  # no collective waits for that
    assert (far.alarm, far.rank) == (True, 0)
    further = hangs.judged(ASKED, world(2, rank(1, 1043, STEP, 1.0)))
    assert further.line == "rank 0 on n1 is in step 1042 for 71 s, 1 goes on"
    stands = hangs.judged(ASKED, world(3, moves, rank(2, 1042, STEP)))
    assert (stands.line, stands.rank) == (
        "rank 2 on n1 is in step 1042 for 71 s, 1 other waits in 1042, 1 goes on",
        2,
    )


def test_all_go_on() -> None:
    found = hangs.judged(ASKED, [rank(n, 1042, STEP, 0.1) for n in range(4)])
    assert (found.line, found.alarm) == ("all ranks go on", False)


def test_ten_thousand_ranks_are_one_short_line() -> None:
    behind = [rank(n, 1041, STEP, per_node=8) for n in range(0, 10_000, 3)]
    ranks = {n: rank(n, per_node=8) for n in range(10_000)} | {at.rank: at for at in behind}
    found = hangs.judged(ASKED, list(ranks.values()))
    assert found.line == (
        "ranks 0, 3, 6 on n1, 9, 12, 15 on n2, 18, 21 on n3 and on 1247 more nodes are in step "
        "1041 for 71 s, 6666 others wait in 1042"
    )


positions = st.builds(
    RankStep,
    st.just(0),
    st.integers(0, 3),
    st.sampled_from(RankDoing),
    st.floats(0, 100),
    st.sampled_from(["", "train.py:9 in f"]),
)


@given(st.lists(st.none() | positions, min_size=1, max_size=9))
def test_whatever_is_answered_there_is_one_true_line(found: list[RankStep | None]) -> None:
    ranks = [
        At(n, f"n{n // 2}", replace(step, rank=n) if step else None) for n, step in enumerate(found)
    ]
    said = hangs.judged(ASKED, ranks)
    assert said.line
    assert "\n" not in said.line
    assert len(said.line) < 400
    ended = [at.rank for at in ranks if at.step and at.step.doing is DONE]
    if ended and said.alarm:
        assert said.rank == ended[0]
    elif said.rank is not None:
        assert said.alarm
        culprit = ranks[said.rank].step
        assert culprit
        if said.start:
            assert culprit.doing in (STARTING, RankDoing.INIT, *hangs.STARTS)
            assert None not in found
            return
        assert culprit.doing not in hangs.MAY_LAST
        assert culprit.seconds >= ASKED.seconds / 2
        still = [
            at.step.step
            for at in ranks
            if at.step
            and at.step.doing in (STEP, WAIT, RankDoing.CHECK)
            and at.step.seconds >= ASKED.seconds / 2
        ]
        assert culprit.step == min(still)


# --- what the coordinator asks


WORLD = (Participant(0xA, "n1", 2, 0, 0), Participant(0xB, "n2", 2, 1, 2))
LOCAL = Local("r", 0xA, 2, 2, acked=3, running=3)


def said(lease: int, number: int, *ranks: RankStep) -> NodeSteps:
    return NodeSteps(lease, number, ranks)


def view(*steps: NodeSteps, hang: Hang | None = None, **more: Any) -> View:
    now = Round(3, Phase.FINAL, 0xA, "why", "r", "n1", 2, 4, Master("n1", 80))
    found = View(9, Everything(), round=now, round_mod=7, world=WORLD, steps=steps, hang=hang)
    return replace(found, **more)


FIRST = [RankStep(n, 6, STEP, 61.0) for n in range(4)]
WAITS = [RankStep(n, 6, WAIT, 62.0) for n in range(4)]


def test_nobody_is_asked_without_a_suspicion() -> None:
    assert hangs.lead(view(), 0.0) is None
    judged = replace(ASKED, line="rank 0 ...")
    assert hangs.lead(view(said(0xA, 2, *FIRST[:2]), hang=judged), 99.0) is None


def test_all_are_asked_twice_and_then_it_is_said() -> None:
    suspicion = said(0xB, 1, *FIRST[2:])
    first = hangs.lead(view(suspicion), 0.0)
    assert first == Hang(3, 1, 61.0)
    assert hangs.lead(view(suspicion, hang=first), 0.5) is None
    second = hangs.lead(view(suspicion, said(0xA, 1, *FIRST[:2]), hang=first), 0.5)
    assert second == Hang(3, 2, 61.0, evidence=True)
    answers = said(0xA, 2, *WAITS[:2]), said(0xB, 2, WAITS[2], FIRST[3])
    assert hangs.lead(view(answers[0], suspicion, hang=second), 3.0) is None
    line = "rank 3 on n2 is in step 6 for 61 s, 3 others wait in 6"
    found = hangs.lead(view(*answers, hang=second), 3.0)
    assert found == replace(second, line=line, alarm=True, rank=3)
    assert hangs.lead(view(*answers, hang=found), 99.0) is None
    # Another one, after that.
    again = said(0xA, 3, RankStep(0, 8, STEP, 65.0))
    assert hangs.lead(view(again, hang=found), 0.0) == Hang(3, 3, 65.0)


def test_a_hang_lasts_until_the_last_of_its_ranks_has_gone_on() -> None:
    told = Hang(3, 2, 61.0, evidence=True, line="rank 3 ...", alarm=True, rank=3)
    moves = [RankStep(n, 7, STEP, 0.5) for n in range(4)]
    some = view(said(0xA, 2, *moves[:2]), said(0xB, 2, WAITS[2], FIRST[3]), hang=told)
    assert hangs.lead(some, 99.0) is None
    assert hangs.that_lasts(some) == told
    over = hangs.lead(view(said(0xA, 2, *moves[:2]), said(0xB, 2, *moves[2:]), hang=told), 0.0)
    assert over == Hang(3, 3, 61.0, evidence=True, line="all ranks go on")
    assert hangs.that_lasts(view(hang=over)) is None
    again = view(said(0xA, 2, *moves[:2]), said(0xB, 4, *FIRST[2:]), hang=over)
    assert hangs.lead(again, 0.0) == Hang(3, 4, 61.0)


def test_a_suspicion_whose_evidence_is_known_already() -> None:
    """An agent has it when etcd was away for a while."""
    assert hangs.lead(view(said(0xB, 1, *WAITS[2:])), 0.0) == Hang(3, 1, 62.0)


def test_who_does_not_answer_is_waited_for_but_not_for_long() -> None:
    asked = Hang(3, 2, 61.0, evidence=True)
    only = view(said(0xA, 2, *WAITS[:2]), said(0xB, 1, *FIRST[2:]), hang=asked)
    assert hangs.lead(only, hangs.patience(asked) - 0.1) is None
    found = hangs.lead(only, hangs.patience(asked))
    assert found
    assert found.line == "ranks 0-1 on n1 wait in step 6 for ranks 2-3 on n2 (no answer)"


def test_a_rank_that_has_ended_is_not_published() -> None:
    asked = Hang(3, 2, 61.0, evidence=True)
    found = hangs.lead(view(said(0xA, 2, *WAITS[:2]), said(0xB, 2, WAITS[2]), hang=asked), 0.0)
    assert found
    assert found.line == "rank 3 on n2 is at its end, 3 others wait in 6 for 62 s"


def test_an_agent_answers_for_its_own_ranks_only() -> None:
    asked = Hang(3, 2, 61.0, evidence=True)
    liar = said(0xB, 2, *WAITS[2:], RankStep(0, 1, STEP, 99.0), RankStep(77, 1, STEP, 99.0))
    found = hangs.lead(view(said(0xA, 2, *WAITS[:2]), liar, hang=asked), 0.0)
    assert found
    assert (
        found.line
        == "nobody has moved for 62 s (storage? network? an evaluation outside ee.quiet?)"
    )


def test_a_node_that_is_done_is_not_asked() -> None:
    asked = Hang(3, 2, 61.0, evidence=True)
    done = Report(0xB, 8, None)
    found = hangs.lead(view(said(0xA, 2, *WAITS[:2]), hang=asked, reports=(done,)), 0.0)
    assert found
    assert found.line == "ranks 2-3 on n2 are at their end, 2 others wait in 6 for 62 s"


def test_a_world_that_newcomers_wait_for_is_asked() -> None:
    """It trains until its step is over."""
    now = Round(4, Phase.JOINABLE, 0xA, "n3 joins", "r", cause=Cause.JOIN, joins=True)
    change: dict[str, Any] = {"round": now, "ledger": Ledger(4, 3, 2)}
    suspicion = said(0xB, 1, *FIRST[2:])
    first = hangs.lead(view(suspicion, **change), 0.0)
    assert first == Hang(3, 1, 61.0)
    answers = said(0xA, 1, *WAITS[:2]), suspicion
    second = hangs.lead(view(*answers, hang=first, **change), 0.0)
    assert second == Hang(3, 2, 61.0, evidence=True)


@pytest.mark.parametrize("joins", [False, True])
def test_a_question_is_kept_where_newcomers_wait(joins: bool) -> None:
    now = Round(4, Phase.SETUP, 0xA, "n3 joins", "r", cause=Cause.JOIN, joins=joins)
    there = view(round=now, hang=ASKED, hang_mod=5, stepped=(2, 3), ledger=Ledger(4, 3, 2))
    opened = Open("", replace(now, phase=Phase.JOINABLE))
    txn = writes._write_open(KEYS, there, LOCAL, opened, "", None)
    gone = {delete.key for delete in txn.then if isinstance(delete, Delete)}
    assert KEYS.steps(2) in gone
    assert gone.isdisjoint({KEYS.hang, KEYS.steps(3)}) == joins


@pytest.mark.parametrize("phase", [p for p in Phase if p is not Phase.FINAL])
def test_only_a_world_that_trains_is_asked(phase: Phase) -> None:
    now = Round(4, phase, 0xA, "why", "r")
    there = view(said(0xA, 1, *FIRST[:2]), hang=replace(ASKED, generation=4), round=now)
    assert hangs.lead(there, 99.0) is None
    assert hangs.of_now(there) is None


def test_a_hang_of_an_older_world_is_none() -> None:
    older = view(hang=replace(ASKED, generation=2))
    assert hangs.of_now(older) is None


# --- what is written


def test_the_line_is_in_the_history_and_fenced() -> None:
    entry = encode(History(3, "r", "why", hangs=tuple("12345678")))
    found = replace(ASKED, line="rank 3 ...", alarm=True, rank=3, at="2026-11-26T11:30:17Z")
    txn = writes.put_hang(KEYS, view(history=((3, entry),), hang_mod=5), LOCAL, found)
    assert [(c.key, c.target, c.value) for c in txn.compare] == [
        (KEYS.round, "mod", 7),
        (KEYS.member(0xA), "create", 2),
        (KEYS.hang, "mod", 5),
    ]
    hang, history = (p for p in txn.then if isinstance(p, Put))
    assert decode(Hang, hang.value) == found
    assert hang.lease == 0
    told = decode(History, history.value)
    assert told.hangs == (*"2345678", "rank 3 ...")
    assert told.hung_at == (*7 * [""], found.at)


@pytest.mark.parametrize("entry", [None, "spoilt"])
def test_a_history_that_is_gone_or_spoilt(entry: str | None) -> None:
    found = replace(ASKED, line="rank 3 ...", alarm=True)
    there = view(history=((3, entry),) if entry else ())
    told = [p.key for p in writes.put_hang(KEYS, there, LOCAL, found).then]
    assert told == ([KEYS.hang, KEYS.history(3)] if entry else [KEYS.hang])


def test_what_is_no_hang_is_not_in_the_history() -> None:
    entry = encode(History(3, "r", "why"))
    quiet = replace(ASKED, line="all ranks go on")
    (put,) = writes.put_hang(KEYS, view(history=((3, entry),)), LOCAL, quiet).then
    assert put.key == KEYS.hang


def test_steps_are_of_their_generation_and_go_with_their_lease() -> None:
    txn = writes.put_steps(KEYS, view(ledger_mod=4), LOCAL, said(0xA, 1, *FIRST))
    assert {(c.key, c.target, c.value) for c in txn.compare} == {
        (KEYS.member(0xA), "create", 2),
        (KEYS.ledger, "mod", 4),
    }
    (put,) = txn.then
    assert isinstance(put, Put)
    assert put.lease == 0xA
    now = encode(Round(3, Phase.FINAL, 0xA, "why", "r", "n1", 1, 1, Master("n1", 80)))
    kvs = {k: KeyValue(k, v, 2, 3, 0) for k, v in ((put.key, put.value), (KEYS.round, now))}
    seen = view_of(Snapshot(9, kvs), KEYS, Everything())
    assert seen.steps == (said(0xA, 1, *FIRST),)
    assert seen.stepped == (3,)
