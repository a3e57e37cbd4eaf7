"""ee.seed_all: random numbers that differ between ranks and worlds, and can be had again."""

import random
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from typing import Any

import torch

from elastic_etcd.train.accelerator import devices
from elastic_etcd.train.collectives import generation, rank_and_size
from elastic_etcd.train.state.elastic_state import ElasticState

_NAME = "random_states"


def seed_all(state: ElasticState, seed: int = 0) -> None:
    """Seed random, numpy and torch, CPU and GPUs, now and at each change of world.

        state = ee.ElasticState(model=model, sampler=sampler)
        ee.seed_all(state, seed=7)

    The seeds follow from `seed`, the generation and the rank alone, so that a rank draws neither
    another rank's numbers nor its own of an earlier world; DataLoader's workers have theirs from
    torch. From then on `state.random_states` is a value of the state: restore() in the same world
    also takes this rank's random states back to those of the commit.

    Call it once on all ranks, before ee.run or the first sync(). Another call seeds anew. It raises
    nothing. "Random numbers" in docs/state.md has the details.
    """
    states = _RandomStates(seed)
    state._values[_NAME] = states
    states.reshard(*rank_and_size(launched=True))


class _RandomStates:
    """A value whose snapshot has only the seed, which is the same on all ranks."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._seeded: tuple[int, ...] = ()  # seed, generation and rank
        self._committed: tuple[tuple[int, ...], list[Callable[[], None]]] = (), []

    def state_dict(self) -> dict[str, int]:
        """The seed. This rank's random states of now are those that a restore goes back to."""
        self._committed = self._seeded, _now()
        return {"seed": self._seed}

    def load_state_dict(self, saved: dict[str, int]) -> None:
        """Go back to the random states of the last commit, if that was in this world."""
        self._seed = saved["seed"]
        seeded, go_back = self._committed
        if seeded == self._seeded:
            for restore in go_back:
                restore()

    def reshard(self, rank: int, world_size: int) -> None:
        """Reseed in another world; an ElasticState calls this at the end of each sync()."""
        del world_size
        numbers = self._seed, generation(), rank
        if numbers != self._seeded:
            _seed(*numbers)
            self._seeded = numbers


def _seed(*numbers: int) -> None:
    words = blake2b(repr(numbers).encode(), digest_size=32).digest()
    random.seed(words[:8])
    torch.manual_seed(int.from_bytes(words[8:16], "little") >> 1)
    with suppress(ImportError):
        import numpy as np  # noqa: PLC0415 - torch does without it

        np.random.seed(list(words[16:]))  # noqa: NPY002 - that of scripts


def _now() -> list[Callable[[], None]]:
    """Functions that take the random states back to those of now."""
    own, of_torch = random.getstate(), torch.get_rng_state()
    back: list[Callable[[], Any]] = [
        lambda: random.setstate(own),
        lambda: torch.set_rng_state(of_torch),
    ]
    if devices().is_initialized():
        of_device = devices().get_rng_state()
        back.append(lambda: devices().set_rng_state(of_device))
    with suppress(ImportError):
        import numpy as np  # noqa: PLC0415

        of_numpy = np.random.get_state()  # noqa: NPY002
        back.append(lambda: np.random.set_state(of_numpy))  # noqa: NPY002
    return back
