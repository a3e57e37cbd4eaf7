"""Replicas are compared: who differs is named, and nobody is where all is well."""

import itertools
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastic_etcd.errors import UsageError
from elastic_etcd.protocol import messages
from elastic_etcd.train.state import replicas
from elastic_etcd.train.state.elastic_state import ElasticState
from tests.support.forked import ranks
from tests.support.states import commits, newest

FLIPPED = 1  # the rank on which a bit flips


# --- the digest ---------------------------------------------------------------------------


@given(st.binary(min_size=1, max_size=200), st.data())
def test_t6_a_bit_that_flips_changes_the_digest(data: bytes, draws: st.DataObject) -> None:
    place = draws.draw(st.integers(0, 8 * len(data) - 1))
    begin = draws.draw(st.integers(0, min(9, len(data) - 1)))
    one = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    other = one.clone()
    other[place // 8] ^= 1 << place % 8
    chunk, replicas.CHUNK = replicas.CHUNK, draws.draw(st.integers(1, 5))
    try:
        same, flipped, part = replicas.digests_of([one, other, one[begin:]])
        assert replicas.digests_of([one.clone()[begin:]]) == [part]
    finally:
        replicas.CHUNK = chunk
    assert same != flipped
    assert replicas.combined({"a": same, "b": part}) != replicas.combined({"a": flipped, "b": part})


def test_t6_words_that_change_places_change_the_digest() -> None:
    one = torch.arange(replicas.CHUNK + 10, dtype=torch.int64)
    places = [(0, 1), (3, 77), (5, replicas.CHUNK), (replicas.CHUNK + 1, replicas.CHUNK + 2)]
    others = []
    for here, there in places:
        other = one.clone()
        other[[here, there]] = one[[there, here]]
        others.append(other)
    assert len({*replicas.digests_of([one, *others])}) == len(others) + 1


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e5m2]
)
def test_t6_the_digest_is_of_values_however_they_lie(dtype: torch.dtype) -> None:
    whole = torch.randint(0, 2, (6, 10)).to(dtype)
    turned = whole.t().contiguous().t()
    assert len({*replicas.digests_of([whole, turned, torch.cat([whole, whole])[6:]])}) == 1
    assert replicas.digests_of([]) == []
    assert replicas.digests_of([whole[:0], torch.tensor(1.0)])


# --- ranks --------------------------------------------------------------------------------


