"""What a script sees of a state in one process: values, codecs, commits, files."""

import gc
import json
import os
import resource
import subprocess
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch as reader
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler as schedules

import elastic_etcd.train.agent_channel
from elastic_etcd.agent import channel as agent_end
from elastic_etcd.errors import MalformedState, StaleGeneration, UsageError
from elastic_etcd.train import sync_point
from elastic_etcd.train.collectives import World
from elastic_etcd.train.data.sampler import ElasticSampler
from elastic_etcd.train.state import snapshot_store
from elastic_etcd.train.state.elastic_state import ElasticState
from elastic_etcd.train.state.snapshot_format import Version
from tests.support.channels import Job
from tests.support.forked import Child, group
from tests.support.states import commits, newest


def network() -> nn.Module:
    tied = nn.Linear(4, 4)
    return nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.Flatten(), tied, tied)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for step in range(steps):

        def loss(step: int = step) -> Any:
            optimizer.zero_grad()
            made = model(torch.full((3, 4, 1), step + 1.0)).square().mean()
            made.backward()
            return made

        optimizer.step(loss)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return bool(torch.equal(one, other)) and one.dtype == other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    return [copied(v) for v in value] if type(value) is list else value


def test_values_are_attributes() -> None:
    state = ElasticState(epoch=0, best={"loss": 1.5})
    state.epoch += 1
    state.best["loss"] = 0.5
    assert (state.epoch, state.best) == (1, {"loss": 0.5})
    assert {"epoch", "best", "commit"} <= set(dir(state))
    with pytest.raises(AttributeError, match="epcoh"):
        state.epcoh = 3
    with pytest.raises(AttributeError, match="no value named 'rounds'"):
        print(state.rounds)
    for name in ("commit", "sync", "_x", "__class__"):
        with pytest.raises(UsageError, match=name):
            ElasticState(**{name: 1})  # type: ignore[arg-type]


