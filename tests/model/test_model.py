"""The rendezvous, explored completely: every interleaving, every fault, I1-I8 at each step."""

import pytest

from tests.model.cases import CASES, Case


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_interleaving(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    result = case.run()
    with capsys.disabled():
        print(f"\n{case}: {result}")
    assert not result.violation
    assert result.states > 1000
    assert not set(case.reaches) - result.reached, "the search never came there"
