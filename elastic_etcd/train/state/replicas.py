"""Whether the ranks, which are replicas, still have the same weights and moments.

At some commits each rank takes a digest of its own, and one all_gather of 16 bytes compares them.
More is exchanged only where they differ: by whom, and in which values. docs/state.md says what is
compared.
"""

import logging
import math
import os
import re
import threading
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from elastic_etcd.errors import AgentGone, UsageError
from elastic_etcd.protocol import messages
from elastic_etcd.train.agent_channel import agent
from elastic_etcd.train.collectives import (
    broadcast,
    gather,
    gather_json,
    generation,
    rank_and_size,
)
from elastic_etcd.train.state import codecs
from elastic_etcd.train.state.encoding import dumps
from elastic_etcd.train.state.snapshot_store import Snapshots

SHARE = 0.005  # of the time, for comparisons that are as often as they may be
MOST_APART = 1 << 32  # commits from a comparison to the next
_DAMAGED = 1 << 40  # beside the number of commits
_KILLED = 10.0  # seconds, by when an agent has killed a worker that it gives up
_NAMED = 3  # ranks of many, in a line

CHUNK = 1 << 20  # words of a digest that are multiplied at once
_ODD = 0x1E3779B97F4A7C15  # without a pattern, so that neighbours count by unlike numbers
_ALL, _HALF = 1 << 64, 1 << 61

log = logging.getLogger("elastic_etcd")

Saved: TypeAlias = tuple[dict[str, Any], dict[str, torch.Tensor]]


class Differs(NamedTuple):
    """A rank whose values are not the others'."""

    rank: int
    what: str
    alone: bool  # most of the ranks agree, so that it is this one that is wrong