def test_restore_goes_back_to_the_last_commit_and_again() -> None:
    weights = torch.ones(3)
    state = ElasticState(
        epoch=0, log=[(1, "a")], none=None, ema=weights, path=Path("a"), allow_pickle=True
    )
    with pytest.raises(UsageError, match="nothing to restore"):
        state.restore()
    state.commit()
    for _ in range(2):
        state.epoch, state.none, state.path = 7, 8, Path("b")
        state.log.append((2, "b"))
        state.ema.add_(5)
        state.restore()
        assert (state.epoch, state.log, state.none) == (0, [(1, "a")], None)
        assert state.path == Path("a")
        assert state.ema.tolist() == [1, 1, 1]
    state.epoch = 3
    state.commit()
    state.restore()
    assert state.epoch == 3


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 0.1, amsgrad=True),
    "adamw-tensor-lr": lambda p: torch.optim.AdamW(p, torch.tensor(0.1), foreach=False),
    "adafactor": torch.optim.Adafactor,
    "lbfgs": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=4),
    "rmsprop": torch.optim.RMSprop,
    "groups": lambda p: torch.optim.Adagrad([{"params": list(p), "lr": 0.3}], 0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_after_a_restore_as_if_nothing_had_been(name: str) -> None:
    torch.manual_seed(0)
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    state = ElasticState(model=model, optimizer=optimizer)
    trained(model, optimizer, 2)
    state.commit()
    ends = []
    for _ in range(3):
        trained(model, optimizer, 3)
        ends.append(copied([dict(model.state_dict()), optimizer.state_dict()]))
        state.restore()
    assert same(ends[0], ends[1])
    assert same(ends[0], ends[2])


def test_a_restored_optimizer_keeps_its_tensors_and_not_the_snapshot_s() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    state = ElasticState(model=model, optimizer=optimizer)
    state.commit()  # no moments yet
    trained(model, optimizer)
    state.commit()
    places = [t.data_ptr() for row in optimizer.state.values() for t in row.values()]
    state.restore()
    assert places == [t.data_ptr() for row in optimizer.state.values() for t in row.values()]
    newcomer = torch.optim.Adam(model.parameters())
    state.optimizer = newcomer
    state.restore()
    kept = newest(state)
    trained(model, newcomer, 2)
    assert kept.is_intact()


def test_a_tensor_that_occurs_several_times_is_one_again_when_it_is_loaded() -> None:
    """A count that all parameters share, in a survivor, which has it, and in a newcomer."""

    def shared(optimizer: Any, dtype: torch.dtype) -> Any:
        count = torch.ones((), dtype=dtype)
        for parameter in model.parameters():
            optimizer.state[parameter] = {"step": count, "factor": count}
        return optimizer

    class Listed(nn.Module):  # type: ignore[misc]
        def get_extra_state(self) -> list[torch.Tensor]:
            return self.seen

        def set_extra_state(self, saved: list[torch.Tensor]) -> None:
            self.seen = saved

    model = nn.Sequential(nn.Linear(2, 2), Listed(), Listed())
    model[1].seen = model[2].seen = [torch.zeros(1)] * 2
    survivor = shared(torch.optim.SGD(model.parameters()), torch.float32)
    cast = shared(torch.optim.SGD(model.parameters()), torch.float64)
    for optimizer in (survivor, cast):
        state = ElasticState(model=model, optimizer=optimizer)
        state.commit()
        for state.optimizer in (optimizer, torch.optim.SGD(model.parameters())):
            state.restore()
            rows = [state.optimizer.state[parameter] for parameter in model.parameters()]
            assert len({id(tensor) for row in rows for tensor in row.values()}) == 1
            assert len({id(tensor) for each in model[1:] for tensor in each.seen}) == 1


class Versioned(nn.Module):  # type: ignore[misc]
    """As torch's own modules that have changed what they save: an old state dict is translated."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((2,), 3.0))

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        if local_metadata.get("version", 1) < 2:  # it was a logarithm
            state_dict[prefix + "scale"] = state_dict[prefix + "scale"].exp()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


class Average:
    """An average of weights as many scripts have it, with a state dict that is a module's."""

    def __init__(self) -> None:
        self.model = Versioned()

    def state_dict(self) -> Any:
        return self.model.state_dict()

    def load_state_dict(self, saved: Any) -> None:
        self.model.load_state_dict(saved)


def test_t5_modules_are_loaded_as_the_version_that_they_were_saved_as(tmp_path: Path) -> None:
    model = nn.Sequential(Versioned(), nn.BatchNorm1d(2))
    state = ElasticState(model=model, average=Average(), best=model.state_dict())
    model[1].num_batches_tracked.fill_(7)
    state.commit()
    state.save(tmp_path / "file")
    for load in (state.restore, lambda: state.load(tmp_path / "file")):
        nn.init.zeros_(model[0].scale)
        model[1].num_batches_tracked.zero_()
        load()
        assert model[0].scale.tolist() == state.average.model.scale.tolist() == [3, 3]
        assert int(model[1].num_batches_tracked) == 7  # without a version it would be 0
        assert type(state.best) is type(model.state_dict())
        assert state.best._metadata == model.state_dict()._metadata


class Observer(nn.Module):  # type: ignore[misc]
    """Keeps what it is given: as extra state, and in place of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("lowest", torch.zeros(3))
        self.seen: Any = {"histogram": torch.zeros(4)}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.lowest = state_dict[prefix + "lowest"]
        super()._load_from_state_dict(state_dict, prefix, *args)


class Ordered(torch.optim.SGD):  # type: ignore[misc]
    """Has its numbers in an OrderedDict and a Counter, beside the parameters'."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.1)
        means = OrderedDict(a=torch.zeros(3))
        self.state["means"] = {"by name": means, "last": Counter(a=torch.zeros(3))}


def test_t1_which_modules_evaluate_and_which_parameters_are_frozen() -> None:
    """A world may break in an evaluation, or while a GAN's other half is trained."""
    model = network()
    model[3].requires_grad_(False)
    model[1].eval()
    state = ElasticState(model=model)
    state.commit()
    model.eval()
    model.requires_grad_(True)
    model[0].requires_grad_(False)
    state.restore()
    assert [each.training for each in model] == [True, False, True, True, True]
    assert model.training
    frozen = [name for name, each in model.named_parameters() if not each.requires_grad]
    assert frozen == ["3.weight", "3.bias"]
    newcomer = ElasticState(model=network())
    newcomer._load_snapshot(newest(state))
    assert [each.training for each in newcomer.model] == [True, False, True, True, True]
    assert not newcomer.model[3].weight.requires_grad


def reduced(ddp: DistributedDataParallel) -> int:
    """How many parameters it reduces."""
    return int(ddp.logger._get_ddp_logging_data().ints_map["num_parameter_tensors"])


def test_t1_what_was_frozen_since_it_was_wrapped_is_reduced_again(tmp_path: Path) -> None:
    """As pix2pix leaves its discriminator at the end of each step; DDP refuses a frozen module."""
    with group(0, 1, tmp_path):
        frozen, half = network(), network()
        whole = len(list(half.parameters()))
        half[0].requires_grad_(False)
        DistributedDataParallel(frozen)
        DistributedDataParallel(half)
        frozen.requires_grad_(False)
        half[1].requires_grad_(False)
        state = ElasticState(frozen=frozen, half=half)
        state.commit()
        kept, (saved, _) = newest(state), state._save_values()
        for again in (state, ElasticState(frozen=network(), half=network())):
            again._load_snapshot(kept)
            assert again._save_values()[0] == saved, "a commit before it is wrapped has the same"
            names = [name for name, each in again.half.named_parameters() if not each.requires_grad]
            assert reduced(DistributedDataParallel(again.frozen)) == whole
            assert not any(each.requires_grad for each in again.frozen.parameters())
            assert reduced(DistributedDataParallel(again.half)) == whole - 2
            after = [name for name, each in again.half.named_parameters() if not each.requires_grad]
            assert after == names
            with pytest.raises(RuntimeError, match="not needed"):
                DistributedDataParallel(again.frozen)  # the script has frozen it itself
            again.commit()


def test_t1_a_file_leaves_modes_to_who_loads_it_until_a_sync(tmp_path: Path) -> None:
    state = ElasticState(model=network())
    state.commit()
    state.save(tmp_path / "file")
    evaluated = ElasticState(model=network().eval())
    evaluated.load(tmp_path / "file")
    assert not evaluated.model.training
    assert same(dict(evaluated.model.state_dict()), dict(state.model.state_dict()))
    evaluated.sync()
    assert evaluated.model.training


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_t10_a_scripted_module_is_restored() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2))
    state = ElasticState(model=model)
    state.commit()
    was = copied(model.state_dict())
    with torch.no_grad():
        model[0].weight.zero_()
    model[0].eval()
    state.restore()
    assert same(dict(model.state_dict()), dict(was))
    assert model[0].training


