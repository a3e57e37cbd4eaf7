"""Each invariant can fail and each fault matters: deliberate mistakes in the rules are found.

For each kind of fault there is a mistake that is found only where that fault may happen.
"""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from elastic_etcd.core import (
    failure_policies,
    lifecycle,
    requests,
    rules,
    view,
    writes,
)
from elastic_etcd.core.lifecycle import (
    Action,
    Event,
    LeaseLost,
    Life,
    ReportEnd,
    State,
    ViewChanged,
)
from elastic_etcd.core.rules import (
    Claim,
    Decision,
    Elapsed,
    Local,
    Run,
    TakeOver,
    Wait,
)
from elastic_etcd.core.schema import (
    Cause,
    Keys,
    Lease,
    Limits,
    Master,
    Member,
    Participant,
    Past,
    Phase,
    Ready,
    Round,
    encode,
)
from elastic_etcd.core.txn import Compare, Delete, KeyValue, Put, Txn
from elastic_etcd.core.view import View
from tests.model.cases import HASTY, LISTED, STRICT, in_vain, limits, wary
from tests.model.explore import Search
from tests.model.node import Faults, owner

Patch = Callable[[pytest.MonkeyPatch], None]


def same_generation_again(patch: pytest.MonkeyPatch) -> None:
    claim = rules._claim

    def mutant(view: View, local: Local, reason: str, *cause: Cause, joins: bool = False) -> Claim:
        decision = claim(view, local, reason, *cause, joins=joins)
        again = max(1, decision.round.generation - 1)
        return structs.replace(decision, round=structs.replace(decision.round, generation=again))

    patch.setattr(rules, "_claim", mutant)


def nobody_has_time_to_be_listed(patch: pytest.MonkeyPatch) -> None:
    decide = rules.decide

    def mutant(seen: View, local: Local, asked: Limits, elapsed: Elapsed) -> Decision:
        return decide(seen, local, asked, structs.replace(elapsed, listing=0.0))

    patch.setattr(rules, "decide", mutant)


def a_key_is_put_back_into_any_world(patch: pytest.MonkeyPatch) -> None:
    relist = writes.relist

    def mutant(keys: Keys, seen: View, local: Local, member: Member) -> Txn:
        return structs.replace(relist(keys, seen, local, member), compare=())

    patch.setattr(writes, "relist", mutant)


def who_is_unlisted_judges(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lifecycle, "_waits_to_be_listed", lambda _: False)


def who_is_unlisted_holds_any_world(patch: pytest.MonkeyPatch) -> None:
    here = (Life.MEMBER, Life.UNLISTED)
    patch.setattr(lifecycle, "_stands", lambda state, _: state.life in here and not state.ending)


def a_round_that_is_over_is_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lifecycle, "is_past", lambda *_: False)


def acks_are_not_awaited(patch: pytest.MonkeyPatch) -> None:
    joinable, frozen = rules._lead_joinable, rules._lead_frozen
    patch.setattr(rules, "_lead_joinable", lambda seen, *args: joinable(_all_ready(seen), *args))
    patch.setattr(rules, "_lead_frozen", lambda seen, *args: frozen(_all_ready(seen), *args))


def _all_ready(seen: View) -> View:
    acks = tuple(Ready(m.lease, Master("n", 1)) for m in seen.members)
    return structs.replace(seen, acks=acks)


def old_workers_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    own_part = rules._own_part

    def mutant(view: View, now: Round, local: Local) -> Decision | None:
        return own_part(view, now, structs.replace(local, running=0))

    patch.setattr(rules, "_own_part", mutant)


def everybody_takes_part(patch: pytest.MonkeyPatch) -> None:
    def mutant(ready: list[Member], *_: Any) -> list[Member]:
        return ready

    patch.setattr(rules, "choose", mutant)


def any_number_trains(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Limits, "largest", lambda asked, nodes: min(nodes, asked.max_nodes))


def newcomers_end_a_world_that_gets_no_larger(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Limits, "larger", lambda _, nodes: nodes + 1)


def rounds_are_not_fenced(patch: pytest.MonkeyPatch) -> None:
    def mutant(keys: Keys, view: View, local: Local) -> tuple[Compare, ...]:
        del view
        return (Compare(keys.member(local.lease), "create", local.created),)

    patch.setattr(writes, "_round_fence", mutant)


