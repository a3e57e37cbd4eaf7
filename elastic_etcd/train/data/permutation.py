"""The order of an epoch: a function from positions in the epoch to indices of the data set.

Positions and indices are tensors of int64, of any length: an order is computed, or looked up, in
blocks.
"""

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from math import isqrt
from typing import Literal

import torch

from elastic_etcd.train.state.snapshot_bytes import bytes_of

Shuffle = Literal["exact", "stream", False]
Order = Callable[[torch.Tensor], torch.Tensor]
OrderFunction = Callable[[int, int], Sequence[int] | torch.Tensor]  # epoch, seed

_LOW = (1 << 32) - 1
_WORD = (1 << 64) - 1


def order_of(shuffle: Shuffle, length: int, seed: int, epoch: int) -> Order:
    """The order of this epoch, for positions 0...length-1."""
    if shuffle is False or not length:
        return _in_order
    if shuffle == "exact":
        return Exact(length, seed, epoch)
    return Keyed(length, seed, epoch)


def _in_order(positions: torch.Tensor) -> torch.Tensor:
    return positions


class Exact:
    """The order of torch.utils.data.DistributedSampler for the same seed and epoch.

    It is made once and holds 4 bytes per index, 8 from 2**31 on: torch.randperm draws the same
    order for int32 and int64.
    """

    def __init__(self, length: int, seed: int, epoch: int) -> None:
        generator = torch.Generator()
        generator.manual_seed(seed + epoch)
        dtype = torch.int32 if length < 1 << 31 else torch.int64
        self._indices = torch.randperm(length, generator=generator, dtype=dtype, device="cpu")

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        return self._indices[positions]


class Listed:
    """An order that the user's function has made: any indices of the data set, of any number.

    Raises ValueError for what is no such order; `length` is the data set's.
    """

    def __init__(self, order: Sequence[int] | torch.Tensor, length: int) -> None:
        indices = torch.as_tensor(order, device="cpu")
        whole = not (indices.is_floating_point() or indices.is_complex())
        if indices.dim() != 1 or (len(indices) and not whole) or indices.dtype == torch.bool:
            found = f"{str(indices.dtype).removeprefix('torch.')} of shape {tuple(indices.shape)}"
            raise ValueError(f"shuffle(epoch, seed) gives a row of indices, not {found}")
        self.indices = indices.to("cpu", torch.int64)
        if len(indices) and not 0 <= self.indices.min() <= self.indices.max() < length:
            outside = f"{self.indices.min()} to {self.indices.max()}"
            raise ValueError(f"shuffle(epoch, seed) gives {outside} for a data set of {length}")

    def __len__(self) -> int:
        return len(self.indices)

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        return self.indices[positions]

    def digest(self) -> int:
        """56 bits that tell whether two ranks have the same order."""
        data = bytes_of(self.indices.contiguous())
        return int.from_bytes(blake2b(data, digest_size=7).digest())


class Keyed:
    """A permutation keyed by seed and epoch, computed index by index, for up to 2**62 indices.

    It is a Feistel network on pairs (left, right) with left < a and right < b, where a * b is the
    smallest such product >= length for a near its root. It adds modulo a and b where the classic
    adds bits, and walks the cycle past the few values from `length` on (Black and Rogaway, "Ciphers
    with Arbitrary Finite Domains", 2002). It keeps no secrets: the round function is a keyed
    multiplicative hash.
    """

    def __init__(self, length: int, seed: int, epoch: int) -> None:
        if not 0 < length <= 1 << 62:
            raise ValueError(f'shuffle="stream" takes 1 to 2**62 indices, not {length}')
        self.length = length
        self._a = isqrt(length - 1) + 1
        self._b = -(-length // self._a)
        rounds = 8 if length > 1 << 16 else 24  # small domains take more to look uniform
        words = _splitmix64(next(_splitmix64(seed)) ^ epoch)
        self._keys = [(next(words) | 1, next(words), next(words) | 1) for _ in range(rounds)]

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        indices = self._permute_once(positions)
        while True:
            outside = (indices >= self.length).nonzero().flatten()
            if not len(outside):
                return indices
            indices[outside] = self._permute_once(indices[outside])

    def _permute_once(self, values: torch.Tensor) -> torch.Tensor:
        left = torch.div(values, self._b, rounding_mode="trunc")
        right = values - left * self._b
        for number, key in enumerate(self._keys):
            if number % 2:
                _add_modulo(right, _hash_below(left, key, self._b), self._b)
            else:
                _add_modulo(left, _hash_below(right, key, self._a), self._a)
        return left.mul_(self._b).add_(right)


def _hash_below(values: torch.Tensor, key: tuple[int, int, int], below: int) -> torch.Tensor:
    """Hash of each value to 0...below-1; int64 products wrap, which is the point of them."""
    factor, term, factor2 = (word - (1 << 64) if word >> 63 else word for word in key)  # signed
    h = values * factor
    h += term
    h ^= h >> 32
    h *= factor2
    h >>= 32
    h &= _LOW
    h *= below
    h >>= 32
    return h


def _add_modulo(values: torch.Tensor, terms: torch.Tensor, modulus: int) -> None:
    values += terms
    values -= modulus
    values += (values >> 63) & modulus  # back where it went below zero


def _splitmix64(state: int) -> Iterator[int]:
    """Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) & _WORD
        z = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & _WORD
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _WORD
        yield z ^ z >> 31