def test_t10_a_script_with_another_default_device(tmp_path: Path) -> None:
    """Such as "cuda": nothing of a state's own is made there."""
    model = network()
    with torch.device("meta"):
        sampler = ElasticSampler(range(100))
        state = ElasticState(model=model, sampler=sampler, mean=torch.ones(3, device="cpu"))
        state.sync()
        sampler.record(len([*zip(sampler, range(10), strict=False)]))
        state.commit()
        sampler.reshard(1, 3)
        rest = list(sampler)
        state.mean.zero_()
        state.restore()
        state.save(tmp_path / "file")
        state.load(tmp_path / "file")
    assert len(rest) == 30
    assert same(state.mean, torch.ones(3))


def test_commits_and_comparisons_make_no_call_that_goes_through_a_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.set_default_device is a mode: each call of torch's goes through Python."""
    monkeypatch.setenv("ELASTIC_ETCD_COMPARE_EVERY", "1")
    state = ElasticState(data=[torch.ones(3, 2).t(), torch.tensor(1.0)], weights=nn.Linear(2, 2))
    with group(0, 1, tmp_path):
        state.sync()
        state._replicas._next = 1  # as in a world of several ranks
        with Noting() as mode:
            state.commit()
    frozen = torch.Tensor.requires_grad.__get__
    assert {*mode.seen} == {torch.Tensor.detach, frozen}  # in the user's part, as state_dict()


class Noting(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
    """Keeps the functions that go through it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_a_tensor_of_a_class_of_its_own_is_refused_and_a_parameter_is_not() -> None:
    class Own(torch.Tensor):  # type: ignore[misc]
        pass

    class Weight(nn.Parameter):  # type: ignore[misc]
        pass

    state = ElasticState(weight=None, own=1)
    state.weight = Weight(torch.ones(2))
    state.commit()
    state.own = torch.ones(2).as_subclass(Own)
    with pytest.raises(UsageError, match="own is no plain dense tensor"):
        state.commit()


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (nn.Parameter(torch.ones(1)), "scale"),
        (torch.ones(1, requires_grad=True), "scale"),
        ({"a": [0, (nn.Parameter(torch.ones(1)),)]}, r"scale\['a'\]\[1\]\[0\]"),
    ],
)
def test_a_plain_value_that_is_trained_is_refused_by_its_place(value: Any, place: str) -> None:
    """A load would replace it, and the optimizer keep the old one."""
    with pytest.raises(UsageError, match=f"^{place} is trained.* Put it into a module"):
        ElasticState(scale=value, epoch=0)


def test_a_plain_value_that_is_not_trained_is_kept() -> None:

    class Weights(dict[str, torch.Tensor]):
        def state_dict(self) -> dict[str, torch.Tensor]:
            return {**self}

        load_state_dict = dict.update  # or any other way of its own

    itself: list[Any] = []
    itself.append(itself)
    trained = torch.ones(1, requires_grad=True)
    assert ElasticState(weights=Weights(a=trained)).weights["a"] is trained
    state = ElasticState(
        loss=trained * 2,
        best={"a": trained.detach()},
        fixed=nn.Parameter(torch.ones(1), requires_grad=False),
        model=nn.ParameterDict({"scale": trained}),
        optimizer=torch.optim.SGD([trained], lr=torch.tensor(0.1)),
        itself=itself,
    )
    state.itself = None
    state.commit()
    state.restore()
    assert state.loss == 2


def test_a_parameter_that_has_no_shape_yet_is_refused_by_name() -> None:
    state = ElasticState(model=nn.LazyLinear(3))
    with pytest.raises(UsageError, match=r"weight'\] has no shape yet: .* before the first"):
        state.commit()
    state.model(torch.ones(2, 4))
    state.commit()


class Keeps:
    """Keeps what it is given, as a state_dict's owner may."""

    def __init__(self) -> None:
        self.kept = torch.zeros(3)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"kept": self.kept}

    def load_state_dict(self, saved: dict[str, torch.Tensor]) -> None:
        self.kept = saved["kept"]


def test_t6_what_is_restored_is_never_the_snapshot_itself() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Observer())
    optimizer = Ordered(model[0].parameters())
    values: dict[str, Any] = {"other": OrderedDict(a=torch.zeros(3)), "keeps": Keeps()}
    state = ElasticState(model=model, optimizer=optimizer, **values)
    state.commit()
    for optimizer in (state.optimizer, Ordered(model[0].parameters())):
        del optimizer.state["means"]  # as one that has made no step yet
        state.optimizer = optimizer
        for _ in range(2):
            state.restore()
            assert model[1].seen["histogram"].tolist() == [0, 0, 0, 0]
            model[1].seen["histogram"] += 1
            model[1].lowest += 1
            optimizer.state["means"]["by name"]["a"] += 1
            optimizer.state["means"]["last"]["a"] += 1
            state.other["a"] += 1
            state.keeps.kept += 1
            for parameter in model.parameters():
                parameter.data += 1
            assert newest(state)  # which is intact