def a_lost_coordinator_is_not_replaced(patch: pytest.MonkeyPatch) -> None:
    replaced = rules._replace_coordinator

    def mutant(seen: View, local: Local) -> Decision:
        return replaced(seen, local) if seen.round is None else Wait("is lost")

    patch.setattr(rules, "_replace_coordinator", mutant)


def who_waits_for_the_first_ranks_waits_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rules, "FIRST_RANKS", 1)
    patch.setattr(rules, "LEAD_TURN", float("inf"))


def a_lost_coordinator_ends_its_world(patch: pytest.MonkeyPatch) -> None:
    def mutant(seen: View, local: Local) -> Decision:
        return rules._claim(seen, local, "the coordinator is lost", Cause.LOST)

    patch.setattr(rules, "_replace_coordinator", mutant)


def everybody_leads(patch: pytest.MonkeyPatch) -> None:
    own_part = rules._own_part

    def mutant(view: View, now: Round, local: Local) -> Decision | None:
        mine = own_part(view, now, local)
        leads = now.phase is not Phase.FINAL or now.coordinator == local.lease
        if mine or leads or local.running:
            return mine
        return TakeOver("mine", structs.replace(now, coordinator=local.lease))

    patch.setattr(rules, "_own_part", mutant)


def who_takes_over_fences_nothing(patch: pytest.MonkeyPatch) -> None:
    def mutant(keys: Keys, seen: View, local: Local, lead: TakeOver) -> Txn:
        del seen, local
        return Txn((), (Put(keys.round, encode(lead.round)),))

    patch.setattr(writes, "_write_take_over", mutant)


def who_takes_over_drops_the_lost(patch: pytest.MonkeyPatch) -> None:
    replaced = rules._replace_coordinator

    def mutant(seen: View, local: Local) -> Decision:
        decision, now = replaced(seen, local), seen.round
        if isinstance(decision, Claim) or now is None or now.nodes == 1:
            return decision
        less = structs.replace(now, nodes=now.nodes - 1, coordinator=local.lease)
        return structs.replace(decision, round=less)

    patch.setattr(rules, "_replace_coordinator", mutant)


def a_failure_is_fenced_by_the_round(patch: pytest.MonkeyPatch) -> None:
    """As every other write; but the round has another coordinator meanwhile."""
    report = writes._write_report

    def mutant(keys: Keys, seen: View | None, local: Local, generation: int, end: ReportEnd) -> Txn:
        txn = report(keys, seen, local, generation, end)
        round_ = Compare(keys.round, "mod", seen.round_mod if seen else 0)
        return structs.replace(
            txn, compare=tuple(round_ if c.key == keys.ledger else c for c in txn.compare)
        )

    patch.setattr(writes, "_write_report", mutant)


def a_world_without_its_coordinator_is_over(patch: pytest.MonkeyPatch) -> None:
    present = lifecycle._present

    def mutant(state: State) -> bool:
        return present(state) and bool(state.view and state.view.coordinator)

    patch.setattr(lifecycle, "_present", mutant)


def one_done_is_all_done(patch: pytest.MonkeyPatch) -> None:
    done = rules._done
    patch.setattr(rules, "_done", lambda v: {p.lease for p in v.world} if done(v) else set())


def workers_start_when_frozen(patch: pytest.MonkeyPatch) -> None:
    own_part = rules._own_part

    def mutant(view: View, now: Round, local: Local) -> Decision | None:
        if now.phase is Phase.FROZEN and now.coordinator != local.lease and not local.running:
            return Run("early", now, Participant(Lease(local.lease), "", 1, 1, 1))
        return own_part(view, now, local)

    patch.setattr(rules, "_own_part", mutant)


def group_ranks_are_the_node_s(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: View, lease: int) -> Participant | None:
        known = self.page.participants if self.page else self.world
        return next((p for p in known if owner(p.lease) == owner(lease)), None)

    patch.setattr(View, "part", mutant)


def a_lost_lease_is_not_heeded(patch: pytest.MonkeyPatch) -> None:
    absorb = lifecycle._absorb

    def mutant(state: State, event: Event, now: float) -> State:
        after = absorb(state, event, now)
        heeded = state.life is Life.MEMBER and after.life in {Life.LOST, Life.UNLISTED}
        return structs.replace(after, life=Life.MEMBER) if heeded else after

    patch.setattr(lifecycle, "_absorb", mutant)


