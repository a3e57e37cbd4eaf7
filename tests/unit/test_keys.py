"""Names of keys, and the JSON objects that they hold."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_etcd.core.schema import (
    History,
    Keys,
    Limits,
    Master,
    Participant,
    Ready,
    decimal,
    decode,
    encode,
    hexed,
    valid_job,
    valid_prefix,
)

KEYS = Keys("/elastic_etcd/resnet-7")
numbers = st.integers(0, (1 << 63) - 1)


@pytest.mark.parametrize("job", ["a", "resnet-7", "A.b_c-9", "...", "x" * 128])
def test_job_ids(job: str) -> None:
    assert valid_job(job)


@pytest.mark.parametrize(
    "job", ["", "a/b", "/", ".", "..", "a b", "a\n", "ä", "a\0", "x" * 129, "a:b", "*"]
)
def test_what_is_no_job_id(job: str) -> None:
    assert not valid_job(job)


@pytest.mark.parametrize("prefix", ["/a", "/elastic_etcd", "/team/x.y/z-1"])
def test_prefixes(prefix: str) -> None:
    assert valid_prefix(prefix)


@pytest.mark.parametrize("prefix", ["", "/", "a", "/a/", "//a", "/a//b", "/a b", "/a\n", "/ä"])
def test_what_is_no_prefix(prefix: str) -> None:
    assert not valid_prefix(prefix)


def test_a_lease_is_written_as_etcdctl_prints_it() -> None:
    assert hexed(0x694D8F5A8F2C1A0B) == "694d8f5a8f2c1a0b"
    assert hexed(0xA1) == "00000000000000a1"


@given(numbers, numbers)
def test_every_key_is_under_its_folder_and_under_the_root(generation: int, lease: int) -> None:
    below = [
        (KEYS.members, KEYS.member(lease)),
        (KEYS.acks(generation), KEYS.ack(generation, lease)),
        (KEYS.acks(), KEYS.acks(generation)),
        (KEYS.reports(generation), KEYS.report(generation, lease)),
        (KEYS.reports(), KEYS.reports(generation)),
        (KEYS.steps(generation), KEYS.step(generation, lease)),
        (KEYS.steps(), KEYS.steps(generation)),
        (KEYS.history(), KEYS.history(generation)),
        (KEYS.step_times, KEYS.step_time(lease)),
        (KEYS.unfit, KEYS.unfit_node("n1")),
    ]
    for folder, key in below:
        assert folder.endswith("/")
        assert key.startswith(folder)
        assert len(key) > len(folder)
    single = [KEYS.spec, KEYS.ledger, KEYS.round, KEYS.outcome, KEYS.hang, KEYS.wanted]
    single += [KEYS.stragglers, KEYS.divergence]
    assert all(k.startswith(KEYS.root + "/") for k in (*single, *(k for k, _ in below)))


@given(numbers, numbers)
def test_the_folder_of_one_generation_covers_no_other(one: int, other: int) -> None:
    assert KEYS.ack(other, 1).startswith(KEYS.acks(one)) == (one == other)
    assert KEYS.report(other, 1).startswith(KEYS.reports(one)) == (one == other)
    assert KEYS.step(other, 1).startswith(KEYS.steps(one)) == (one == other)


def test_values_read_well() -> None:
    assert encode(Ready(1, Master("n1", 80))) == '{"master": {"addr": "n1", "port": 80}, "v": 2}'
    assert encode(Participant(10, "größer", 2, 0, 0)) == (
        '{"first_rank": 0, "group_rank": 0, "lease": "000000000000000a", "node": "größer", '
        '"nproc": 2, "v": 2}'
    )


def test_limits_that_differ_are_told_by_their_flags() -> None:
    job, own = Limits(1, 2, max_restarts=1 << 40, settle=0.5), Limits(1, 2, patience=400.0)
    assert job.differing(job) == ""
    assert job.differing(own) == (
        "--max-restarts 1099511627776 (here 3), --settle 0.5 (here 3), "
        "the wait for a node that stops (--shutdown-timeout, --kill-timeout) 70 (here 400)"
    )


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@pytest.mark.parametrize(
    "value", ["", "{", "null", "[]", "1", '"v"', "{}", '{"v": 3}', '{"v": "1"}', '{"v": null}']
)
def test_what_is_no_value(value: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (each says what is wrong in its own words)
        decode(History, value)


@given(st.text() | json_values.map(json.dumps))
def test_decoding_raises_nothing_else(value: str) -> None:
    with contextlib.suppress(ValueError):
        assert decode(History, value).generation >= 0


def test_a_value_of_a_hundred_thousand_brackets_is_malformed() -> None:
    """Also in history, which is read where a view has not been through it."""
    with pytest.raises(ValueError, match="nested too deeply"):
        decode(History, "[" * 100_000)


@pytest.mark.parametrize("text", ["01", "-1", "", "1.0", " 1", "²", "1" * 19])
def test_a_generation_is_written_in_one_way(text: str) -> None:
    assert decimal(text) is None
    assert decimal("10") == 10