class Told:
    """Stands for the channel: the messages to the agent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.messages: list[Any] = []
        monkeypatch.setattr(replicas, "agent", lambda: self)

    def send(self, message: Any) -> None:
        self.messages.append(message)


class Model(nn.Module):  # type: ignore[misc]  # torch is not followed
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(40, 20), nn.Linear(20, 2)
        self.norm = nn.BatchNorm1d(20)
        self.register_buffer("mask", torch.ones(20))

    def forward(self, batch: torch.Tensor) -> Any:
        return self.second(self.norm(self.first(batch)) * self.mask)


def flip(tensor: torch.Tensor, bit: int = 3) -> None:
    words = tensor.detach().view(-1).view(torch.uint8)
    words[len(words) // 2] ^= 1 << bit


def trained(
    rank: int, every: str = "1", faults: dict[int, str] | None = None, steps: int = 6
) -> Any:
    """What a training says of itself whose rank FLIPPED has these faults, by their steps."""
    patch = pytest.MonkeyPatch()
    patch.setenv("ELASTIC_ETCD_COMPARE_EVERY", every)
    patch.setenv("ELASTIC_ETCD_NODE", f"n{rank}")
    told = Told(patch)
    torch.manual_seed(rank)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    ddp = nn.parallel.DistributedDataParallel(model)
    state = ElasticState(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 3),
        noise=torch.Generator().manual_seed(rank),
        best=None,
        mine=torch.tensor(float(rank)),
        epoch=0,
    )
    state.sync()
    state.mine, state.best = torch.tensor(float(rank)), rank
    state.noise.manual_seed(rank)
    for step in range(steps):
        batch = torch.randn(8, 40, generator=state.noise)
        ddp(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        state.scheduler.step()
        if rank == FLIPPED:
            match (faults or {}).get(step):
                case "weight":
                    flip(model.first.weight, bit=0)
                case "moment":
                    flip(optimizer.state[model.second.weight]["exp_avg_sq"])
                case "mask":
                    flip(model.mask)
                case "rate":
                    optimizer.param_groups[0]["lr"] = 0.5
                case "commit":
                    flip(newest(state).body, bit=7)
        state.commit()
    return told.messages


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("weight", "model.first.weight"),
        ("moment", "optimizer.state.exp_avg_sq of second.weight"),
        ("mask", "model.mask"),
        ("rate", "optimizer.param_groups.0"),
        ("commit", "its last commit in memory"),
    ],
)
def test_t6_the_rank_on_which_a_bit_flips_is_named(tmp_path: Path, fault: str, name: str) -> None:
    told = ranks(3, tmp_path, trained, "1", {2: fault})
    line = f"replicas differ: rank 1 on n1: {name}; the other 2 ranks agree"
    assert told == [
        [messages.Diverged(0, line, named=False, alone=False)],
        [messages.Diverged(0, line, named=True, alone=True)],
        [],
    ]


def test_t6_nobody_is_named_where_ranks_have_what_is_theirs(tmp_path: Path) -> None:
    """Statistics of batches, random states, values that each rank sets, and non-tensors."""
    assert ranks(2, tmp_path, trained) == [[], []]


def test_t6_of_two_ranks_nobody_knows_which_is_right(tmp_path: Path) -> None:
    at_0, at_1 = ranks(2, tmp_path, trained, "1", {1: "weight", 3: "mask", 4: "commit"})
    assert [(m.named, m.alone) for m in at_0] == [(False, False)]
    assert [(m.named, m.alone) for m in at_1] == [(True, False)]
    assert at_0[0].line == at_1[0].line
    assert at_0[0].line == (
        "replicas differ: rank 1 on n1: model.first.weight; which of the ranks are right is not "
        "known"
    )


@pytest.mark.parametrize(("fault", "alone"), [("mask", True), ("commit", True)])
def test_t6_of_two_ranks_the_one_that_changed_is_known(
    tmp_path: Path, fault: str, alone: bool
) -> None:
    _, (message,) = ranks(2, tmp_path, trained, "1", {3: fault})
    assert message.alone is alone
    assert message.line.endswith("; the other rank has not changed")


@pytest.mark.parametrize(("every", "fault", "tells"), [("2", 1, True), ("off", 1, False)])
def test_t6_they_are_compared_each_so_many_commits(
    tmp_path: Path, every: str, fault: int, tells: bool
) -> None:
    told = ranks(2, tmp_path, trained, every, {fault: "weight"})
    assert [bool(each) for each in told] == [tells, tells]


def given_up(rank: int) -> Any:
    """With --on-divergence restart: the worker that is wrong has no snapshot any more."""
    patch = pytest.MonkeyPatch()
    patch.setenv("ELASTIC_ETCD_ON_DIVERGENCE", "restart")
    patch.setattr(replicas, "_KILLED", 0.1)
    state: list[ElasticState] = []
    made = ElasticState.sync

    def sync(self: ElasticState) -> bool:
        state.append(self)
        return made(self)

    patch.setattr(ElasticState, "sync", sync)
    try:
        trained(rank, "1", {2: "weight"}, steps=3)
    except RuntimeError as error:
        return str(error), commits(state[0])


def test_t6_a_worker_that_is_to_be_started_anew_commits_nothing(tmp_path: Path) -> None:
    """Else its values would be the newest."""
    found = ranks(3, tmp_path, given_up)
    said, committed = found[FLIPPED]
    assert said.startswith("replicas differ: rank 1 on n1: model.first.weight; ")
    assert said.endswith(": this worker is to be started anew")
    assert not committed


def of_parts(rank: int) -> str:
    """An optimizer whose moments are parted among the ranks, as Muon's are."""
    os.environ["ELASTIC_ETCD_COMPARE_EVERY"] = "auto"
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = ElasticState(model=model, optimizer=optimizer)
    state.sync()
    mine = optimizer.param_groups[0]["params"][rank]
    optimizer.state[mine]["momentum_buffer"] = torch.zeros_like(mine)
    with pytest.raises(UsageError) as refused:
        state.commit()
    return str(refused.value)


def test_t6_moments_that_are_parted_are_refused_at_the_first_commit(tmp_path: Path) -> None:
    at_0, at_1 = ranks(2, tmp_path, of_parts)
    assert at_0 == at_1
    assert at_0.startswith(
        "the ranks keep different parts: rank 1 has no optimizer.state.momentum_buffer of 0.weight "
        "and has optimizer.state.momentum_buffer of 0.bias, which rank 0 has not. A state keeps"
    )


