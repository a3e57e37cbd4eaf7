"""The values that the rules take and give: frozen, and what is not said in them is nothing."""

import inspect
import math
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import fields

from elastic_etcd import core
from elastic_etcd.core import (
    failure_policies,
    hangs,
    invariants,
    lifecycle,
    peers,
    ranks,
    requests,
    rules,
    schema,
    stragglers,
    txn,
    view,
    words,
    writes,
)

MODULES = (
    *(failure_policies, hangs, invariants, lifecycle, peers, ranks, rules, schema),
    *(stragglers, txn, view, requests, words, writes),
)
# What is something though nothing is said; what is written another version may have left out.
SAID = {
    "Sizes": {"multiple_of": 1},
    "Limits": {
        "multiple_of": 1,
        "max_restarts": 3,
        "restart_window": 3600.0,
        "min_uptime": 10.0,
        "suspect_after": 2,
        "stop_after_no_progress": 3,
        "hang_action": "report",
        "compare_every": "auto",
        "on_divergence": "report",
        "copies": 2,
        "straggler_factor": 1.5,
        "settle": 3.0,
        "join_timeout": 600.0,
        "leave_deadline": 30.0,
        "patience": 70.0,
    },
    "Spec": {"min_version": schema.VERSION},
    "Member": {"labels": schema.Labels()},
    "Round": {"cause": schema.Cause.FAILURE},
    "Scale": {"multiple_of": 1},
    "Watched": {"seconds": 2.0},
    "Spent": {"worlds": 1},
    "View": {"ledger": schema.Ledger()},
    "Elapsed": {"vacant": math.inf},
    "State": {"life": lifecycle.Life.JOINING, "lasted": lifecycle.Lasted()},
    "Departure": {"save": True},
}


def values(module: ModuleType) -> Iterator[type[Any]]:
    """The structs and dataclasses that this module of core/ shows, and those that these are of."""
    for name, kind in inspect.getmembers(module, inspect.isclass):
        if not name.startswith("_"):
            yield from (of for of in kind.__mro__ if of.__module__.startswith(core.__name__))


def is_frozen(kind: type[Any]) -> bool:
    if issubclass(kind, Struct):
        return kind.__struct_config__.frozen
    return not is_dataclass(kind) or bool(kind.__dataclass_params__.frozen)  # type: ignore[attr-defined]


def test_these_are_all_modules() -> None:
    found = Path(str(core.__file__)).parent.glob("[!_]*.py")
    assert {Path(str(module.__file__)) for module in MODULES} == set(found)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_none_can_be_changed(module: ModuleType) -> None:
    assert [kind for kind in values(module) if not is_frozen(kind)] == []


def said(kind: type[Any]) -> dict[str, Any]:
    """The fields of a value of which nothing is said that are something all the same."""
    return {f.name: f.default for f in fields(kind) if not f.required and f.default}


def test_what_is_not_said_is_nothing() -> None:
    kinds = {kind for module in MODULES for kind in values(module) if issubclass(kind, Struct)}
    assert {kind.__name__: said(kind) for kind in kinds if said(kind)} == SAID


@pytest.mark.parametrize(
    ("text", "version"),
    [("{}", 0), ("[", 0), ('{"v":-1}', 0), ('{"v":"2"}', 0), ('{"v":2,"min_version":3}', 3)],
)
def test_the_format_that_a_text_needs(text: str, version: int) -> None:
    assert schema.format_of(text) == version