def whoever_leaves_stops_the_job(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(writes, "nobody", lambda _: ())


def who_was_told_of_no_ack_does_not_start(patch: pytest.MonkeyPatch) -> None:
    own_part = rules._own_part

    def mutant(view: View, now: Round, local: Local) -> Decision | None:
        mine = own_part(view, now, local)
        unsure = isinstance(mine, Run) and local.acked != now.generation
        return None if unsure else mine

    patch.setattr(rules, "_own_part", mutant)


def reports_are_only_cleared_by_a_final(patch: pytest.MonkeyPatch) -> None:
    """Instead of having a generation. Alas, a late copy writes one again."""
    parts, finalise = view._with_parts, writes._write_finalise

    def renamed(kv: KeyValue, keys: Keys, final: int) -> KeyValue:
        ours = kv.key.startswith(keys.reports())
        lease = int(kv.key.rpartition("/")[2], 16) if ours else 0
        return structs.replace(kv, key=keys.report(final, lease)) if ours else kv

    def read(seen: View, kvs: dict[str, KeyValue], keys: Keys, bad: list[str]) -> View:
        now = seen.round
        final = now.generation if now and now.phase is Phase.FINAL else seen.ledger.final
        those = [renamed(kv, keys, final) for kv in kvs.values()]
        return parts(seen, {kv.key: kv for kv in those}, keys, bad)

    def clear(keys: Keys, *args: Any) -> Txn:
        txn = finalise(keys, *args)
        return structs.replace(txn, then=(*txn.then, Delete(keys.reports(), prefix=True)))

    patch.setattr(view, "_with_parts", read)
    patch.setattr(writes, "_write_finalise", clear)


def an_answer_is_to_what_is_seen(patch: pytest.MonkeyPatch) -> None:
    hear = lifecycle._hear_answer

    def mutant(state: State, ok: bool) -> State:
        write, seen = state.pending, state.view and state.view.round
        if write and seen:
            later = structs.replace(write, generation=seen.generation)
            state = structs.replace(state, pending=later)
        return hear(state, ok)

    patch.setattr(lifecycle, "_hear_answer", mutant)


def an_old_view_is_believed(patch: pytest.MonkeyPatch) -> None:
    vanished, react = rules.vanished, lifecycle._react

    def mutant(state: State, now: float, actions: list[Action]) -> State:
        state = react(state, now, actions)
        if state.life is Life.LOST and state.view and state.limits:
            return lifecycle._decide(state, state.view, state.limits, now, actions)
        return state

    patch.setattr(rules, "vanished", lambda seen, local: local.lease and vanished(seen, local))
    patch.setattr(lifecycle, "_react", mutant)


def nothing_is_forgiven(patch: pytest.MonkeyPatch) -> None:
    freeze = rules._freeze

    def mutant(
        seen: View, now: Round, own: Local, ready: list[Member], asked: Limits, waited: Elapsed
    ) -> Decision:
        never = structs.replace(asked, restart_window=float("inf"))
        return freeze(seen, now, own, ready, never, waited)

    patch.setattr(rules, "_freeze", mutant)


def only_one_long_world_forgives(patch: pytest.MonkeyPatch) -> None:
    freeze = rules._freeze

    def mutant(seen: View, *rest: Any) -> Decision:
        before = failure_policies.seconds_since_restart(seen.ledger)
        ledger = structs.replace(seen.ledger, trained=seen.ledger.trained - before)
        return freeze(structs.replace(seen, ledger=ledger), *rest)

    patch.setattr(rules, "_freeze", mutant)


def clocks_run_while_etcd_is_silent(patch: pytest.MonkeyPatch) -> None:
    decided = lifecycle._decide

    def mutant(state: State, seen: View, asked: Limits, now: float, actions: list[Action]) -> State:
        after = decided(structs.replace(state, silent_since=None), seen, asked, now, actions)
        return structs.replace(after, silent_since=state.silent_since)

    patch.setattr(lifecycle, "_decide", mutant)


def whoever_lives_is_awaited(patch: pytest.MonkeyPatch) -> None:
    joinable = rules._lead_joinable

    def mutant(view: View, now: Round, local: Local, asked: Limits, elapsed: Elapsed) -> Decision:
        return joinable(view, now, local, asked, structs.replace(elapsed, phase=0.0, join=0.0))

    patch.setattr(rules, "_lead_joinable", mutant)


def a_leaving_node_is_not_awaited(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rules, "_await_leavers", lambda *_: None)


def a_leaving_node_is_awaited_without_end(patch: pytest.MonkeyPatch) -> None:
    await_leavers = rules._await_leavers

    def mutant(seen: View, asked: Limits, elapsed: Elapsed) -> Decision | None:
        return await_leavers(seen, asked, structs.replace(elapsed, phase=0.0))

    patch.setattr(rules, "_await_leavers", mutant)


def who_is_left_out_is_in_the_world(patch: pytest.MonkeyPatch) -> None:
    frozen = rules._lead_frozen

    def mutant(seen: View, *args: Any) -> Decision:
        return frozen(_all_ready(seen) if seen.world else seen, *args)

    patch.setattr(rules, "_lead_frozen", mutant)


def newcomers_are_waited_for_without_end(patch: pytest.MonkeyPatch) -> None:
    take_in = rules._take_in

    def mutant(*args: Any) -> Decision:
        decision = take_in(*args)
        return Wait(decision.reason) if isinstance(decision, Wait) else decision

    patch.setattr(rules, "_take_in", mutant)


def a_failure_counts_twice(patch: pytest.MonkeyPatch) -> None:
    frozen = rules._lead_frozen

    def mutant(seen: View, now: Round, *args: Any) -> Decision:
        more = now.restarts > seen.ledger.restarts
        return frozen(seen, structs.replace(now, restarts=now.restarts + more), *args)

    patch.setattr(rules, "_lead_frozen", mutant)


def what_a_peer_seems_to_have_caused_is_kept_back_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lifecycle, "_release_failure", lambda state, _: state)


