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


def sum_of(words: torch.Tensor) -> bytes:
    """Eight bytes that depend on each of these words, which are contiguous, and its place.

    Other threads run meanwhile.
    """
    data = (ctypes.c_char * words.nbytes).from_address(words.data_ptr())
    return xxhash.xxh3_64_digest(data)


def chunk_of(words: torch.Tensor, chunk: int) -> torch.Tensor:
    """The words of a body that this chunk has; the last one may be shorter."""
    return words[chunk * CHUNK // 8 : (chunk + 1) * CHUNK // 8]


def digest_of(body: torch.Tensor) -> bytes:
    """The digest of a body as it is; reads all of it, with two threads."""
    words = body.view(torch.int64)
    chunks = range(-(-len(body) // CHUNK))
    middle = len(chunks) // 2
    with ThreadPoolExecutor(1) as other:
        first = other.submit(_sums, words, chunks[:middle])
        second = _sums(words, chunks[middle:])
        return digest_of_sums(first.result() + second)


def digest_of_sums(sums: Iterable[bytes]) -> bytes:
    """The digest of a body, of the sums of its chunks."""
    return hashlib.blake2b(b"".join(sums), digest_size=16).digest()


def _sums(words: torch.Tensor, chunks: Sequence[int]) -> list[bytes]:
    return [sum_of(chunk_of(words, chunk)) for chunk in chunks]