def of_one_rate(rank: int) -> bool:
    """Groups that share one tensor as their rate, which only rank 0 does not load at first."""
    os.environ["ELASTIC_ETCD_COMPARE_EVERY"] = "auto"
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(1e-3 + rank))
    state = ElasticState(model=model, optimizer=optimizer)
    state.sync()
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    state.commit()
    one, other = (group["lr"] for group in optimizer.param_groups)
    return one is other and float(one) == float(torch.tensor(1e-3))


def test_t6_a_rate_that_groups_share_is_the_same_part_on_all_ranks(tmp_path: Path) -> None:
    assert ranks(2, tmp_path, of_one_rate) == [True, True]


def flipped_at_random(rank: int, flips: int) -> list[tuple[str, list[Any]]]:
    """Each flip and what was said of it, all in worlds of their own, the ranks' draws the same."""
    patch = pytest.MonkeyPatch()
    patch.setenv("ELASTIC_ETCD_COMPARE_EVERY", "1")
    told = Told(patch)
    draws, model = random.Random(1), Model()
    optimizer = torch.optim.AdamW(model.parameters())
    state = ElasticState(model=model, optimizer=optimizer)
    state.sync()
    ddp = nn.parallel.DistributedDataParallel(model, broadcast_buffers=True)
    ddp(torch.randn(8, 40, generator=torch.Generator().manual_seed(1))).sum().backward()
    optimizer.step()
    found: list[tuple[str, list[Any]]] = []
    for _ in range(flips):
        state.commit()  # the first of its world: all are alike
        moments = {
            f"{name} of {of}": moment
            for of, parameter in model.named_parameters()
            for name, moment in optimizer.state[parameter].items()
        }
        places = dict(model.named_parameters()) | dict(model.named_buffers()) | moments
        places["its last commit in memory"] = newest(state).body
        victim, name = draws.randrange(3), draws.choice(sorted(places))
        words = places[name].detach().view(-1).view(torch.uint8)
        place, bit = draws.randrange(len(words)), draws.randrange(8)
        assert told.messages == [], found
        if rank == victim:
            words[place] ^= 1 << bit
        state.commit()
        found.append((f"rank {victim}: {name}", told.messages[:]))
        told.messages.clear()
        if rank == victim and name != "its last commit in memory":
            words[place] ^= 1 << bit
        state.sync()
    return found


@pytest.mark.parametrize("flips", [50, pytest.param(1000, marks=pytest.mark.nightly(part="users"))])
def test_t6_each_bit_that_flips_is_found_and_its_rank_named(tmp_path: Path, flips: int) -> None:
    for rank, found in enumerate(ranks(3, tmp_path, flipped_at_random, flips)):
        assert len(found) == flips
        for flip, messages_ in found:
            victim, name = flip.split(": ")
            if rank not in {0, int(victim[5:])}:
                assert messages_ == [], flip
                continue
            (message,) = messages_
            assert victim in message.line, flip
            assert name.rpartition(" of ")[2] in message.line, (flip, message.line)
            assert message.alone is message.named is (str(rank) == victim[5:]), flip


# --- how often ----------------------------------------------------------------------------


def test_t6_comparisons_take_no_more_than_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock by which a commit comes each 0.1 s and a comparison takes 5 ms."""
    clock = itertools.count()
    seconds = 0.0
    spent, compared = 0.0, 0

    def digests(tensors: Any) -> list[int]:
        nonlocal seconds, spent, compared
        seconds += 0.005
        spent += 0.005
        compared += 1
        return [1 for _ in tensors]

    monkeypatch.setattr("time.monotonic", lambda: seconds)
    monkeypatch.setattr(replicas, "digests_of", digests)
    monkeypatch.setattr(replicas, "rank_and_size", lambda **_: (0, 2))
    monkeypatch.setattr(replicas, "gather", lambda row: [list(row), list(row)])
    monkeypatch.setattr(replicas, "_loses_newest", lambda _: False)
    each = replicas.Replicas("auto")
    each.begin()
    for commit in clock:
        seconds += 0.1
        each.compare_if_due({}, None, ({}, {}), commit)  # type: ignore[arg-type]
        if seconds > 100:
            break
    assert compared >= 50
    assert spent <= replicas.SHARE * seconds + 0.005