def who_is_done_has_nothing_left(patch: pytest.MonkeyPatch) -> None:
    own_part = rules._own_part

    def mutant(view: View, now: Round, local: Local) -> Decision | None:
        done = local.reported == local.running
        return own_part(view, now, structs.replace(local, running=0) if done else local)

    patch.setattr(rules, "_own_part", mutant)


def a_newer_format_is_as_good_as_absent(patch: pytest.MonkeyPatch) -> None:
    absorb = lifecycle._absorb

    def mutant(state: State, event: Event, now: float) -> State:
        if isinstance(event, ViewChanged):
            event = ViewChanged(structs.replace(event.view, newer=0))
        return absorb(state, event, now)

    patch.setattr(lifecycle, "_absorb", mutant)


def suspects_never_take_part(patch: pytest.MonkeyPatch) -> None:
    joinable = rules._lead_joinable

    def mutant(seen: View, now: Round, local: Local, asked: Limits, elapsed: Elapsed) -> Decision:
        known = failure_policies.doubted(seen.ledger, asked)
        trusted = {m.lease for m in seen.members if m.node not in known}
        acks = tuple(ack for ack in seen.acks if ack.lease in trusted)
        own = local.acked if local.lease in trusted else 0
        less = structs.replace(seen, acks=acks), structs.replace(local, acked=own)
        return joinable(less[0], now, less[1], asked, elapsed)

    patch.setattr(rules, "_lead_joinable", mutant)


def suspects_use_up_the_budget(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(failure_policies, "doubted", lambda *_: frozenset())


def suspects_are_left_out_for_ever(patch: pytest.MonkeyPatch) -> None:
    left_out = failure_policies.left_out

    def mutant(past: Past, asked: Limits) -> dict[str, float]:
        return dict.fromkeys(left_out(past, asked), float("inf"))

    patch.setattr(failure_policies, "left_out", mutant)


def who_is_cut_off_trains_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lifecycle, "_give_up_lease", lambda state, *_: state)


def who_is_cut_off_and_leaves_has_time(patch: pytest.MonkeyPatch) -> None:
    give_up = lifecycle._give_up_lease

    def mutant(state: State, *rest: Any) -> State:
        return state if state.local.stopping else give_up(state, *rest)

    patch.setattr(lifecycle, "_give_up_lease", mutant)


def nobody_hurries(patch: pytest.MonkeyPatch) -> None:
    stop = lifecycle._stop_workers

    def mutant(state: State, *rest: Any) -> State:
        return state if state.local.patient else stop(state, *rest)

    patch.setattr(lifecycle, "_stop_workers", mutant)


def newcomers_end_what_comes_after_the_training(patch: pytest.MonkeyPatch) -> None:
    final = rules._lead_final

    def mutant(seen: View, now: Round, local: Local, *rest: Any) -> Decision:
        return final(seen, now, structs.replace(local, finished=False), *rest)

    patch.setattr(rules, "_lead_final", mutant)


