"""The digest of a snapshot's bytes, at about the speed of the memory.

Bytes are summed a chunk at a time and the sums are hashed; a commit sums each chunk while it is
still in the cache. A sum folds a chunk's 32-bit words row on row, `h = h * FACTOR + row`, every
other row half a word further on: there the high bits of `h`, which a multiplication cannot move
down, are the low ones. So it depends on where each word is, and what is changed within one row is
found for certain. A last row that is shorter meets as many words of `h`; the length is hashed, too.
Words of 64 bits took 1.5 times as long.
"""

import ctypes
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

CHUNK = 2 << 20  # bytes; summed while still in the cache, and large enough for torch's overhead
_ROWS = 65536, 8192, 2048  # words; long rows take few calls, and few words are hashed in the end
_FACTOR = 0x9E3779B1 - (1 << 32)  # odd, so that nothing is lost; of the golden ratio


class Summer:
    """Sums chunks, one after the other: it has the memory for it, so each thread has its own."""

    def __init__(self) -> None:
        self._folds = [_Fold(row) for row in _ROWS]

    def sum_of(self, words: torch.Tensor) -> bytes:
        """Eight bytes that depend on each of the int64 words and its place."""
        length = words.nbytes.to_bytes(8, "little")
        halves = words.view(torch.int32)
        for fold in self._folds:
            if len(halves) > fold.row:
                halves = fold(halves)
        data = ctypes.string_at(halves.data_ptr(), halves.nbytes)
        return hashlib.blake2b(data, digest_size=8, salt=length).digest()


class _Fold:
    """Makes many words `row` + 1, in memory that the next call uses again."""

    def __init__(self, row: int) -> None:
        self.row = row
        memory = bytearray(4 * row + 4)
        self._all = torch.frombuffer(memory, dtype=torch.int32)
        further = torch.frombuffer(memory, dtype=torch.int32, count=row, offset=2)
        self._windows = self._all[:row], further

    def __call__(self, words: torch.Tensor) -> torch.Tensor:
        first, *others = words.split(self.row)
        self._windows[0].copy_(first)
        self._all[-1:].zero_()
        for number, row in enumerate(others, 1):
            window = self._windows[number % 2]
            if len(row) < self.row:
                window = window[: len(row)]
            torch.add(row, window, alpha=_FACTOR, out=window)
        return self._all


def chunk_of(words: torch.Tensor, chunk: int) -> torch.Tensor:
    """The words of a body that this chunk has; the last one may be shorter."""
    return words[chunk * CHUNK // 8 : (chunk + 1) * CHUNK // 8]


def digest_of(body: torch.Tensor) -> bytes:
    """The digest of a body as it is; reads all of it, with two threads."""
    words = body.view(torch.int64)
    chunks = range(-(-len(body) // CHUNK))
    middle = len(chunks) // 2
    with one_thread(), ThreadPoolExecutor(1) as other:
        first = other.submit(_sums, words, chunks[:middle])
        second = _sums(words, chunks[middle:])
        return digest_of_sums(first.result() + second)


def digest_of_sums(sums: Iterable[bytes]) -> bytes:
    """The digest of a body, of the sums of its chunks."""
    return hashlib.blake2b(b"".join(sums), digest_size=16).digest()


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use no threads of its own meanwhile, nor in threads that are begun meanwhile.

    They would wait for each other at each row, which is slower than one alone.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _sums(words: torch.Tensor, chunks: Sequence[int]) -> list[bytes]:
    summer = Summer()
    return [summer.sum_of(chunk_of(words, chunk)) for chunk in chunks]
