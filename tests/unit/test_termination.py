"""How far the end of a generation has come, by what is left of it: the whole table."""

from itertools import product

import pytest

from elastic_etcd.agent.termination import Asked, Ending, next_end

# What follows where nothing runs any more: (end, was it asked to stop, is some of it parked).
NEXT = {
    (Ending.LIVES, False, False): Ending.SWEEPS,
    (Ending.LIVES, False, True): Ending.LIVES,  # it may go on with those that wait
    (Ending.LIVES, True, False): Ending.SWEEPS,
    (Ending.LIVES, True, True): Ending.GONE,  # what a parked one has started lives on with it
    (Ending.SWEEPS, False, False): Ending.GONE,
    (Ending.SWEEPS, False, True): Ending.SWEEPS,
    (Ending.SWEEPS, True, False): Ending.GONE,
    (Ending.SWEEPS, True, True): Ending.GONE,
    (Ending.GONE, False, False): Ending.GONE,
    (Ending.GONE, False, True): Ending.GONE,
    (Ending.GONE, True, False): Ending.GONE,
    (Ending.GONE, True, True): Ending.GONE,
}


@pytest.mark.parametrize(("end", "asked", "parked"), [*product(Ending, Asked, [False, True])])
def test_where_nothing_runs_the_end_goes_on_and_elsewhere_it_stays(
    end: Ending, asked: Asked, *, parked: bool
) -> None:
    assert next_end(end, asked, left=True, parked=parked) is end
    stops = asked is not Asked.NOTHING
    assert next_end(end, asked, left=False, parked=parked) is NEXT[end, stops, parked]
