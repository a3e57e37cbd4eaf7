"""Trainings with the habits that people's scripts have, one after the other in one job.

python -m elastic_etcd.launch --nnodes 2 habits.py --output runs/1 nanogpt gan

With FAULT=worker each of them loses both its workers, one at a time; with FAULT=node rank 0 waits
once in each for a file, so that whoever tests it can do something to its node. STEPS says how many
steps each of them has, 16 by default.
"""

import argparse
import copy
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import DataLoader, Dataset, TensorDataset

import elastic_etcd as ee

RANK = int(os.environ.get("RANK", "-1"))  # as YOLO has it: of the world in which a process began
STEPS, BATCH = int(os.environ.get("STEPS", "16")), int(os.environ.get("BATCH", "4"))
DIRECTORY = os.environ.get("DIRECTORY")  # of durable checkpoints
Values = dict[str, Any]
torch.set_default_device(os.environ.get("DEVICE", "cpu"))


def seeded(number: int) -> torch.Generator:
    """Of the default device."""
    return torch.Generator(torch.get_default_device()).manual_seed(number)


def points(samples: int = STEPS * BATCH * 2, width: int = 8, classes: int = 4) -> TensorDataset:
    """Points about as many centres."""
    generator = seeded(1)
    labels = torch.randint(classes, (samples,), generator=generator)
    centres = torch.randn(classes, width, generator=generator)
    noise = torch.randn(samples, width, generator=generator)
    return TensorDataset(centres[labels] + noise, labels)


def network(width: int = 8, classes: int = 4) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, classes)
    )


