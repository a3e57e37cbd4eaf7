"""The digest of a snapshot's bytes, at the speed of the memory.

Bytes are summed a chunk at a time and the sums are hashed; a commit sums each chunk while it is
still in the cache. A sum is XXH3, which depends on every byte and where it is.
"""

import ctypes
import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import xxhash

CHUNK = 2 << 20  # bytes; summed while still in the cache


def sum_of(tensor: torch.Tensor) -> bytes:
    """Eight bytes that depend on each byte of a contiguous tensor, and its place.

    Other threads run meanwhile.
    """
    data = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return xxhash.xxh3_64_digest(data)


def sum_chunk(body: torch.Tensor, chunk: int) -> bytes:
    """The sum of a body's chunk; the last one may be shorter."""
    return sum_of(body[chunk * CHUNK : (chunk + 1) * CHUNK])


def chunks_of(size: int) -> range:
    """The chunks of a body of so many bytes."""
    return range(-(-size // CHUNK))


def digest_of(body: torch.Tensor) -> bytes:
    """The digest of a body as it is; reads all of it, with two threads."""
    chunks = chunks_of(body.nbytes)
    middle = len(chunks) // 2
    with ThreadPoolExecutor(1) as other:
        first = other.submit(_sums, body, chunks[:middle])
        second = _sums(body, chunks[middle:])
        return digest_of_sums(first.result() + second)


def digest_of_sums(sums: Iterable[bytes]) -> bytes:
    """The digest of a body, of the sums of its chunks."""
    return hashlib.blake2b(b"".join(sums), digest_size=16).digest()


def _sums(body: torch.Tensor, chunks: Sequence[int]) -> list[bytes]:
    return [sum_chunk(body, chunk) for chunk in chunks]
