"""The recipes of docs/cookbook.md, as they stand there, each with a worker that is killed."""

import re
from pathlib import Path

import pytest

from tests.unit.test_examples import ROOT, run

pytestmark = pytest.mark.timeout(600)
NIGHTLY = pytest.mark.nightly(part="examples")

PAGE = (ROOT / "docs" / "cookbook.md").read_text()
# Rank 1 of the first world dies in the middle of its second epoch.
DIES = """

class Dies(TensorDataset):
    taken = 0

    def __getitem__(self, index):
        Dies.taken += isinstance(index, int)
        first = os.environ["ELASTIC_ETCD_GENERATION"] == "1"
        if Dies.taken == 360 and first and os.environ["RANK"] == "1":
            os.kill(os.getpid(), 9)
        return super().__getitem__(index)


data = Dies(*data.tensors)
"""
# What each knows at its end, whatever happened on the way.
ENDS = {
    "The same batch in every world": "state.epoch == 2 and state.sampler.consumed == 480",
    "A learning rate that follows the world": "state.epoch == 3 and scheduler.last_epoch == 3",
    "Evaluation in the loop, and early stopping": (
        "state.epoch < 100 and state.patience == 0 and state.best < 1"
    ),
    "Curves after a roll-back": (
        "[json.loads(line)['step'] for line in kept(10**9)] == [*range(1, 3 * 480 // 16 + 1)]"
    ),
}


def blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def recipes() -> dict[str, str]:
    """The script below each heading that has one."""
    parts = re.split(r"^## (.*)\n", PAGE, flags=re.MULTILINE)[1:]
    found = {name: blocks(text) for name, text in zip(parts[::2], parts[1::2], strict=True)}
    return {name: block for name, (block,) in ((n, b) for n, b in found.items() if b)}


def test_each_recipe_that_has_a_script_is_run() -> None:
    assert set(recipes()) == set(ENDS)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("The same batch in every world", marks=NIGHTLY),
        pytest.param("A learning rate that follows the world", marks=NIGHTLY),
        "Evaluation in the loop, and early stopping",
        pytest.param("Curves after a roll-back", marks=NIGHTLY),
    ],
)
def test_a_recipe_outlives_a_worker(name: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    begin = blocks(PAGE)[0]
    script.write_text(f"{begin}{DIES}{recipes()[name]}assert {ENDS[name]}\nprint('as it should')\n")
    told = run("launch", script, cwd=tmp_path, calm=False)
    assert "was killed by SIGKILL" in told
    assert told.count("as it should") == 2, told
