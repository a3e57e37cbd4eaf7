"""Plain values become bytes and come back; any other bytes are refused, never obeyed."""

import math
import os
from collections import Counter, OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_etcd.errors import MalformedState, UsageError
from elastic_etcd.train.codecs import MAX_DEPTH, decode, encode

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 200), 1 << 200)
    | st.floats()
    | st.text(st.characters())
    | st.text(st.characters(categories=["Cs"]))  # what UTF-8 itself can't say
    | st.binary()
)
KEYS = SCALARS | st.lists(SCALARS, max_size=3).map(tuple)


def mappings(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    plain = st.dictionaries(KEYS, values, max_size=4)
    return plain | plain.map(OrderedDict) | plain.map(Counter)


PLAIN = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | mappings(inner)
    ),
    max_leaves=20,
)


def same(one: Any, other: Any) -> bool:
    """Equal in value, type and order; NaN is itself, and -0.0 is not 0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        both_nan = math.isnan(one) and math.isnan(other)
        return both_nan or (one == other and math.copysign(1, one) == math.copysign(1, other))
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@given(PLAIN)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    assert same(decode(encode(value, []), ()), value)


@given(st.binary())
def test_any_bytes_are_a_value_or_malformed(data: bytes) -> None:
    try:
        value = decode(data, (torch.zeros(1),))
    except MalformedState:
        return
    assert isinstance(value, torch.Tensor) or encode(value, []) is not None


@given(PLAIN, st.data())
def test_bytes_that_were_changed_are_a_value_or_malformed(value: Any, data: st.DataObject) -> None:
    changed = bytearray(encode([value, "end"], []))
    for _ in range(data.draw(st.integers(1, 3))):
        where = data.draw(st.integers(0, len(changed) - 1))
        changed[where] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(changed)))
    for tried in (bytes(changed), bytes(changed[:cut])):
        with suppress(MalformedState):
            decode(tried, ())


def test_tensors_are_named_by_their_place_and_shared_ones_once() -> None:
    one, other = torch.arange(6.0), torch.ones(0)
    tensors: list[torch.Tensor] = []
    data = encode({"a": one, "b": [one.detach(), one[1:]], "c": (other, other)}, tensors)
    assert [t.numel() for t in tensors] == [6, 5, 0, 0]
    copies = [t.clone() for t in tensors]
    back = decode(data, copies)
    assert back["a"] is back["b"][0] is copies[0]
    assert back["b"][1] is copies[1]


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [object()]}, "state['a'][0] is a builtins.object"),
        ({1, 2}, "state is a builtins.set"),
        (Path("x"), f"state is a {type(Path()).__module__}.PosixPath"),  # 3.13 moved it
        ([{object(): 1}], r"state[0]: the key <object"),
        ({"w": torch.zeros(2, 2).to_sparse()}, "state['w'] is no plain dense tensor"),
        (torch.zeros(2, device="meta"), "state is no plain dense tensor"),
    ],
)
def test_what_is_not_plain_is_refused_by_its_place(value: Any, where: str) -> None:
    with pytest.raises(UsageError) as error:
        encode(value, [], name="state")
    assert where in str(error.value)


def test_depth_is_bounded_on_both_sides() -> None:
    value: Any = 0
    for _ in range(MAX_DEPTH - 1):
        value = [value]
    assert decode(encode(value, []), ()) == value
    with pytest.raises(UsageError, match="nested deeper"):
        encode([value], [])
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UsageError, match="nested deeper"):
        encode(loop, [])
    deeper = b"l" + (1).to_bytes(8, "little") + encode(value, [])
    with pytest.raises(MalformedState, match="nested deeper"):
        decode(deeper, ())


def test_lengths_that_lie_make_nothing() -> None:
    huge = (1 << 60).to_bytes(8, "little")
    for tag in (b"l", b"t", b"m", b"o", b"c", b"s", b"b", b"i", b"x", b"?"):
        with pytest.raises(MalformedState):
            decode(tag + huge, ())


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (encode(1, []) + b"N", "follow the value"),
        (b"m" + (2).to_bytes(8, "little") + encode("k", []) * 4, "there twice"),
        (b"m" + (1).to_bytes(8, "little") + encode([[], 1], [])[9:], "can't be a key"),
        (b"s" + (1).to_bytes(8, "little") + b"\xff", "not UTF-8"),
        (b"", "early"),
    ],
)
def test_malformed_bytes_are_explained(data: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why) as error:
        decode(data, ())
    assert type(error.value) is MalformedState


class Evil:
    """Pickled, it makes a folder where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def test_pickle_is_written_and_read_only_by_those_who_opted_in(tmp_path: Path) -> None:
    evil = Evil(tmp_path / "evil")
    with pytest.raises(UsageError, match="allow_pickle=True"):
        encode(evil, [])
    data = encode([evil], [], allow_pickle=True)
    with pytest.raises(MalformedState, match="allow_pickle"):
        decode(data, ())
    assert not evil.folder.exists()
    decode(data, (), allow_pickle=True)
    assert evil.folder.exists()
