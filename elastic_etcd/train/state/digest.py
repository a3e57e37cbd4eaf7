"""A digest of tensors where they are, on a GPU or not: a single bit that flips always changes it.

Each word of 64 bits counts by an odd number that depends on its place, modulo 2**64: a word that
differs by a power of two changes the sum, since no odd number makes that zero.
"""

import zlib
from collections.abc import Mapping, Sequence

import torch

CHUNK = 1 << 20  # words that are multiplied at once
_ODD = 0x1E3779B97F4A7C15  # without a pattern, so that neighbours count by unlike numbers
_ALL, _HALF = 1 << 64, 1 << 61


def digests_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The digest of each, which depends on all of its bytes and their places."""
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