def test_t17_a_rate_of_numpy_s() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    scheduler = schedules.LambdaLR(optimizer, lambda step: 0.5 * (1 + np.cos(step / 10)))
    state = ElasticState(optimizer=optimizer, scheduler=scheduler, shape=torch.Size([3]))
    optimizer.step()
    scheduler.step()
    rate = scheduler.get_last_lr()[0]
    assert isinstance(rate, np.float64)
    state.commit()
    scheduler.step()
    state.restore()
    assert scheduler.get_last_lr()[0] == rate == optimizer.param_groups[0]["lr"]


def test_t21_float32_moments_of_bfloat16_weights_keep_all_their_bits() -> None:
    class Precise(torch.optim.Optimizer):  # type: ignore[misc]
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        def step(self, _: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                kept = self.state[parameter]
                kept.setdefault("master", torch.full((4,), 1 + 2**-20))
                kept.setdefault("nested", {"list": [torch.full((4,), 1 + 2**-20)]})

    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = Precise([weight])
    optimizer.step()
    state = ElasticState(optimizer=optimizer)
    state.commit()
    newcomer = Precise([weight])
    for optimizer in (state.optimizer, newcomer):
        state.optimizer = optimizer
        state.restore()
        kept = optimizer.state[weight]
        for tensor in (kept["master"], kept["nested"]["list"][0]):
            assert tensor.dtype == torch.float32
            assert tensor.tolist() == [1 + 2**-20] * 4


def test_what_an_optimizer_knows_of_a_parameter_comes_back_as_it_was() -> None:
    """Texts too: torch's own load makes "<generator object ..." of them."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight])
    kept = {
        "kind": "matrix",
        "nested": ["a", ("b", {"c": "d"})],
        "sets": [{"ab"}, frozenset({"ab"})],
        "mappings": [OrderedDict(b="c", a=1), Counter("aab")],
        "others": [b"ab", torch.Size([2, 3]), torch.float16, 7, None, 0.5, ()],
        "number": np.float64(0.5),
    }
    optimizer.state[weight] = OrderedDict(kept)
    state = ElasticState(optimizer=optimizer)
    state.commit()
    for state.optimizer in (optimizer, torch.optim.SGD([weight])):
        state.restore()
        found = state.optimizer.state[weight]
        assert repr(found) == repr(OrderedDict(kept))


def sharded(kind: str) -> Any:
    """What a script would give: it needs a process group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    mesh = init_device_mesh("cpu", (1,))
    if kind == "DeviceMesh":
        return mesh
    model = nn.Linear(4, 4)
    if kind == "ZeroRedundancyOptimizer":
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    if kind == "FullyShardedDataParallel":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    fully_shard(model, mesh=mesh)
    return torch.optim.SGD(model.parameters(), 0.1) if kind == "DTensor" else model


@pytest.mark.parametrize(
    "kind",
    ["FullyShardedDataParallel", "FSDPModule", "DTensor", "ZeroRedundancyOptimizer", "DeviceMesh"],
)
@pytest.mark.filterwarnings("ignore")
def test_t21_what_is_sharded_is_refused_with_its_name_and_what_to_do(
    kind: str, tmp_path: Path
) -> None:
    with group(0, 1, tmp_path):
        value = sharded(kind)
        with pytest.raises(UsageError, match=f"thing has a {kind}: .*(use|make) "):
            ElasticState(epoch=0, thing=value)
        state = ElasticState(epoch=0, thing=None)
        with pytest.raises(UsageError, match=f"thing has a {kind}"):
            state.thing = value
        state._values["thing"] = value  # as if it had been sharded in place since
        with pytest.raises(UsageError, match=f"thing has a {kind}"):
            state.commit()
        state._values["thing"] = [value]
        with pytest.raises(UsageError, match=r"thing\[0\] is a "):
            state.commit()


def with_frozen() -> tuple[ElasticState, nn.Parameter]:
    """A head that trains on a body that doesn't; 1 MB and 4 MB. The state, and the body."""
    model = nn.ParameterDict({"body": nn.Parameter(torch.zeros(1_000_000), requires_grad=False)})
    model["head"] = nn.Parameter(torch.zeros(250_000))
    return ElasticState(model=model, step=0), model["body"]


def kept_whole(state: ElasticState) -> bool:
    _, tensors = newest(state).load()
    saved = {name.removeprefix("model."): tensor for name, (tensor, _) in tensors.items()}
    return same(saved, dict(state.model.state_dict()))


def written_through(how: str, weight: nn.Parameter) -> None:
    """In one place, as nothing counts it."""
    if how == "data":
        weight.data[777] += 1
    elif how == "numpy":
        weight.detach().numpy()[777] += 1
    elif how == "other data":
        weight.data = weight.data.clone()
        weight.data[777] += 1
    else:
        torch.from_dlpack(weight.detach())[777] += 1


@pytest.mark.parametrize("how", ["data", "numpy", "dlpack", "other data"])
def test_g9_what_is_written_past_torch_s_counter_is_committed(how: str) -> None:
    """As averages of weights often are."""
    state, average = with_frozen()
    before = average._version
    for state.step in range(8):
        written_through(how, average)
        state.commit()
        assert kept_whole(state)
    assert how == "other data" or average._version == before  # what this test is about


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: schedules.StepLR(o, 2),
    "milestones": lambda o: schedules.MultiStepLR(o, [2, 3]),
    "cosine": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3),
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.5, total_steps=20),
    "cyclic": lambda o: schedules.CyclicLR(o, 0.01, 0.1),
    "plateau": schedules.ReduceLROnPlateau,
    "lambda": lambda o: schedules.LambdaLR(o, lambda epoch: 0.9**epoch),
    "sequence": lambda o: schedules.SequentialLR(
        o, [schedules.ConstantLR(o), schedules.ExponentialLR(o, 0.5)], [2]
    ),
    "chained": lambda o: schedules.ChainedScheduler([schedules.LinearLR(o)]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_where_it_was(name: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1, momentum=0.9)
    scheduler = SCHEDULES[name](optimizer)
    state = ElasticState(optimizer=optimizer, scheduler=scheduler)

    def rates(steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step(*([1.0] if name == "plateau" else []))
            found.append(float(optimizer.param_groups[0]["lr"]))
        return found

    rates(2)
    state.commit()
    once = rates(5)
    state.restore()
    assert rates(5) == once


def test_a_generator_and_a_scaler_go_on_where_they_were() -> None:
    generator = torch.Generator()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    none = torch.amp.GradScaler("cpu", enabled=False)  # as a script has it without a GPU
    state = ElasticState(generator=generator, scaler=scaler, none=none)
    state.commit()
    first = torch.rand(5, generator=generator)
    scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0})
    state.restore()
    assert torch.equal(torch.rand(5, generator=generator), first)
    assert scaler.state_dict()["scale"] == 8.0