class Replicas:
    """Compares this rank's values with the other ranks', at the commits that are chosen for it.

    every: "off", "auto" or a number of commits; by default what the agent says, and without an
    agent "off". All ranks have the same, and call the methods alike.
    """

    def __init__(self, every: str = "") -> None:
        self._every = every or os.environ.get("ELASTIC_ETCD_COMPARE_EVERY", "off")
        self._restarts = os.environ.get("ELASTIC_ETCD_ON_DIVERGENCE") == "restart"
        self._commits = 0  # since the last comparison
        self._next = 0  # commits after it comes another; 0: none does
        self._since = 0.0  # the time of the last comparison
        self._latency = math.inf  # seconds, of the fastest exchange
        self._buffers: dict[str, int] | None = None  # that are compared, and their last digests
        self._told: set[int] = set()  # ranks that differ

    def begin(self) -> None:
        """After a sync: all ranks have the same values now, and compare at the next commit."""
        several = rank_and_size(launched=False)[1] > 1
        self._next = 1 if several and self._every != "off" else 0
        self._commits, self._since, self._latency = 0, time.monotonic(), math.inf
        self._buffers = None
        self._told.clear()

    def rest(self) -> None:
        """Compare nothing before the next sync, which does so itself."""
        self._next = 0

    def compare_if_due(
        self,
        values: Mapping[str, Any],
        snapshots: Snapshots,
        saved: Saved,
        commit: int,
    ) -> None:
        """At a commit: compare if it is due, and tell of each rank that differs once in a world.

        saved: the values as they are about to be committed, as this `commit`. Raises UsageError, on
        all ranks, if theirs are not of the same tensors, and the errors of collectives.
        """
        self._commits += 1
        if not self._next or self._commits < self._next:
            return
        began = time.monotonic()
        own, buffers = self._digests(values, *saved)
        damaged = _loses_newest(snapshots)
        apart = self._commits_apart(began)
        asked = time.monotonic()
        rows = gather([combined(own | buffers), apart + _DAMAGED * damaged])
        self._latency = min(self._latency, time.monotonic() - asked)
        differing = any(digest != rows[0][0] for digest, _ in rows)
        if differing or any(word >= _DAMAGED for _, word in rows):
            found = self._find(values, own, buffers, damaged=damaged)
            self._tell([each for each in found if each.rank not in self._told], commit, snapshots)
        else:
            self._buffers = buffers
        self._next = max(word % _DAMAGED for _, word in rows)
        self._commits, self._since = 0, time.monotonic()

    def _digests(
        self, values: Mapping[str, Any], parts: dict[str, Any], tensors: dict[str, torch.Tensor]
    ) -> tuple[dict[str, int], dict[str, int]]:
        """The digests of what is to be the same on all ranks, and of the buffers that were."""
        compared = [n for n, v in values.items() if isinstance(v, (nn.Module, Optimizer))]
        buffers = codecs.buffer_names(values)
        names = sorted(name for name in tensors if name.partition(".")[0] in compared)
        fixed = [name for name in names if name not in buffers]
        known = [n for n in names if n in buffers and (self._buffers is None or n in self._buffers)]
        found = digests_of([tensors[name] for name in (*fixed, *known)])
        own = dict(zip(fixed, found, strict=False))
        for name in compared:
            if isinstance(values[name], Optimizer):
                own |= _of_numbers(name, parts[name])
        return own, dict(zip(known, found[len(fixed) :], strict=True))

    def _commits_apart(self, began: float) -> int:
        """After how many commits this rank would have the next comparison."""
        if self._every != "auto":
            return int(self._every)
        latency = 0.0 if math.isinf(self._latency) else self._latency
        cost = time.monotonic() - began + latency
        each = max((began - self._since) / self._commits, 1e-9)
        return max(1, min(MOST_APART, math.ceil(cost / SHARE / each)))

    def _find(
        self,
        values: Mapping[str, Any],
        own: dict[str, int],
        buffers: dict[str, int],
        *,
        damaged: bool,
    ) -> list[Differs]:
        """The ranks that differ, and in what. Collective. Raises UsageError."""
        rank, size = rank_and_size(launched=False)
        _refuse_other_names([*own, *buffers], values)
        digests = [digest for (digest,) in gather([combined(own)])]
        most = Counter(digests).most_common(1)[0][1]
        right = next(r for r, digest in enumerate(digests) if digests.count(digest) == most)
        mine = torch.tensor([*own.values()], dtype=torch.int64, device="cpu")
        theirs = dict(zip(own, broadcast(mine, right).tolist(), strict=True))
        odd = self._odd_buffers(buffers)
        names = [*(name for name in own if own[name] != theirs[name]), *odd.get(rank, [])]
        said = [_in_words(names, values)] if names else []
        said += ["its last commit in memory"] * damaged
        texts = gather_json(f"{_named_rank()}: {' and '.join(said)}" if said else "")
        agree = 2 * most > size
        return [
            Differs(r, text, alone=agree or digests[r] == digests[right])
            for r, text in enumerate(texts)
            if text
        ]

    def _odd_buffers(self, buffers: dict[str, int]) -> dict[int, list[str]]:
        """By rank, the buffers in which it alone differs from all others. Collective.

        A forward may change buffers on each rank in another way. Those that differ at the first
        comparison of a world, or later on several ranks, are not compared any more.
        """
        before, self._buffers = self._buffers, dict(buffers)
        if not buffers:
            return {}
        changed = [
            before is not None and before[name] != digest for name, digest in buffers.items()
        ]
        rows = gather([*buffers.values(), *changed])
        odd: dict[int, list[str]] = {}
        for n, name in enumerate(buffers):
            column = [row[n] for row in rows]
            if len(set(column)) == 1:
                continue
            changes = [rank for rank, row in enumerate(rows) if row[len(buffers) + n]]
            alone = changes if len(changes) == 1 else []
            if before is None or not alone:
                del self._buffers[name]
            else:
                odd.setdefault(alone[0], []).append(name)
        return odd

    def _tell(self, found: list[Differs], commit: int, snapshots: Snapshots) -> None:
        """Log it on rank 0, and tell the agents of that rank and of those that differ."""
        rank, size = rank_and_size(launched=False)
        mine = next((each for each in found if each.rank == rank), None)
        self._told.update(each.rank for each in found)
        if not found or not (mine or rank == 0):
            return
        line = _line(found, size)
        if rank == 0:
            log.warning("commit %d: %s", commit, line)
        alone = mine is not None and mine.alone
        if channel := agent():
            with suppress(AgentGone):
                channel.send(messages.Diverged(generation(), line, mine is not None, alone))
        if alone and self._restarts:
            while newest := snapshots.newest():  # the others' count
                newest.memfd.drop()
            threading.Event().wait(_KILLED)  # and what it has is not to be committed
            raise RuntimeError(f"{line}: this worker is to be started anew")


def _line(found: Sequence[Differs], size: int) -> str:
    """All of them as a person reads it."""
    texts = [each.what for each in found[:_NAMED]]
    texts += [f"{len(found) - _NAMED} more ranks"] * (len(found) > _NAMED)
    if all(each.alone for each in found):
        others = size - len(found)
        end = f"the other {others} ranks agree" if others > 1 else "the other rank has not changed"
    else:
        end = "which of the ranks are right is not known"
    return f"replicas differ: {'; '.join(texts)}; {end}"


def _named_rank() -> str:
    rank, _ = rank_and_size(launched=False)
    node = os.environ.get("ELASTIC_ETCD_NODE", "")
    return f"rank {rank} on {node}" if node else f"rank {rank}"


