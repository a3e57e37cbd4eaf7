"""What an agent makes of the time in which etcd was silent."""

import pytest
from msgspec.structs import replace

from elastic_etcd.core.lifecycle import State, _leave_out_silence
from elastic_etcd.core.rules import Local
from elastic_etcd.core.schema import Master, Phase, Round
from elastic_etcd.core.view import Everything, View

SILENT, NOW = 10.0, 25.0


def after_silence(since: float, phase: Phase | None = None) -> State:
    """An agent that joined, whose phase began and whose coordinator went at `since`."""
    now = Round(3, phase, 1, "why", "r", "n", 1, 1, Master("n", 80)) if phase else None
    view = View(9, Everything(), round=now)
    state = State(Local("r"), 1, view=view, silent_since=SILENT)
    state = replace(state, join_since=since, phase_since=since, vacant_since=since)
    return _leave_out_silence(state, NOW)


@pytest.mark.parametrize(
    ("since", "counts_from"),
    [
        (4.0, 19.0),  # six seconds had passed, and none in silence
        (12.0, NOW),
    ],
)
@pytest.mark.parametrize("phase", [None, Phase.JOINABLE])
def test_no_clock_has_run(phase: Phase | None, since: float, counts_from: float) -> None:
    state = after_silence(since, phase)
    assert state.silent_since is None
    assert {state.join_since, state.phase_since, state.vacant_since} == {counts_from}


def test_but_a_world_has_trained() -> None:
    state = after_silence(4.0, Phase.FINAL)
    assert (state.join_since, state.phase_since) == (19.0, 4.0)


def test_nothing_changes_while_etcd_answers() -> None:
    state = State(Local("r"), 1, view=None, join_since=4.0, phase_since=5.0)
    assert _leave_out_silence(state, NOW) is state