def test_an_unfinished_step_leaves_nothing() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    state = ElasticState(model=model, optimizer=optimizer, scaler=scaler)

    def half_a_step() -> None:
        scaler.scale(model(torch.ones(3, 4, 1)).sum()).backward()
        scaler.unscale_(optimizer)

    state.sync()
    half_a_step()
    state.restore()
    assert all(parameter.grad is None for parameter in model.parameters())
    half_a_step()  # a scaler that remembers the other half would refuse
    state._rewind()
    half_a_step()
    state.sync()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_wrapped_module_has_the_snapshot_of_the_module(tmp_path: Path) -> None:
    with group(0, 1, tmp_path):
        model = nn.Linear(2, 3)
        wrapped = nn.parallel.DistributedDataParallel(model)
        state = ElasticState(model=wrapped)
        state.commit()
        before = model.weight.detach().clone()
        state.model = other = nn.Linear(2, 3)
        state.restore()
        assert torch.equal(other.weight, before)
        state.model = torch.compile(wrapped, backend="eager")
        nn.init.zeros_(model.weight)
        state.restore()
        assert torch.equal(model.weight, before)


class Counted:
    def __init__(self, count: int) -> None:
        self.count = count


class More(Counted):
    pass


class CountedCodec:
    def save(self, value: Counted) -> Any:
        return {"count": torch.tensor(value.count)}

    def load(self, value: Counted, saved: Any) -> Counted:
        value.count = int(saved["count"])
        return value


def test_users_register_codecs_and_subclasses_have_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("elastic_etcd.train.state.codecs._codecs", {})
    state = ElasticState(counted=More(3))
    with pytest.raises(UsageError, match=r"counted is a .*More"):
        state.commit()
    ElasticState.register(Counted, CountedCodec())
    state.commit()
    kept = state.counted
    kept.count = 9
    state.restore()
    assert state.counted is kept
    assert kept.count == 3
    with pytest.raises(UsageError, match="save"):
        ElasticState.register(Counted, object())  # type: ignore[arg-type]


def test_a_failed_commit_leaves_the_one_before() -> None:
    state = ElasticState(epoch=1, thing=None)
    state.commit()
    state.epoch, state.thing = 2, object()
    with pytest.raises(UsageError, match="thing is a"):
        state.commit()
    state.restore()
    assert state.epoch == 1


def test_every_nth_call_commits() -> None:
    state = ElasticState(step=0)
    committed = []
    for step in range(1, 10):
        state.step = step
        state.commit(every=4)
        committed.append(commits(state))
    assert committed == [0, 0, 0, 1, 1, 1, 1, 2, 2]
    state.restore()
    assert state.step == 8
    with pytest.raises(UsageError, match="at least 1"):
        state.commit(every=0)


def test_alone_in_the_world_sync_is_the_first_commit_and_then_a_restore() -> None:
    state = ElasticState(step=3)
    state.sync()
    state.step = 4
    state.sync()
    assert state.step == 3
    state.step = 5
    state.commit()
    state.sync()
    assert state.step == 5


def test_a_planned_change_commits_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    state = ElasticState(step=3)
    state.check()
    assert not commits(state)
    monkeypatch.setattr(sync_point.current(), "check", lambda: True)
    with pytest.raises(sync_point.WorldChanged):
        state.check()
    state.step = 4  # in a `finally` block
    state._leave()
    assert not loads(state)  # what was committed needs no loading
    assert loads(state)


def loads(state: ElasticState) -> bool:
    """Whether a sync loads its snapshot."""
    with pytest.MonkeyPatch.context() as patch:
        found: list[Any] = []
        patch.setattr(state, "_load_snapshot", lambda each, **_: found.append(each))
        state.sync()
    return bool(found)


BETWEEN: list[Callable[[ElasticState], Any]] = [ElasticState.check, lambda s: setattr(s, "step", 4)]


