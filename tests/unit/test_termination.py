"""How far the end of a generation has come, by what is left of it: the whole table."""

from itertools import product

import pytest

from elastic_etcd.agent.termination import Asked, End, next_end

# What follows where nothing runs any more: (end, was it asked to stop, is some of it parked).
NEXT = {
    (End.LIVES, False, False): End.SWEEPS,
    (End.LIVES, False, True): End.LIVES,  # it may go on with those that wait
    (End.LIVES, True, False): End.SWEEPS,
    (End.LIVES, True, True): End.GONE,  # what a parked one has started lives on with it
    (End.SWEEPS, False, False): End.GONE,
    (End.SWEEPS, False, True): End.SWEEPS,
    (End.SWEEPS, True, False): End.GONE,
    (End.SWEEPS, True, True): End.GONE,
    (End.GONE, False, False): End.GONE,
    (End.GONE, False, True): End.GONE,
    (End.GONE, True, False): End.GONE,
    (End.GONE, True, True): End.GONE,
}


@pytest.mark.parametrize(("end", "asked", "parked"), [*product(End, Asked, [False, True])])
def test_where_nothing_runs_the_end_goes_on_and_elsewhere_it_stays(
    end: End, asked: Asked, *, parked: bool
) -> None:
    assert next_end(end, asked, left=True, parked=parked) is end
    stops = asked is not Asked.NOTHING
    assert next_end(end, asked, left=False, parked=parked) is NEXT[end, stops, parked]
