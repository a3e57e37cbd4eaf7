"""The names that a training script may use: those that completion, help() and checkers show."""

import inspect
import pydoc
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset, Sampler

import elastic_etcd as ee
from scripts.docs_lib.reference import EXCEPTIONS, TASKS

ROOT = Path(__file__).parents[2]
# What a script may call beside what torch's class has.
METHODS = {
    ee.ElasticSampler: {
        *("agree", "consumed", "epoch", "record", "reshard", "set_epoch"),
        *("state_dict", "load_state_dict"),
    },
    ee.ElasticIterable: {
        *("agree", "epoch", "loader", "record", "reshard", "set_epoch"),
        *("state_dict", "load_state_dict"),
    },
    ee.ElasticState: {
        *("check", "commit", "load", "on_reset", "register", "restore", "save", "steps", "sync"),
    },
}
SAMPLER_VALUES = {"length", "rank", "shuffle", "tail", "world_size"}
STREAM_VALUES = {"buffer", "lengths", "rank", "shards", "shuffle", "tail", "world_size"}


@pytest.fixture(scope="module")
def mypy_s(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for scripts, and for what mypy knows of our modules."""
    return tmp_path_factory.mktemp("mypy")


def check(mypy_s: Path, script: str) -> str:
    file = mypy_s / "script.py"
    file.write_text(script)
    cache = mypy_s / "cache"
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(cache), str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.nightly(part="packaging")
def test_n7_a_typo_is_an_error_of_mypy(mypy_s: Path) -> None:
    told = check(mypy_s, "import elastic_etcd as ee\n\nee.memory_checkpont({}, 'a')\n")
    assert 'Module has no attribute "memory_checkpont"' in told


def test_n7_mypy_knows_each_public_name(mypy_s: Path) -> None:
    names = "".join(f"ee.{name}\n" for name in ee.__all__)
    told = check(mypy_s, f"import elastic_etcd as ee\n\n{names}\nfrom elastic_etcd import *\n")
    assert "Success" in told


def test_n9_what_raises_is_no_condition(mypy_s: Path) -> None:
    told = check(mypy_s, "import elastic_etcd as ee\n\nif ee.raise_if_stale():\n    pass\n")
    assert "does not return a value" in told


def test_n7_each_name_is_there_and_no_other() -> None:
    assert len(set(ee.__all__)) == len(ee.__all__)
    for name in ee.__all__:
        assert inspect.getdoc(getattr(ee, name)), name
    with pytest.raises(AttributeError, match="memory_checkpont"):
        ee.memory_checkpont  # type: ignore[attr-defined]  # noqa: B018 - looking it up raises
    assert [name for name in dir(ee) if not name.startswith("__")] == sorted(ee.__all__)


def test_n7_help_shows_them() -> None:
    shown = pydoc.plain(pydoc.render_doc(ee))
    described = re.findall(r"^    (?:class )?(\w+)\(", shown, re.MULTILINE)
    assert {name for name in described if name[:2] != "__"} == set(ee.__all__)


def test_n7_the_errors_that_they_raise_are_among_them() -> None:
    for name in ("AgentGone", "EtcdUnreachable", "MalformedState", "StaleGeneration", "UsageError"):
        assert getattr(ee, name).__module__ == "elastic_etcd.errors"


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
def test_n9_completion_shows_the_methods_of_users_only(kind: type) -> None:
    torch_s = {*dir(Sampler), *dir(IterableDataset), *dir(DataLoader)}
    assert {name for name in dir(kind) if name[0] != "_"} - torch_s == METHODS[kind]


@pytest.mark.parametrize(
    ("value", "values"),
    [
        (ee.ElasticSampler(8), SAMPLER_VALUES),
        (ee.ElasticBatchSampler(lambda *_: [[0], [1]]), SAMPLER_VALUES),
        (ee.ElasticIterable([0], lambda *_: [0]), STREAM_VALUES),
    ],
    ids=["sampler", "batches", "stream"],
)
def test_n9_and_their_values(value: Any, values: set[str]) -> None:
    assert {name for name in vars(value) if name[0] != "_"} == values


def test_each_name_has_an_example_or_its_class_has() -> None:
    """In its docstring, in an indented block of code."""
    for name in ee.__all__:
        made = getattr(ee, name)
        if not (isinstance(made, type) and issubclass(made, Exception)):
            assert re.search(r"\n    .*\bee\.", inspect.getdoc(made) or ""), name


def test_the_reference_has_each_name_once() -> None:
    shown = [name for names in TASKS.values() for name in names]
    raised = [name for name in ee.__all__ if f"| `{name}` |" in EXCEPTIONS]
    assert sorted([*shown, *raised]) == sorted(ee.__all__)