@pytest.mark.parametrize("between", [*BETWEEN, None], ids=["check", "set", "nothing"])
def test_only_a_rewound_state_is_not_loaded_by_sync(between: Any) -> None:
    state = ElasticState(step=3)
    state.commit()
    state._rewind()
    if between:
        between(state)
    assert loads(state) == bool(between)


def test_commits_are_counted_from_one_and_the_steps_after_each() -> None:
    """Of a script which checks after it commits, and at each step that does not commit."""
    state = ElasticState(step=0)
    state.sync()
    assert state._uncommitted() == 0
    state.commit()
    assert state._position() == "commit 1 (step 0)"
    state.check()
    assert state._uncommitted() == 0
    state.check()
    state.check()
    assert state._uncommitted() == 2


def test_callbacks_are_called_in_order() -> None:
    state = ElasticState(lr=1.0)
    called = []

    @state.on_reset
    def first() -> None:
        called.append("first")

    state.on_reset(lambda: called.append("second"))

    @state.on_reset
    def third(old: World, new: World) -> None:
        called.append(f"from {old.world_size} to {new.world_size}")

    state.sync()
    state._reset(World(2, 1, 3))
    assert called == ["first", "second", "from 1 to 3"]


def test_a_file_has_the_last_commit_and_is_loaded_by_another_state(tmp_path: Path) -> None:
    path = tmp_path / "state"
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer)
    state = ElasticState(model=model, optimizer=optimizer, epoch=4)
    with pytest.raises(UsageError, match=r"commit\(\) first"):
        state.save(path)
    state.commit()
    saved = copied([dict(model.state_dict()), optimizer.state_dict()])
    trained(model, optimizer)
    state.save(path)
    assert list(tmp_path.iterdir()) == [path]
    other = network()
    fresh = ElasticState(model=other, optimizer=torch.optim.Adam(other.parameters()), epoch=0)
    fresh.load(str(path))
    assert same([dict(other.state_dict()), fresh.optimizer.state_dict()], saved)
    assert fresh.epoch == 4
    fresh.sync()
    assert fresh.epoch == 4


def test_any_commit_of_this_job_is_newer_than_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTIC_ETCD_GENERATION", "5")
    state = ElasticState(epoch=0)
    for epoch in (1, 2, 3):
        state.epoch = epoch
        state.commit()
    state.save(tmp_path / "state")
    monkeypatch.setenv("ELASTIC_ETCD_GENERATION", "1")  # of another job
    again = ElasticState(epoch=0)
    again.commit()
    again.load(tmp_path / "state")
    assert again.epoch == 3
    version = again._snapshots.version()
    assert version is not None
    assert version.age() == Version(1, 1, 0).age()


@pytest.mark.parametrize("where", [0, 7, 8, 100, 400, -4000, -1])
def test_a_damaged_file_changes_nothing(where: int, tmp_path: Path) -> None:
    path = tmp_path / "state"
    state = ElasticState(epoch=4, data=torch.zeros(1000))
    state.commit()
    state.save(path)
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[where] ^= 1
    fresh = ElasticState(epoch=0, data=torch.ones(1))
    for content in (bytes(damaged), whole[:-1], whole + b"\0", whole[:100], b""):
        path.write_bytes(content)
        with pytest.raises(MalformedState, match=str(path)):
            fresh.load(path)
        assert fresh.epoch == 0
        assert fresh._snapshots.newest() is None
    with pytest.raises(FileNotFoundError):
        fresh.load(tmp_path / "none")
    path.write_bytes(whole)
    with pytest.raises(UsageError, match="epoch, data; this state is of other"):
        ElasticState(other=0).load(path)


def test_t9_a_file_of_another_training_is_kept_beside_the_new_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state"
    for epoch in (7, 0):  # the second one did not find the file, or has not looked
        state = ElasticState(epoch=epoch)
        state.commit()
        state.save(path)
        state.save(path)
    (kept,) = set(tmp_path.iterdir()) - {path}
    assert f"{path} was of another training, at its commit 1: it is kept as {kept}" in caplog.text
    assert epochs_in(tmp_path) == {path.name: 0, kept.name: 7}


def test_t18_a_file_that_lacks_a_value_or_has_one_more_can_be_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state"
    state = ElasticState(epoch=3, old=[1], data=torch.ones(3))
    state.commit()
    state.save(path)
    state = ElasticState(epoch=0, data=torch.zeros(3), new="x")
    with pytest.raises(UsageError, match="the snapshot is of epoch, old, data; this"):
        state.load(path)
    state.load(path, strict=False)
    assert (state.epoch, state.data.tolist(), state.new) == (3, [1, 1, 1], "x")
    assert f"{path} and this state are not of the same values: new stays as it is, old is" in (
        caplog.text
    )
    state.epoch = 5
    state.sync()  # what is given to others is of this state's values
    assert (state.epoch, state.new) == (3, "x")
    state.commit()
    state.load(path, strict=False)
    state.sync()
    assert state.epoch == 3


