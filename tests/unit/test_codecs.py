"""Plain values become JSON and come back; anything else is refused, never obeyed."""

import math
import os
import subprocess
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_etcd.errors import MalformedState, UsageError
from elastic_etcd.train.state.codecs import _uncast, copied_names
from elastic_etcd.train.state.encoding import MAX_DEPTH, decode, dumps, encode, loads

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


def written(value: Any) -> bytes:
    return dumps(encode(value, {}))


def read(data: bytes) -> Any:
    return decode(loads(data), {"x": torch.zeros(1)})


@pytest.mark.parametrize("value", [(1 << 64) - 1, 1 << 64, -(1 << 64)])
def test_a_whole_number_beyond_json_s_is_written_as_text(value: int) -> None:
    assert same(read(written(value)), value)
    assert (b"$int" in written(value)) == (value.bit_length() > 64)


@given(PLAIN)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    assert same(read(written(value)), value)


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                [
                    *("$tuple", "$size", "$set", "$frozenset", "$dict", "$ordered", "$counter"),
                    *("$int", "$float", "$bytes", "$str", "$dtype", "$device", "$numpy", "$array"),
                    *("$tensor", "$pickle", "$metadata"),
                ]
            ),
            inner,
            max_size=2,
        )
    ),
    max_leaves=10,
)


@given(TREES)
def test_any_tree_is_a_value_or_malformed(tree: Any) -> None:
    try:
        value = decode(tree, {"x": torch.zeros(1)})
    except MalformedState:
        return
    tensors: dict[str, torch.Tensor] = {}
    again = encode(value, tensors)
    assert dumps(encode(decode(again, tensors), {})) == dumps(again)


@given(st.binary())
def test_any_bytes_are_a_value_or_malformed(data: bytes) -> None:
    with suppress(MalformedState):
        read(data)


@given(PLAIN, st.data())
def test_bytes_that_were_changed_are_a_value_or_malformed(value: Any, data: st.DataObject) -> None:
    changed = bytearray(written([value, "end"]))
    for _ in range(data.draw(st.integers(1, 3))):
        where = data.draw(st.integers(0, len(changed) - 1))
        changed[where] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(changed)))
    for tried in (bytes(changed), bytes(changed[:cut])):
        with suppress(MalformedState):
            read(tried)


def test_tensors_are_named_by_their_place_and_shared_ones_once() -> None:
    one, other = torch.arange(6.0), torch.ones(0)
    tensors: dict[str, torch.Tensor] = {}
    tree = encode({"a": one, "b": [one.detach(), one[1:]], "c": (other, other)}, tensors, name="s")
    assert {name: t.numel() for name, t in tensors.items()} == {
        "s.a": 6,
        "s.b.1": 5,
        "s.c.0": 0,
        "s.c.1": 0,
    }
    copies = {name: t.clone() for name, t in tensors.items()}
    back = decode(tree, copies)
    assert back["a"] is back["b"][0] is copies["s.a"]
    assert back["b"][1] is copies["s.b.1"]


def test_no_two_tensors_have_one_name() -> None:
    tensors: dict[str, torch.Tensor] = {}
    encode({"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1)}, tensors)
    assert [t.item() for t in tensors.values()] == [0, 1]


def test_t17_what_schedules_and_configurations_have_in_them() -> None:
    values = {
        "rate": np.float64(0.5),
        "step": np.int32(7),
        "flag": np.bool_(True),
        "moments": np.arange(6, dtype=">i2").reshape(2, 3),
        "none": np.zeros((0, 3)),
        "scalar": np.array(2.5),
        "fixed": np.broadcast_to(np.float32(3), (2, 2)),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "shape": torch.Size([2, 3]),
        "seen": {3, "b", (1, None)},
        "kinds": frozenset((b"x", 2.5)),
    }
    tensors: dict[str, torch.Tensor] = {}
    back = decode(loads(dumps(encode(values, tensors))), tensors)
    for name, value in values.items():
        assert type(back[name]) is type(value)
        if isinstance(value, np.ndarray):
            assert back[name].dtype == value.dtype
            assert np.array_equal(back[name], value)
            assert not np.shares_memory(back[name], value)
        else:
            assert back[name] == value
            assert getattr(back[name], "dtype", None) == getattr(value, "dtype", None)


def test_t17_a_set_is_written_alike_in_every_process() -> None:
    code = (
        "from elastic_etcd.train.state.encoding import dumps, encode; "
        "print(dumps(encode({'a', 'b', 'c', 3, None}, {})))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1


def test_t17_numpy_is_not_needed() -> None:
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "from elastic_etcd.errors import MalformedState\n"
        "from elastic_etcd.train.state.encoding import decode, encode\n"
        "assert decode(encode({'a': {1}, 'b': 2.5}, {}), {}) == {'a': {1}, 'b': 2.5}\n"
        "try: decode({'$numpy': ['<f8', 'AAAAAAAAAAA=']}, {})\n"
        "except MalformedState as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], stdout=subprocess.PIPE, check=True
    )
    assert b"numpy's, which is not installed" in done.stdout


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [object()]}, "state['a'][0] is a builtins.object"),
        (np.array(["a"], dtype=object), "state is a numpy.ndarray"),
        ({1: {2, object}}, "state[1]: the key <class"),
        (Path("x"), f"state is a {type(Path()).__module__}.PosixPath"),  # 3.13 moved it
        ([{object(): 1}], r"state[0]: the key <object"),
        ({"w": torch.zeros(2, 2).to_sparse()}, "state['w'] is no plain dense tensor"),
        (torch.zeros(2, device="meta"), "state is no plain dense tensor"),
    ],
)
def test_what_is_not_plain_is_refused_by_its_place(value: Any, where: str) -> None:
    with pytest.raises(UsageError) as error:
        encode(value, {}, name="state")
    assert where in str(error.value)