class Habit:
    """A training: the values of its state, and its loop."""

    def __init__(self, state: ee.ElasticState, output: Path) -> None:
        self.state, self.output = state, output

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    @classmethod
    def values(cls) -> Values:
        """What its state has; here a model, an optimizer, a sampler."""
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        return {"model": model, "optimizer": optimizer, "sampler": ee.ElasticSampler(points())}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.state, f"{self.name}_{name}")

    def train(self) -> None:
        """Until its end, from wherever the state is."""
        raise NotImplementedError

    def learn(self, ddp: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Take a step; gives its loss."""
        self.optimizer.zero_grad()
        loss = F.cross_entropy(ddp(x), y)
        loss.backward()
        self.optimizer.step()
        return loss

    def log(self, step: int, loss: Tensor | float) -> None:
        """Write a line of the curve, the mean of all ranks' losses."""
        mean = torch.as_tensor(loss, dtype=torch.float64).detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            with (self.output / "curve.csv").open("a") as file:
                file.write(f"{self.name},{step},{mean.item()!r},{dist.get_world_size()}\n")
        self.strike(step)

    def strike(self, step: int) -> None:
        """Let what FAULT names happen, once in each training."""
        fault, rank = os.environ.get("FAULT"), dist.get_rank()
        if fault == "worker" and (step, rank) in {(4, 0), (9, 1)} and self.is_first(f"{step}"):
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "node" and (step, rank) == (4, 0) and self.is_first("waits"):
            while not (self.output / f"{self.name}-goes-on").exists():
                time.sleep(0.01)

    def is_first(self, what: str) -> bool:
        try:
            (self.output / f"{self.name}-{what}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


HABITS: dict[str, type[Habit]] = {}


def habit(cls: type[Habit]) -> type[Habit]:
    HABITS[cls.__name__.lower()] = cls
    return cls


@habit
class NanoGPT(Habit):
    """Its evaluation is in the loop, its learning rate a formula, its gradients accumulated."""

    @classmethod
    def values(cls) -> Values:
        values = super().values()
        values["sampler"] = ee.ElasticSampler(points(2 * STEPS * BATCH * 2))
        return {**values, "best": 1e9, "iter_num": 0}

    @torch.no_grad()
    def estimate_loss(self, model: nn.Module, data: Dataset[Any]) -> float:
        model.eval()
        losses = [F.cross_entropy(model(x), y) for x, y in DataLoader(data, 32)]
        model.train()
        return torch.stack(losses).mean().item()

    def train(self) -> None:
        state, data, validation = self.state, points(2 * STEPS * BATCH * 2), points(64)
        model = DistributedDataParallel(self.model)
        self.sampler.set_epoch(0)
        steps = state.steps(
            DataLoader(data, BATCH, sampler=self.sampler), accumulate=2, commit_every=3
        )
        for x, y in steps:
            lr = 0.02 * 0.5 * (1 + math.cos(math.pi * self.iter_num / STEPS))
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            with nullcontext() if steps.ends_step else model.no_sync():
                loss = F.cross_entropy(model(x), y) / 2
                loss.backward()
            if not steps.ends_step:
                continue
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            state.nanogpt_iter_num += 1
            self.log(self.iter_num, loss)
            if self.iter_num % 5 == 0:
                state.nanogpt_best = min(self.best, self.estimate_loss(self.model, validation))


@habit
class GAN(Habit):
    """The half that is not trained is frozen."""

    @classmethod
    def values(cls) -> Values:
        g = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        d = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        return {
            "g": g,
            "d": d,
            "opt_g": torch.optim.Adam(g.parameters(), 2e-3, betas=(0.5, 0.999)),
            "opt_d": torch.optim.Adam(d.parameters(), 2e-3, betas=(0.5, 0.999)),
            "sampler": ee.ElasticSampler(points()),
            "step": 0,
        }

    def train(self) -> None:
        g, d = DistributedDataParallel(self.g), DistributedDataParallel(self.d)
        loader = DataLoader(points(), BATCH, sampler=self.sampler)
        self.sampler.set_epoch(0)
        for real, _ in self.state.steps(loader, commit_every=2):
            seed = 1000 * self.step + dist.get_rank()
            z = torch.randn(len(real), 4, generator=seeded(seed))
            d.requires_grad_(True)
            self.opt_d.zero_grad()
            fake = g(z)
            loss_d = F.softplus(-d(real)).mean() + F.softplus(d(fake.detach())).mean()
            loss_d.backward()
            self.opt_d.step()
            d.requires_grad_(False)
            self.opt_g.zero_grad()
            loss_g = F.softplus(-self.d(fake)).mean()
            loss_g.backward()
            self.opt_g.step()
            self.state.gan_step += 1
            self.log(self.step, loss_d + loss_g)


@habit
class Unfreeze(Habit):
    """The head first, then all; the optimizer has had all parameters from the start."""

    @classmethod
    def values(cls) -> Values:
        return {**super().values(), "epoch": 0}

    def train(self) -> None:
        for self.state.unfreeze_epoch in range(self.epoch, 2):  # noqa: B020
            for layer in self.model[:3]:
                layer.requires_grad_(self.epoch > 0)
            ddp = DistributedDataParallel(self.model)
            self.sampler.set_epoch(self.epoch)
            loader = DataLoader(points(), 2 * BATCH, sampler=self.sampler)
            for i, (x, y) in enumerate(self.state.steps(loader, commit_every=3)):
                loss = F.cross_entropy(ddp(x), y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                done = STEPS // 2 - len(loader) + i  # of this epoch, before this one
                self.log(self.epoch * STEPS // 2 + done + 1, loss)
            self.state.commit()


@habit
class SWA(Habit):
    """An average of the weights from the middle on, and its BatchNorm at the end."""

    @classmethod
    def values(cls) -> Values:
        values = super().values()
        optimizer = torch.optim.SGD(values["model"].parameters(), 0.05, momentum=0.9)
        return {
            **values,
            "optimizer": optimizer,
            "average": AveragedModel(values["model"]),
            "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8),
            "swa_scheduler": SWALR(optimizer, swa_lr=0.01, anneal_epochs=2),
            "step": 0,
        }

    def train(self) -> None:
        ddp = DistributedDataParallel(self.model)
        loader = DataLoader(points(), BATCH, sampler=self.sampler)
        self.sampler.set_epoch(0)
        for x, y in self.state.steps(loader, commit_every=4):
            loss = self.learn(ddp, x, y)
            if self.step >= 8:
                self.average.update_parameters(self.model)
                self.swa_scheduler.step()
            else:
                self.scheduler.step()
            self.state.swa_step += 1
            self.log(self.step, loss)
        torch.optim.swa_utils.update_bn(DataLoader(points(), 32), self.average)
        self.state.commit()


class LoRALinear(nn.Module):
    """A frozen layer, and what is learned beside it."""

    def __init__(self, base: nn.Linear, r: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(r, base.in_features) / 4)
        self.b = nn.Parameter(torch.zeros(base.out_features, r))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


@habit
class LoRA(Habit):
    """All but the adapters is frozen, and the optimizer has the adapters only."""

    @classmethod
    def values(cls) -> Values:
        model = network()
        model[0], model[3] = LoRALinear(model[0]), LoRALinear(model[3])
        model[1].requires_grad_(False)
        adapters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(adapters, lr=0.05)
        return {"model": model, "optimizer": optimizer, "sampler": ee.ElasticSampler(points())}

    def train(self) -> None:
        ddp = DistributedDataParallel(self.model)
        self.sampler.set_epoch(0)
        loader = DataLoader(points(), BATCH, sampler=self.sampler)
        steps = self.state.steps(loader, commit_every=2)
        for left, (x, y) in zip(range(len(steps), 0, -1), steps, strict=True):
            loss = F.cross_entropy(ddp(x), y)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.log(STEPS + 1 - left, loss)


class Orthogonal(torch.optim.Optimizer):
    """Muon's idea: the momentum of a matrix, made orthogonal."""

    def __init__(self, parameters: Iterator[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                buffer = state.setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(p.grad)
                x = buffer / (buffer.norm() + 1e-7)
                for _ in range(5):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
                p.add_(x, alpha=-group["lr"])


@habit
class Muon(Habit):
    """An optimizer of its own for matrices, and AdamW for the rest."""

    @classmethod
    def values(cls) -> Values:
        model = network()
        return {
            "model": model,
            "matrices": Orthogonal((p for p in model.parameters() if p.ndim == 2), 0.02),
            "rest": torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2], 0.01),
            "sampler": ee.ElasticSampler(points()),
            "step": 0,
        }

    def train(self) -> None:
        ddp = DistributedDataParallel(self.model)
        self.sampler.set_epoch(0)
        for x, y in self.state.steps(
            DataLoader(points(), BATCH, sampler=self.sampler), commit_every=1
        ):
            ddp.zero_grad()
            loss = F.cross_entropy(ddp(x), y)
            loss.backward()
            self.matrices.step()
            self.rest.step()
            self.state.muon_step += 1
            self.log(self.step, loss)


def token_batches(epoch: int, seed: int) -> list[list[int]]:
    """Batches of as many tokens each, and so of other numbers of sequences."""
    lengths = [3 + (7 * i) % 11 for i in range(2 * STEPS * BATCH)]
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    batches: list[list[int]] = [[]]
    for i in order:
        if sum(lengths[j] for j in batches[-1]) + lengths[i] > 32:
            batches.append([])
        batches[-1].append(i)
    random.Random(seed + epoch).shuffle(batches)
    return batches


@habit
class Tokens(Habit):
    """Batches by their number of tokens."""

    @classmethod
    def values(cls) -> Values:
        values = super().values()
        return {**values, "sampler": ee.ElasticBatchSampler(token_batches), "step": 0}

    def train(self) -> None:
        ddp = DistributedDataParallel(self.model)
        self.sampler.set_epoch(0)
        loader = DataLoader(points(), batch_sampler=self.sampler)
        for x, y in self.state.steps(loader, commit_every=2):
            loss = self.learn(ddp, x, y)
            self.state.tokens_step += 1
            self.log(self.step, loss)


@habit
class Scripted(Habit):
    """A part of the model is TorchScript."""

    @classmethod
    def values(cls) -> Values:
        model = network()
        model[0] = torch.jit.script(model[0])
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        sampler = ee.ElasticSampler(points())
        return {"model": model, "optimizer": optimizer, "sampler": sampler, "step": 0}

    def train(self) -> None:
        ddp = DistributedDataParallel(self.model)
        self.sampler.set_epoch(0)
        loader = DataLoader(points(), BATCH, sampler=self.sampler, num_workers=1)
        for x, y in self.state.steps(loader, commit_every=5):
            loss = self.learn(ddp, x, y)
            self.state.scripted_step += 1
            self.log(self.step, loss)


class Boxes(Dataset[dict[str, Tensor]]):
    """Pictures with as many boxes as it happens."""

    def __len__(self) -> int:
        return STEPS * BATCH * 2

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = seeded(index)
        boxes = torch.randn(1 + index % 5, 8, generator=generator)
        return {"boxes": boxes, "labels": (boxes.sum(1) > 0).long()}


@habit
class DETR(Habit):
    """A batch is a list of samples that differ in size, and the loss is one of all ranks."""

    @classmethod
    def values(cls) -> Values:
        return {**super().values(), "sampler": ee.ElasticSampler(Boxes()), "step": 0}

    def train(self) -> None:
        ddp = DistributedDataParallel(self.model)
        self.sampler.set_epoch(0)
        loader = DataLoader(Boxes(), BATCH, sampler=self.sampler, collate_fn=list)
        for targets in self.state.steps(loader, commit_every=3):
            boxes = torch.cat([t["boxes"] for t in targets])
            labels = torch.cat([t["labels"] for t in targets])
            num_boxes = torch.tensor(float(len(boxes)))
            dist.all_reduce(num_boxes)
            num_boxes = (num_boxes / dist.get_world_size()).clamp(min=1)
            self.optimizer.zero_grad()
            loss = F.cross_entropy(ddp(boxes), labels, reduction="sum") / num_boxes
            loss.backward()
            self.optimizer.step()
            self.state.detr_step += 1
            self.log(self.step, loss)


@habit
class Early(Habit):
    """Rank 0 evaluates, and tells the others that it is time to stop."""

    @classmethod
    def values(cls) -> Values:
        return {**super().values(), "best": 1e9, "bad": 0, "step": 0}

    def train(self) -> None:
        ddp = DistributedDataParallel(self.model)
        self.sampler.set_epoch(0)
        loader = DataLoader(points(), BATCH, sampler=self.sampler)
        for x, y in self.state.steps(loader, commit_every=2):
            loss = self.learn(ddp, x, y)
            self.state.early_step += 1
            self.log(self.step, loss)
            stop = torch.zeros(1)
            if dist.get_rank() == 0:
                with torch.no_grad():
                    self.model.eval()
                    value = F.cross_entropy(self.model(points(32)[:][0]), points(32)[:][1]).item()
                    self.model.train()
                stop[0] = float(self.step >= 12 and value < 10)
            dist.broadcast(stop, 0)
            if stop:
                break
        self.state.commit()


@habit
class Skips(Habit):
    """A step that fails is skipped, by `try` and by its loss."""

    @classmethod
    def values(cls) -> Values:
        return {**super().values(), "step": 0}

    def train(self) -> None:
        ddp = DistributedDataParallel(self.model)
        self.sampler.set_epoch(0)
        loader = DataLoader(points(), BATCH, sampler=self.sampler)
        for x, y in self.state.steps(loader, commit_every=2):
            self.state.skips_step += 1
            try:
                self.optimizer.zero_grad()
                loss = F.cross_entropy(ddp(x), y)
                loss.backward()
                if self.step == 7:
                    raise ValueError("loss is nan: skipping")  # noqa: TRY301
                self.optimizer.step()
            except Exception as error:  # noqa: BLE001
                print("skipping a bad batch:", error, flush=True)
                continue
            self.log(self.step, loss)


@habit
class Evaluates(Habit):
    """A subprocess evaluates what rank 0 has saved."""

    @classmethod
    def values(cls) -> Values:
        return {**super().values(), "step": 0, "size": 0}

    def train(self) -> None:
        ddp = DistributedDataParallel(self.model)
        self.sampler.set_epoch(0)
        loader = DataLoader(points(), BATCH, sampler=self.sampler)
        for x, y in self.state.steps(loader, commit_every=2):
            loss = self.learn(ddp, x, y)
            self.state.evaluates_step += 1
            self.log(self.step, loss)
            if self.step % 6 == 0 and dist.get_rank() == 0:
                torch.save(self.model.state_dict(), self.output / "to_evaluate.pt")
                code = "import os, sys; print(os.path.getsize(sys.argv[1]))"
                command = [sys.executable, "-c", code, str(self.output / "to_evaluate.pt")]
                found = subprocess.run(command, capture_output=True, text=True, check=True)
                assert int(found.stdout) > 0


@habit
class YOLO(Habit):
    """A constant of the module says which rank this is; only lines and files depend on it."""

    @classmethod
    def values(cls) -> Values:
        values = super().values()
        return {**values, "ema": copy.deepcopy(values["model"]).eval(), "step": 0}

    def train(self) -> None:
        ddp = DistributedDataParallel(self.model)
        self.sampler.set_epoch(0)
        loader = DataLoader(points(), BATCH, sampler=self.sampler)
        for x, y in self.state.steps(loader, commit_every=2):
            loss = self.learn(ddp, x, y)
            with torch.no_grad():
                for mine, theirs in zip(
                    self.ema.state_dict().values(), self.model.state_dict().values(), strict=True
                ):
                    if mine.dtype.is_floating_point:
                        mine.mul_(0.9).add_(theirs, alpha=0.1)
            self.state.yolo_step += 1
            if RANK in {-1, 0}:
                torch.save(self.ema.state_dict(), self.output / f"last-{RANK}.pt")
            self.log(self.step, loss)


@habit
class Device(Habit):
    """Whatever is made without a device is made on the default one, as fastai and others set it."""

    def train(self) -> None:
        torch.set_default_device("cpu")
        try:
            self.train_there()
        finally:
            torch.set_default_device(None)

    def train_there(self) -> None:
        ddp = DistributedDataParallel(self.model)
        self.sampler.set_epoch(0)
        loader = DataLoader(points(), BATCH, sampler=self.sampler)
        steps = self.state.steps(loader, commit_every=2)
        first = STEPS - len(steps)
        for i, (x, y) in enumerate(steps, first + 1):
            loss = self.learn(ddp, x, y)
            self.log(i, loss)


def easy_first(epoch: int, seed: int) -> Tensor:
    """A part of the data that grows from epoch to epoch."""
    generator = seeded(seed + epoch)
    return torch.randperm((epoch + 1) * 8 * BATCH, generator=generator)


@habit
class Curriculum(Habit):
    """Each epoch has more of the data."""

    @classmethod
    def values(cls) -> Values:
        sampler = ee.ElasticSampler(points(), shuffle=easy_first)
        return {**super().values(), "sampler": sampler, "epoch": 0, "step": 0}

    def train(self) -> None:
        ddp = DistributedDataParallel(self.model)
        loader = DataLoader(points(), BATCH, sampler=self.sampler)
        for self.state.curriculum_epoch in range(self.epoch, 2):  # noqa: B020
            self.sampler.set_epoch(self.epoch)
            for x, y in self.state.steps(loader, commit_every=2):
                loss = self.learn(ddp, x, y)
                self.state.curriculum_step += 1
                self.log(self.step, loss)


@habit
class FixMatch(Habit):
    """Two loaders at once, with and without labels."""

    @classmethod
    def values(cls) -> Values:
        return {**super().values(), "unlabelled": ee.ElasticSampler(points(), seed=7), "step": 0}

    def train(self) -> None:
        ddp = DistributedDataParallel(self.model)
        for sampler in (self.sampler, self.unlabelled):
            sampler.set_epoch(0)
        labelled = DataLoader(points(), BATCH, sampler=self.sampler)
        unlabelled = DataLoader(points(), BATCH, sampler=self.unlabelled)
        loaders = (self.state.steps(each, check=False) for each in (labelled, unlabelled))
        for (x, y), (u, _) in zip(*loaders, strict=True):
            self.optimizer.zero_grad()
            out = ddp(torch.cat([x, u]))
            certain, pseudo = out[len(x) :].detach().softmax(1).max(1)
            of_unlabelled = F.cross_entropy(out[len(x) :], pseudo, reduction="none")
            loss = F.cross_entropy(out[: len(x)], y) + (of_unlabelled * (certain > 0.5)).mean()
            loss.backward()
            self.optimizer.step()
            self.state.fixmatch_step += 1
            self.log(self.step, loss)
            self.state.commit(every=2)
            self.state.check()


@habit
class Reinforce(Habit):
    """No data set: each rank plays, and all learn of it."""

    @classmethod
    def values(cls) -> Values:
        policy = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
        optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
        return {"policy": policy, "optimizer": optimizer, "update": 0}

    def train(self) -> None:
        ddp = DistributedDataParallel(self.policy)
        for update in range(self.update, STEPS):
            seed = 100 * update + dist.get_rank()
            observed = torch.randn(16, 4, generator=seeded(seed))
            logits = ddp(observed)
            actions = logits.detach().argmax(1)
            rewards = (actions == (observed.sum(1) > 0).long()).float()
            log_probs = logits.log_softmax(1).gather(1, actions[:, None])[:, 0]
            loss = -(log_probs * (rewards - rewards.mean())).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.state.reinforce_update = update + 1
            self.log(self.update, loss)
            self.state.commit(every=3)
            self.state.check()


@habit
class Generates(Habit):
    """Rank 0 shows a sample of what the model has learned, while the others wait."""

    @classmethod
    def values(cls) -> Values:
        model = nn.Sequential(nn.Embedding(16, 16), nn.Linear(16, 16))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        sampler = ee.ElasticSampler(points())
        return {"model": model, "optimizer": optimizer, "sampler": sampler, "step": 0}

    @torch.no_grad()
    def sample(self) -> list[int]:
        self.model.eval()
        tokens = [1]
        for _ in range(8):
            tokens.append(int(self.model(torch.tensor(tokens))[-1].argmax()))
        self.model.train()
        return tokens

    def train(self) -> None:
        ddp = DistributedDataParallel(self.model)
        self.sampler.set_epoch(0)
        loader = DataLoader(points(), BATCH, sampler=self.sampler)
        for x, _ in self.state.steps(loader, commit_every=2):
            text = (x * 4).long().clamp(-8, 7) + 8
            self.optimizer.zero_grad()
            loss = F.cross_entropy(ddp(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
            loss.backward()
            self.optimizer.step()
            self.state.generates_step += 1
            self.log(self.step, loss)
            if self.step % 4 == 0:
                if dist.get_rank() == 0:
                    print("sample:", self.sample(), flush=True)
                dist.barrier()


@habit
class Warmup(Habit):
    """OneCycleLR of a number of steps that is known before, and a list of metrics that grows."""

    @classmethod
    def values(cls) -> Values:
        values = super().values()
        schedule = torch.optim.lr_scheduler.OneCycleLR(values["optimizer"], 0.05, STEPS)
        return {**values, "scheduler": schedule, "history": [], "step": 0}

    def train(self) -> None:
        ddp = DistributedDataParallel(self.model)
        self.sampler.set_epoch(0)
        loader = DataLoader(points(), BATCH, sampler=self.sampler)
        for x, y in self.state.steps(loader, commit_every=2):
            self.learn(ddp, x, y)
            self.scheduler.step()
            self.state.warmup_step += 1
            self.history.append(self.scheduler.get_last_lr()[0])
            self.log(self.step, self.history[-1] + sum(self.history))


SHARDED: dict[str, type["FSDP"]] = {}


class FSDP(Habit):
    """A model that is sharded, by FSDP2; not among the others, whose values are all replicated."""

    accumulate = 1

    def __init_subclass__(cls) -> None:
        SHARDED[cls.__name__.lower()] = cls

    @classmethod
    def values(cls) -> Values:
        return {"sampler": ee.ElasticSampler(points(cls.accumulate * STEPS * BATCH * 2)), "step": 0}

    @classmethod
    def build(cls, world: ee.BuildWorld) -> Values:
        torch.manual_seed(0)
        model = network()
        cls.shard(model, world)
        optimizer = cls.optimize([each for each in model.parameters() if each.requires_grad])
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, STEPS + 1)
        return {"model": model, "optimizer": optimizer, "schedule": schedule}

    @classmethod
    def shard(cls, model: nn.Module, world: ee.BuildWorld, **options: Any) -> None:
        mesh = options.pop("mesh", None) or world.mesh()
        for layer in (model[0], model[3]):
            fully_shard(layer, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)

    @classmethod
    def optimize(cls, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.02)

    def train(self) -> None:
        self.sampler.set_epoch(0)
        data = points(self.accumulate * STEPS * BATCH * 2)
        loader = DataLoader(data, BATCH, sampler=self.sampler)
        steps = self.state.steps(loader, accumulate=self.accumulate, commit_every=2)
        for x, y in steps:
            self.model.set_requires_gradient_sync(steps.ends_step)
            loss = F.cross_entropy(self.model(x).float(), y) / self.accumulate
            loss.backward()
            if not steps.ends_step:
                continue
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            setattr(self.state, f"{self.name}_step", self.step + 1)
            self.log(self.step, loss)
            if DIRECTORY:
                self.state.save(DIRECTORY, wait=False)


SHARDED["fsdp"] = FSDP


class HSDP(FSDP):
    """Two replicas of each shard; with two ranks of no shard at all."""

    @classmethod
    def shard(cls, model: nn.Module, world: ee.BuildWorld, **options: Any) -> None:
        mesh = world.mesh(2, -1, names=("replicate", "shard"))
        super().shard(model, world, mesh=mesh, **options)


class Mixed(FSDP):
    """Computed in bfloat16, kept in float32."""

    @classmethod
    def shard(cls, model: nn.Module, world: ee.BuildWorld, **options: Any) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model[1] = nn.LayerNorm(16)
        super().shard(model, world, mp_policy=policy, **options)


class FloatMoments(torch.optim.Optimizer):
    """SGD whose momentum is of float32, whatever the parameters are of."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002 - torch's
        for group in self.param_groups:
            for each in group["params"]:
                moment = self.state[each].setdefault(
                    "moment", torch.zeros_like(each, dtype=torch.float32)
                )
                moment.mul_(group["momentum"]).add_(each.grad.float())
                each.add_(moment.to(each.dtype), alpha=-group["lr"])


class Halves(FSDP):
    """Parameters of bfloat16, with moments of float32."""

    @classmethod
    def shard(cls, model: nn.Module, world: ee.BuildWorld, **options: Any) -> None:
        model[1] = nn.LayerNorm(16)
        super().shard(model.bfloat16(), world, **options)
        model.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))

    @classmethod
    def optimize(cls, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return FloatMoments(parameters, lr=0.02)


class Momentum(FSDP):
    """SGD."""

    @classmethod
    def optimize(cls, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, nesterov=True)


class Frozen(FSDP):
    """The first layer is not trained."""

    @classmethod
    def shard(cls, model: nn.Module, world: ee.BuildWorld, **options: Any) -> None:
        model[0].requires_grad_(requires_grad=False)
        super().shard(model, world, **options)


class Tied(FSDP):
    """Two layers have one weight."""

    @classmethod
    def shard(cls, model: nn.Module, world: ee.BuildWorld, **options: Any) -> None:
        model.insert(3, nn.Linear(16, 16))
        model.insert(3, nn.Linear(16, 16))
        model[3].weight = model[4].weight
        fully_shard(model, mesh=world.mesh(), **options)


class Recomputed(FSDP):
    """Activations are computed once more in the backward pass."""

    @classmethod
    def shard(cls, model: nn.Module, world: ee.BuildWorld, **options: Any) -> None:
        model[0] = checkpoint_wrapper(model[0])
        super().shard(model, world, **options)


class Compiled(FSDP):
    """Each block is compiled, as it is sharded."""

    @classmethod
    def shard(cls, model: nn.Module, world: ee.BuildWorld, **options: Any) -> None:
        for layer in (model[0], model[3]):
            layer.compile(backend="aot_eager")
        super().shard(model, world, **options)


class Accumulated(FSDP):
    """A step is of two batches, and gradients are reduced with the second one."""

    accumulate = 2


ALL: dict[str, type[Habit]] = {**HABITS, **SHARDED}


class Trainer:
    """A class with the loop in a method."""

    def __init__(self, names: list[str], output: Path) -> None:
        values: Values = {}
        for name in names:
            torch.manual_seed(0)
            own = ALL[name].values()
            values |= {f"{name}_{key}": value for key, value in own.items()}
        self.names, self.output = names, output
        build = self.build if SHARDED.keys() & {*names} else None
        self.state = ee.ElasticState(**values, build=build, habit=0)
        if DIRECTORY:
            self.state.load(DIRECTORY)

    def build(self, world: ee.BuildWorld) -> Values:
        return {
            f"{name}_{key}": value
            for name in self.names
            if name in SHARDED
            for key, value in SHARDED[name].build(world).items()
        }

    @ee.run
    def fit(self, state: ee.ElasticState) -> None:
        print(f"rank {dist.get_rank()}: pid {os.getpid()}", flush=True)
        for state.habit in range(state.habit, len(self.names)):  # noqa: B020
            ALL[self.names[state.habit]](state, self.output).train()
        state.commit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("names", nargs="*", default=list(HABITS), help=", ".join(HABITS))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(args.names, args.output)
    trainer.fit(trainer.state)
    if int(os.environ["RANK"]) == 0:  # an export, for which nobody waits
        time.sleep(2)
        torch.save(trainer.state.habit, args.output / "model.pt")


if __name__ == "__main__":
    main()