def _in_words(names: Sequence[str], values: Mapping[str, Any]) -> str:
    """The first of these names, as people know it, and how many more there are."""
    name, more = names[0], f" and {len(names) - 1} more" if len(names) > 1 else ""
    if match := _MOMENT.fullmatch(name):
        optimizer, number, moment = match.groups()
        value = values.get(optimizer)
        groups = codecs.groups_by_names(value, values) if isinstance(value, Optimizer) else []
        parameters = [parameter for group in groups for parameter in group]
        if int(number) < len(parameters):
            name = f"{optimizer}.state.{moment} of {parameters[int(number)].partition('.')[2]}"
    return name + more


def _of_numbers(name: str, part: Any) -> dict[str, int]:
    """Digests of what an optimizer has beside tensors: its hyperparameters, such as rates."""
    if not isinstance(part, dict):
        return {name: zlib.crc32(dumps(part))}
    found: dict[str, int] = {}
    for key, item in part.items():
        if isinstance(item, list):
            found |= {f"{name}.{key}.{n}": zlib.crc32(dumps(each)) for n, each in enumerate(item)}
        else:
            found[f"{name}.{key}"] = zlib.crc32(b"".join(sorted(map(dumps, _items_of(item)))))
    return found


def _items_of(item: Any) -> list[Any]:
    """The order in which moments were begun may be another on each rank."""
    pairs = item.get("$dict") if isinstance(item, dict) else None
    return pairs if isinstance(pairs, list) else [item]


def _loses_newest(snapshots: Snapshots) -> bool:
    """Whether the last commit, in memory, has changed: then the one before counts from now on.

    A node's memory is looked at by its first rank.
    """
    newest = snapshots.newest()
    if newest is None or (newest.memfd in snapshots.shared and not snapshots.is_nodes_first):
        return False
    kept = snapshots.newest_intact()
    return kept is None or kept.memfd is not newest.memfd


def _refuse_other_names(names: list[str], values: Mapping[str, Any]) -> None:
    """Raise UsageError, on all ranks, unless these are the same on all. Collective."""
    rows = gather([zlib.crc32("\n".join(names).encode()), len(names)])
    if all(row == rows[0] for row in rows):
        return
    rank, _ = rank_and_size(launched=False)
    theirs = gather_json(names if rank == 0 else None)[0]
    lacking = [name for name in theirs if name not in names]
    beside = [name for name in names if name not in theirs]
    said = [f"has no {_in_words(lacking, values)}"] if lacking else []
    said += [f"has {_in_words(beside, values)}, which rank 0 has not"] if beside else []
    texts = gather_json(f"{_named_rank()} {' and '.join(said)}" if said else "")
    raise UsageError(
        f"the ranks keep different parts: {next(filter(None, texts))}. A state keeps what all "
        "ranks have alike, and of all else one rank's: let each rank keep all of it, as "
        "torch.optim's optimizers do, or keep it out of the state"
    )


_MOMENT = re.compile(r"(\w+)\.state\.(\d+)\.(.+)")


def digests_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The digest of each tensor where it is, on a GPU or not: a bit that flips always changes it.

    Each word of 64 bits counts by an odd number that depends on its place, modulo 2**64: a word
    that differs by a power of two changes the sum, since no odd number makes that zero.
    """
    longest = max((tensor.nbytes // 8 for tensor in tensors), default=0)
    sums: dict[torch.device, list[torch.Tensor]] = {}
    weights: dict[torch.device, torch.Tensor] = {}
    for tensor in tensors:
        if tensor.device not in weights:
            size = max(1, min(CHUNK, longest))
            places = torch.arange(size, dtype=torch.int64, device=tensor.device)
            weights[tensor.device] = places.mul_(2 * _ODD).add_(1)
        sums.setdefault(tensor.device, []).append(_sum_of(tensor, weights[tensor.device]))
    # A GPU is asked once for all of its sums.
    found = {device: iter(torch.stack(its).tolist()) for device, its in sums.items()}
    return [next(found[tensor.device]) for tensor in tensors]


def combined(digests: Mapping[str, int]) -> int:
    """A digest of named digests; it fits into 64 bits with a sign."""
    total = sum(digest * (2 * zlib.crc32(name.encode()) + 1) for name, digest in digests.items())
    return (total + _ALL // 2) % _ALL - _ALL // 2


def _sum_of(tensor: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The digest of one, as a tensor where it is."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % 8:  # no view as words
        flat = flat.clone()
    whole = flat.numel() // 8 * 8
    sums = []
    for number, words in enumerate(flat[:whole].view(torch.int64).split(len(weights))):
        own = weights[: len(words)]
        part = words.dot(own) if words.is_cpu else (words * own).sum()  # a GPU's dot takes no ints
        sums.append(part * (2 * (number * _ODD % _HALF) + 1) if number else part)
    if whole < flat.numel():
        rest = torch.zeros(8, dtype=torch.uint8, device=flat.device)
        rest[: flat.numel() - whole] = flat[whole:]
        sums.append(rest.view(torch.int64)[0])
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()