@pytest.mark.parametrize(
    "wrapped",
    [lambda v: [v], lambda v: (v,), lambda v: {"a": v}, lambda v: {1: v}],
    ids=["list", "tuple", "dict", "dict of numbers"],
)
def test_depth_is_bounded_on_both_sides(wrapped: Callable[[Any], Any]) -> None:
    value: Any = 0
    for _ in range(MAX_DEPTH - 1):
        value = wrapped(value)
    assert read(written(value)) == value
    with pytest.raises(UsageError, match="nested deeper"):
        encode(wrapped(value), {})


def test_a_value_in_itself_is_refused_and_so_is_a_text_too_deep() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UsageError, match="nested deeper"):
        encode(loop, {})
    for wrap in (lambda it: [it], lambda it: {"a": it}, lambda it: OrderedDict(a=it)):
        value: Any = 0
        for _ in range(MAX_DEPTH - 1):
            value = wrap(value)
        with pytest.raises(MalformedState, match="nested deeper"):
            decode([encode(value, {})], {})
    with pytest.raises(MalformedState, match="not JSON"):
        loads(b"[" * 100_000)


def test_a_number_that_json_has_no_word_for_is_neither_read_nor_written() -> None:
    with pytest.raises(MalformedState):
        loads(b"NaN")
    with pytest.raises(ValueError, match="JSON compliant"):
        dumps(math.nan)


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        ({"$dict": [["k", 1], ["k", 2]]}, "there twice"),
        ({"$dict": [[[], 1]]}, "can't be a key"),
        ({"$set": [1, 1]}, "member twice"),
        ({"$set": [{"$tuple": [[]]}]}, "not what a value"),
        ({"$frozenset": [{"$frozenset": []}]}, "one that is none"),
        ({"$bytes": "?"}, "not what a value"),
        ({"$dtype": "load"}, "not what a value"),
        ({"$numpy": ["|O8", "AAAA"]}, "no number of numpy's"),
        ({"$array": ["<f8", [1 << 62], "x"]}, "no array"),
        ({"$array": ["<f8", [-1], "x"]}, "no length"),
        ({"$tensor": "y"}, "no tensor 'y'"),
        ({"$tuple": "abc"}, "not followed by a list"),
        ({"$tuple": [], "a": 1}, "1 more"),
        ({"$shell": "ls"}, "no value is written as"),
    ],
)
def test_malformed_trees_are_explained(tree: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why) as error:
        decode(tree, {"x": torch.zeros(1)})
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
        encode(evil, {})
    tree = encode([evil], {}, allow_pickle=True)
    with pytest.raises(MalformedState, match="allow_pickle"):
        decode(tree, {})
    assert not evil.folder.exists()
    decode(tree, {}, allow_pickle=True)
    assert evil.folder.exists()


def test_what_loading_made_a_tensor_of_stays_one() -> None:
    """As an optimizer does with the steps that an older torch has counted in numbers."""
    loaded = {"step": torch.tensor(7.0), "moment": torch.ones(2, dtype=torch.float16)}
    both = _uncast(loaded, {"step": 7, "moment": torch.ones(2)}, {})
    assert torch.equal(both["step"], torch.tensor(7.0))
    assert both["moment"].dtype == torch.float32


def test_what_is_of_another_shape_or_type_or_place_stays_as_loading_made_it() -> None:
    loaded = {"moment": torch.ones(3), "half": torch.ones(2), "more": {"kept": torch.ones(1)}}
    saved = {"moment": torch.zeros(3), "half": torch.zeros(3, dtype=torch.float16), "more": 1}
    both = _uncast(loaded, saved, {})
    assert torch.equal(both["moment"], torch.ones(3))
    assert torch.equal(both["half"], torch.ones(2))
    assert torch.equal(both["more"]["kept"], torch.ones(1))


def test_a_tensor_that_loading_has_copied_for_each_parameter_is_one_again() -> None:
    """As where it was loaded from the CPU, to a GPU."""
    saved = torch.ones(2)
    loaded = [saved.clone(), saved.clone(), saved.half()]
    assert len({id(each) for each in _uncast(loaded, [saved] * 3, {})}) == 1


def test_parameters_and_buffers_are_copied_from_and_not_kept() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(1, 1))
    module[0].register_buffer("mean", torch.zeros(1))
    assert [*copied_names(module)] == ["0.weight", "0.bias", "0.mean"]
    twice = torch.nn.Sequential(module, module)
    assert {*copied_names(twice)} == twice.state_dict().keys()


@pytest.mark.parametrize("key", ["$", "$tensor", "$dict", "$$", "a$"])
def test_a_key_that_begins_as_ours_do(key: str) -> None:
    assert decode(loads(dumps(encode({key: 1}, {}))), {}) == {key: 1}