def disk_that_stands_still(patch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Whether somebody waits for it, and what lets it go on."""
    real, begun, go_on = os.fsync, threading.Event(), threading.Event()

    def fsync(fd: int) -> None:
        begun.set()
        assert go_on.wait(30)
        real(fd)

    patch.setattr(os, "fsync", fsync)
    return begun, go_on


def test_t18_training_and_commits_go_on_while_a_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = disk_that_stands_still(monkeypatch)
    path = tmp_path / "state"
    state = ElasticState(step=1, data=torch.ones(100_000))
    state.commit()
    state.save(path, wait=False)
    for state.step in range(2, 6):
        state.data += 1
        state.commit()
    assert begun.wait(30)
    assert not path.exists()
    go_on.set()
    state.save(tmp_path / "next", wait=False)
    assert path.exists()  # one at a time
    state.save(tmp_path / "last")
    for name, step in (("state", 1), ("next", 5), ("last", 5)):
        state.load(tmp_path / name)
        assert state.step == step
        assert bool((state.data == step).all())


def test_t18_what_a_thread_could_not_write_is_raised_by_the_next_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = ElasticState(data=torch.zeros(10))
    state.commit()
    state.save(tmp_path / "none" / "state", wait=False)
    with pytest.raises(FileNotFoundError):
        state.save(tmp_path / "state")
    assert "state was not saved: " in caplog.text
    state.save(tmp_path / "state")
    assert (tmp_path / "state").exists()


def epochs_in(folder: Path) -> dict[str, int]:
    """The value `epoch` of each file."""
    state, found = ElasticState(epoch=0), {}
    for file in folder.iterdir():
        state.load(file)
        found[file.name] = state.epoch
    return found


def test_t18_some_files_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "state"
    state = ElasticState(epoch=0)
    for state.epoch in range(1, 6):
        state.commit()
        state.save(path, keep=3)
    assert epochs_in(tmp_path) == {"state": 5, "state.1": 4, "state.2": 3}
    with pytest.raises(UsageError, match="at least 1"):
        state.save(path, keep=0)


def test_t18_safetensors_reads_a_file(tmp_path: Path) -> None:
    path = tmp_path / "state"
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer)
    odd = {
        "flags": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 3),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
        "rare": torch.ones(3).to(torch.float8_e4m3fnuz),
        "waves": torch.tensor([1 + 2j]),
        "unsigned": torch.ones(3, dtype=torch.uint16),
        "text \u00e9\ud800": np.arange(3),
    }
    state = ElasticState(model=model, optimizer=optimizer, odd=odd, epoch=4)
    state.commit()
    state.save(path)
    found = reader.load_file(path)
    for name, tensor in model.state_dict().items():
        if not name.startswith("4."):  # tied
            assert torch.equal(found[f"model.{name}"], tensor)
    moments = optimizer.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(found["optimizer.state.0.exp_avg"], moments)
    assert found["odd.waves"].tolist() == [[1, 2]]
    assert found["odd.half"].dtype == torch.bfloat16
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    begins = {name: header[name]["data_offsets"][0] for name in found}
    assert [name for name in found if begins[name] % found[name].element_size()] == []
    with safetensors.safe_open(path, "pt") as file:
        objects = json.loads(file.metadata()["objects"])
    assert objects["parts"]["epoch"] == 4
    fresh = ElasticState(model=network(), optimizer=optimizer, odd=None, epoch=0)
    fresh.load(path)
    assert list(fresh.odd) == list(odd)
    for name, value in odd.items():
        assert fresh.odd[name].dtype == value.dtype
        both = (torch.as_tensor(each).reshape(-1) for each in (fresh.odd[name], value))
        assert torch.equal(*(each.view(torch.uint8) for each in both))


@contextmanager
def room_for_files(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_save_that_is_not_due_yet_writes_nothing(tmp_path: Path) -> None:
    state = ElasticState(epoch=1)
    for state.epoch in (1, 2):
        state.commit()
        state.save(tmp_path / "often", every=3600)
    state.save(tmp_path / "seldom", every=7200)
    assert epochs_in(tmp_path) == {"often": 1, "seldom": 2}


def test_a_save_that_fails_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "state"
    state = ElasticState(data=torch.zeros(100_000))
    state.commit()
    path.write_bytes(b"old")
    with room_for_files(50_000), pytest.raises(OSError, match="too large"):
        state.save(path)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"old"


def save_for_ever(path: Path) -> None:
    state = ElasticState(count=0, data=torch.zeros(300_000))
    while True:
        state.count += 1
        state.data.fill_(state.count)
        state.commit()
        state.save(path)


def test_whoever_reads_while_a_file_is_replaced_and_its_writer_killed_finds_all_of_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state"
    reader = ElasticState(count=0, data=torch.zeros(1))
    child = Child(save_for_ever, path)
    try:
        seen: set[int] = set()
        while len(seen) < 20:
            if path.exists():
                reader.load(path)
                assert bool((reader.data == reader.count).all())
                seen.add(reader.count)
    finally:
        child.end()
    reader.load(path)
    assert bool((reader.data == reader.count).all())


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    with Job() as job:
        monkeypatch.setenv("ELASTIC_ETCD_SOCKET", job.name)
        monkeypatch.setenv("ELASTIC_ETCD_WORKER_PID", "")
        monkeypatch.setenv("ELASTIC_ETCD_GENERATION", "3")
        monkeypatch.setenv("LOCAL_RANK", "0")
        monkeypatch.setattr(elastic_etcd.train.agent_channel, "_channel", None)
        monkeypatch.setattr(snapshot_store.Snapshots, "_opened", 0)
        yield job
        if channel := elastic_etcd.train.agent_channel._channel:
            channel._socket.close()


def test_states_that_are_garbage_do_not_count_as_kept(job: Job) -> None:
    """A script that trains twenty models in turn: each is in a cycle with its state."""
    gc.disable()
    try:
        for trial in range(20):
            state = ElasticState(trial=trial)
            state.__dict__["itself"] = state
            state.commit()
    finally:
        gc.enable()


def test_without_an_agent_a_process_has_any_number_of_states() -> None:
    states = [ElasticState(step=0) for _ in range(20)]
    for state in states:
        state.commit()


def test_only_a_current_generation_saves(job: Job, tmp_path: Path) -> None:
    path = tmp_path / "state"
    state = ElasticState(epoch=1)
    state.commit()
    state.save(path)
    first = path.read_bytes()
    job.is_current = False
    state.epoch = 2
    state.commit()
    with pytest.raises(StaleGeneration, match="n2 is lost"):
        state.save(path)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == first
    job.is_current = True
    state.save(path)
    assert path.read_bytes() != first


def test_t18_a_save_that_outlives_its_world_does_not_replace_a_newer_file(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    state = ElasticState(epoch=1)
    state.commit()
    real = os.fsync
    begun, go_on = disk_that_stands_still(monkeypatch)
    state.save(path, wait=False)
    assert begun.wait(30)
    monkeypatch.setattr(os, "fsync", real)
    saving, state._snapshots._saving = state._snapshots._saving, None
    assert saving is not None
    channel = elastic_etcd.train.agent_channel._channel
    assert channel is not None
    channel.generation = 4  # this process goes on in the next world, which saves first
    monkeypatch.setenv("ELASTIC_ETCD_GENERATION", "4")
    state.epoch = 2
    state.commit()
    state.save(path)
    go_on.set()
    with pytest.raises(StaleGeneration, match="generation 4 has saved"):
        saving.result(30)
    state.load(path)
    assert state.epoch == 2
    assert list(tmp_path.iterdir()) == [path]


WORKER = """
import os, signal, sys, torch
from elastic_etcd.train.state.elastic_state import ElasticState
state = ElasticState(epoch=0, data=torch.zeros(1000))
state.sync()
print(state.epoch, int(state.data[0]), state._snapshots.version().counter, flush=True)
for _ in range(3):
    state.epoch += 1
    state.data += 1
    state.commit()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_worker_committed_is_there_for_the_next(job: Job) -> None:
    said = [
        subprocess.run([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, check=False)
        for _ in range(2)
    ]
    assert [one.stdout.decode().strip() for one in said] == ["0 0 0", "3 3 3"]


def test_a_file_loads_whatever_was_in_the_memory_between_its_parts(tmp_path: Path) -> None:
    """A layout changes when moments come, or a text gets shorter; the digest has the gaps, too."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = ElasticState(model=model, optimizer=optimizer, best=0.123456789012345)
    state.commit()
    state.commit()
    trained(model, optimizer)
    state.best = 0.5
    for number in range(4):
        state.commit()
        state.save(tmp_path / str(number))
        state.best += 0.123456789012345 * (number % 2)
    for number in range(4):
        other = network()
        fresh = ElasticState(
            model=other, optimizer=torch.optim.SGD(other.parameters(), momentum=0.9), best=0.0
        )
        fresh.load(tmp_path / str(number))
        state.load(tmp_path / str(number))
        assert fresh.best == state.best


def test_frozen_views_of_a_flat_buffer_are_committed() -> None:
    model = nn.Sequential(nn.Linear(10, 5), nn.Linear(300, 300))
    flat = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    nn.utils.vector_to_parameters(flat, model.parameters())
    model.requires_grad_(False)
    state = ElasticState(model=model)
    for _ in range(4):
        state.commit()
    wanted = model[1].weight.clone()
    model[1].weight.zero_()
    state.restore()
    assert torch.equal(model[1].weight, wanted)


def test_what_is_set_after_a_load_is_told_where_a_sync_undoes_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As by a script that begins at epoch 0 with the weights of another training."""
    writer = ElasticState(epoch=7, best=float("nan"), config={"rate": 0.5}, model=nn.Linear(1, 1))
    writer.commit()
    writer.save(tmp_path / "state")
    state = ElasticState(epoch=0, best=None, config=None, model=nn.Linear(1, 1))
    for changes in (False, True):
        state.load(tmp_path / "state")
        state.config["rate"] = 0.5 if not changes else lambda: 0.5
        state.model.eval()
        if changes:
            state.epoch = 0
        caplog.clear()
        state.sync()
        assert (state.epoch, state.config) == (7, {"rate": 0.5})
        assert ("epoch, config set after load() are the file's again" in caplog.text) == changes
    assert len(caplog.records) == 1
    state.epoch = 0
    state.sync()
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("names", "named"), [("abc", "a, b, c than rank 0"), ("abcd", "a, b, c and 1 more than rank 0")]
)
def test_of_many_values_that_differ_three_are_named(
    names: str, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    ElasticState(step=0)._report_differences([*names], 1, 0)
    assert f"rank 1 had committed another {named}, whose counts" in caplog.text


def test_an_agent_keeps_all_states_and_the_copies_of_a_node_of_many_ranks() -> None:
    of_sixteen_ranks, own = 16 * 2, 2
    assert snapshot_store.MOST_NAMES + own + of_sixteen_ranks <= agent_end._NAMES