def a_drain_is_not_heeded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lifecycle, "_heed_order", lambda state: state)


def who_is_told_to_stop_goes_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(requests, "halted", lambda *_: None)


def nobody_scales(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(requests, "scaled", lambda *given: given[-1])


def an_error_that_came_twice_is_tried_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(failure_policies, "final_error", lambda _: "")


def an_early_error_is_final_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(failure_policies, "final_error", lambda past: past.failures[-1].what)


def restarts_that_come_no_further_go_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(failure_policies, "no_progress", lambda *_: "")


def where_the_last_failure_was_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    stalled = failure_policies.stalled
    patch.setattr(failure_policies, "stalled", lambda past: stalled(past)[-1:])


def the_first_failure_at_a_place_is_final(patch: pytest.MonkeyPatch) -> None:
    stalled = failure_policies.stalled
    patch.setattr(
        failure_policies, "no_progress", lambda past, _: "in vain" if stalled(past) else ""
    )


TWO, ONE = limits(1, 2), limits(1, 1)
OFTEN = limits(1, 2, restarts=3)
MUTANTS = [  # which invariant it breaks, and the fault without which nobody would notice
    ("I1", same_generation_again, TWO, Faults(fail=1), ""),
    ("I2", acks_are_not_awaited, TWO, Faults(fail=1), ""),
    ("I2", a_lost_lease_is_not_heeded, TWO, Faults(expire=1), "expire"),
    ("I2", group_ranks_are_the_node_s, TWO, Faults(crash=1, back=1), "back"),
    ("I3", old_workers_are_forgotten, TWO, Faults(fail=1), ""),
    ("I3", who_is_done_has_nothing_left, TWO, Faults(done=1, crash=1), "done"),
    ("I4", everybody_takes_part, ONE, Faults(), ""),
    ("I4", any_number_trains, LISTED, Faults(), ""),
    ("I4", newcomers_end_a_world_that_gets_no_larger, LISTED, Faults(), ""),
    ("I5", rounds_are_not_fenced, TWO, Faults(), ""),
    ("I5", an_old_view_is_believed, TWO, Faults(expire=1, stop=1), "stop"),
    ("I6", a_lost_coordinator_is_not_replaced, TWO, Faults(crash=1), "crash"),
    ("I6", who_waits_for_the_first_ranks_waits_for_ever, TWO, Faults(crash=1), "crash"),
    ("I7", a_lost_coordinator_ends_its_world, TWO, Faults(crash=1, done=1), "done"),
    ("I1", everybody_leads, TWO, Faults(), ""),
    ("I5", who_takes_over_fences_nothing, TWO, Faults(crash=1), "crash"),
    ("I1", who_takes_over_drops_the_lost, TWO, Faults(crash=1), "crash"),
    ("I6", a_failure_is_fenced_by_the_round, TWO, Faults(crash=1, done=1, fail=1), "done"),
    ("I7", a_world_without_its_coordinator_is_over, TWO, Faults(crash=1, fail=1), "crash"),
    ("I6", who_was_told_of_no_ack_does_not_start, TWO, Faults(lost=1), "lost"),
    ("I6", what_a_peer_seems_to_have_caused_is_kept_back_for_ever, TWO, Faults(peer=1), "peer"),
    ("I6", an_answer_is_to_what_is_seen, TWO, Faults(slow=1), "slow"),
    ("I7", one_done_is_all_done, TWO, Faults(done=1), "done"),
    ("I7", whoever_leaves_stops_the_job, TWO, Faults(leave=1), "leave"),
    ("I7", reports_are_only_cleared_by_a_final, TWO, Faults(done=2, late=1), "late"),
    ("I7", nothing_is_forgiven, TWO, Faults(fail=2, long=2), "long"),
    ("I6", newcomers_are_waited_for_without_end, limits(1, 3), Faults(), ""),
    ("I6", whoever_lives_is_awaited, TWO, Faults(hang=1), "hang"),
    ("I2", who_is_left_out_is_in_the_world, TWO, Faults(tired=1), "tired"),
    ("I7", clocks_run_while_etcd_is_silent, HASTY, Faults(silent=1), "silent"),
    ("I7", only_one_long_world_forgives, TWO, Faults(fail=2, long=2), "long"),
    ("I7", a_failure_counts_twice, TWO, Faults(fail=1), "fail"),
    ("I7", an_error_that_came_twice_is_tried_again, OFTEN, Faults(early=2), "early"),
    ("I7", an_early_error_is_final_at_once, OFTEN, Faults(early=1), "early"),
    ("I7", restarts_that_come_no_further_go_on, in_vain(), Faults(poison=2), "poison"),
    ("I7", where_the_last_failure_was_is_forgotten, in_vain(), Faults(poison=2), "poison"),
    ("I7", the_first_failure_at_a_place_is_final, in_vain(), Faults(poison=1), "poison"),
    ("I6", suspects_never_take_part, wary(1, 2), Faults(fail=1), "fail"),
    ("I7", suspects_use_up_the_budget, wary(1, 2), Faults(fail=2), "fail"),
    ("I6", suspects_are_left_out_for_ever, wary(1, 2), Faults(fail=1), "fail"),
    ("I8", workers_start_when_frozen, limits(2, 2), Faults(), ""),
    ("I10", a_leaving_node_is_not_awaited, TWO, Faults(leave=1), "leave"),
    ("I6", a_leaving_node_is_awaited_without_end, TWO, Faults(leave=1, hang=1), "hang"),
    ("I11", who_is_cut_off_trains_on, STRICT, Faults(silent=1), "silent"),
    ("I11", who_is_cut_off_and_leaves_has_time, STRICT, Faults(silent=1, leave=1), "silent"),
    ("I6", nobody_hurries, TWO, Faults(elastic=1, leave=1), "elastic"),
    ("I4", newcomers_end_what_comes_after_the_training, TWO, Faults(finish=1), "finish"),
    ("I12", a_drain_is_not_heeded, TWO, Faults(drain=1), "drain"),
    ("I12", who_is_told_to_stop_goes_on, TWO, Faults(halt=1), "halt"),
    ("I13", nobody_has_time_to_be_listed, TWO, Faults(expire=1, crash=1), "expire"),
    ("I13", a_key_is_put_back_into_any_world, TWO, Faults(expire=1), "expire"),
    ("I13", who_is_unlisted_judges, TWO, Faults(expire=1), "expire"),
    ("I13", who_is_unlisted_holds_any_world, TWO, Faults(expire=1), "expire"),
    ("I1", a_round_that_is_over_is_believed, ONE, Faults(fail=1, restore=1), "restore"),
    ("I4", nobody_scales, TWO, Faults(fewer=1), "fewer"),
    ("I4", nobody_scales, TWO, Faults(more=1), "more"),
    ("I9", a_newer_format_is_as_good_as_absent, TWO, Faults(newer=1), "newer"),
]


LONG = {  # as long as all others together
    a_failure_is_fenced_by_the_round,
    a_leaving_node_is_awaited_without_end,
    a_round_that_is_over_is_believed,
    an_old_view_is_believed,
    nobody_hurries,
    nothing_is_forgiven,
    only_one_long_world_forgives,
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("invariant", "mutate", "asked", "faults", "only"),
    [
        pytest.param(
            *mutant,
            id=mutant[1].__name__,
            marks=pytest.mark.nightly(part="model") if mutant[1] in LONG else (),
        )
        for mutant in MUTANTS
    ],
)
def test_mutant_is_caught(
    invariant: str,
    mutate: Patch,
    asked: Limits,
    faults: Faults,
    only: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutate(monkeypatch)
    result = Search(asked, 2, faults).run()
    assert result.violation.startswith(invariant), result
    if only:
        unseen = Search(asked, 2, faults._replace(**{only: 0})).run()
        assert not unseen.violation, f"it is caught without {only}: {unseen}"


def test_each_fault_has_a_mutant_of_its_own() -> None:
    assert {only for *_, only in MUTANTS} == {"", *Faults._fields}


def test_a_lease_lost_while_joining_again_leads_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    absorb = lifecycle._absorb

    def mutant(state: State, event: Event, now: float) -> State:
        after = absorb(state, event, now)
        again = isinstance(event, LeaseLost) and state.life is Life.JOINING
        return structs.replace(after, life=Life.JOINING) if again else after

    assert not Search(ONE, 1, Faults(expire=2)).run().violation
    monkeypatch.setattr(lifecycle, "_absorb", mutant)
    assert Search(ONE, 1, Faults(expire=2)).run().violation.startswith("I6")
