"""The body of a snapshot on its way: from a GPU, into shared memory, summed while it is copied.

Bytes are summed a chunk at a time and the sums are hashed; a commit sums each chunk while it is
still in the cache. A sum is XXH3, which depends on every byte and its place.
"""

import ctypes
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, groupby
from typing import TypeVar

import torch
import xxhash

CHUNK = 2 << 20  # bytes; summed while still in the cache
BUFFER = 32 << 20  # bytes, of a batch; and
_TIMES = 4  # that of slices in host memory, which need no buffer
_ALIGNED = 64  # bytes: a slice of a buffer begins at a multiple

Result = TypeVar("Result")
TensorSlice = tuple[int, torch.Tensor]  # its place in the body, and its bytes


# --- from a GPU -----------------------------------------------------------------------------


class Staging:
    """Brings a GPU's tensors into host memory, on their way to a snapshot, a batch at a time.

    They go through page-locked memory, on a stream of their own for each device. Two buffers take
    turns: while one is copied on into the snapshot, the GPU fills the other. The buffers are pinned
    if `device_type` is "cuda".
    """

    def __init__(self, device_type: str = "cuda", size: int = BUFFER) -> None:
        self.device_type = device_type
        self.size = size
        self._pinned = device_type == "cuda"
        self._buffers: list[torch.Tensor] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def through(self, slices: Iterable[TensorSlice]) -> Iterator[list[TensorSlice]]:
        """Yield the same slices in the same order, those of `device_type` now in host memory.

        A batch is good until the next is asked for.
        """
        coming = None
        for turn, batch in enumerate(self._split_batches(slices)):
            # With the batch itself: a tensor that is only in it must live until it is copied.
            filling = (*self._copy_batch(turn % 2, batch), batch)
            if coming is not None:
                yield _wait_copied(*coming[:2])
            coming = filling
        if coming is not None:
            yield _wait_copied(*coming[:2])

    def _split_batches(self, slices: Iterable[TensorSlice]) -> Iterator[list[TensorSlice]]:
        """Slices that fit one buffer together, those in host memory by a part of their size."""
        batch: list[TensorSlice] = []
        left = self.size
        for start, whole in slices:
            times = _TIMES if self._pinned and whole.is_cpu else 1
            first = 0
            while first < whole.nbytes:
                if left < _ALIGNED:
                    yield batch
                    batch, left = [], self.size
                fits = not first and whole.nbytes <= left * times
                part = whole if fits else whole[first : first + left * times]
                batch.append((start + first, part))
                first += part.nbytes
                left -= -(-part.nbytes // (_ALIGNED * times)) * _ALIGNED
        if batch:
            yield batch

    def _copy_batch(
        self, turn: int, batch: list[TensorSlice]
    ) -> tuple[list[TensorSlice], list[torch.cuda.Event]]:
        """Begin the copies, which are done at these events."""
        moved: list[TensorSlice] = []
        streams: list[torch.cuda.Stream] = []
        end = 0
        for start, source in batch:
            if source.device.type != self.device_type:
                moved.append((start, source.cpu()))  # of a device that is neither, as xpu
                continue
            target = self._buffer_of(turn)[end : end + source.nbytes]
            end += -(-source.nbytes // _ALIGNED) * _ALIGNED
            self._copy_slice(source, target, streams)
            moved.append((start, target))
        return moved, [stream.record_event() for stream in streams]

    def _copy_slice(
        self, source: torch.Tensor, target: torch.Tensor, streams: list[torch.cuda.Stream]
    ) -> None:
        """Copy on the device's stream, which is added to `streams`; without one at once."""
        if not self._pinned:
            target.copy_(source)
            return
        if source.device not in self._streams:
            self._streams[source.device] = torch.cuda.Stream(source.device)
        stream = self._streams[source.device]
        if stream not in streams:  # the training's work in the queue comes first
            stream.wait_stream(torch.cuda.current_stream(source.device))
            streams.append(stream)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def _buffer_of(self, turn: int) -> torch.Tensor:
        while len(self._buffers) <= turn:
            buffer = torch.empty(
                self.size, dtype=torch.uint8, device="cpu", pin_memory=self._pinned
            )
            self._buffers.append(buffer)
        return self._buffers[turn]


def _wait_copied(slices: list[TensorSlice], events: list[torch.cuda.Event]) -> list[TensorSlice]:
    for event in events:
        event.synchronize()
    return slices


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Those of a contiguous tensor in host memory; torch may be there without numpy."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


# --- sums -----------------------------------------------------------------------------------


def sum_of(tensor: torch.Tensor) -> bytes:
    """Eight bytes that depend on each byte of a contiguous tensor, and its place.

    Other threads run meanwhile.
    """
    return _sum_at(tensor.data_ptr(), tensor.nbytes)


def _sum_at(address: int, size: int) -> bytes:
    return xxhash.xxh3_64_digest((ctypes.c_char * size).from_address(address))


def sums_of(tensors: Iterable[torch.Tensor]) -> list[bytes]:
    """The sum of each."""
    return [sum_of(tensor) for tensor in tensors]


def digest_of(body: torch.Tensor) -> bytes:
    """The digest of a body as it is; reads all of it, with two threads."""
    chunks = body.split(CHUNK)
    middle = len(chunks) // 2
    with ThreadPoolExecutor(1) as other:
        first = _begin(other, partial(sums_of, chunks[:middle]))
        second = sums_of(chunks[middle:])
        return _digest_of_sums(first() + second)


def _begin(other: ThreadPoolExecutor, work: Callable[[], Result]) -> Callable[[], Result]:
    """Begin `work` in the other thread; gives its result, and does it then if there is none."""
    try:
        return other.submit(work).result
    except RuntimeError:  # the user, or the container, has all that it may
        return work


def digest_of_batches(batches: Iterable[Sequence[TensorSlice]]) -> bytes:
    """The digest of the body that the slices, which ascend and fill it, would make."""
    return _digest_of_sums(_sums_of(batches))


def write_body(body: torch.Tensor, batches: Iterable[Sequence[TensorSlice]]) -> bytes:
    """Copy the slices, which ascend and fill the body, into it; its digest.

    Each batch in two halves, a thread for each: as a plain copy does with more than one, and one
    that copies and sums alone takes 1.3 times as long. They wait for each other once per batch.
    More at each chunk, which torch's own would do, took 9 times where others want the processors.
    """
    sums: dict[int, bytes] = {}
    with ThreadPoolExecutor(1) as other:
        for batch in batches:
            begin = batch[0][0] // CHUNK
            end = batch[-1][0] + batch[-1][1].nbytes
            middle = (begin + -(-end // CHUNK)) // 2
            first = None
            # Else a thread would be begun for nothing, as long as a small commit.
            if middle > begin:
                half = begin * CHUNK, middle * CHUNK
                first = _begin(other, partial(_write_half, body, batch, *half))
            sums |= _write_half(body, batch, middle * CHUNK, end)
            if first:
                sums |= first()
    return _digest_of_sums(sums[chunk] for chunk in sorted(sums))


def _sum_chunk(body: torch.Tensor, chunk: int) -> bytes:
    """The sum of a body's chunk; the last one may be shorter."""
    return sum_of(body[chunk * CHUNK : (chunk + 1) * CHUNK])


def _digest_of_sums(sums: Iterable[bytes]) -> bytes:
    return hashlib.blake2b(b"".join(sums), digest_size=16).digest()


def _sums_of(batches: Iterable[Sequence[TensorSlice]]) -> Iterator[bytes]:
    """The sums of the chunks that the slices would make."""
    gathered = torch.empty(CHUNK, dtype=torch.uint8, device="cpu")
    parts = chain.from_iterable(map(_within_chunks, batches))
    for _, of_chunk in groupby(parts, lambda part: part[0] // CHUNK):
        end = 0
        for start, address, size in of_chunk:
            if size == CHUNK:
                yield _sum_at(address, size)  # in its own place
                continue
            ctypes.memmove(gathered.data_ptr() + start % CHUNK, address, size)
            end = start % CHUNK + size
        if end:
            yield sum_of(gathered[:end])


def _within_chunks(
    slices: Iterable[TensorSlice], begin: int = 0, end: int = sys.maxsize
) -> Iterator[tuple[int, int, int]]:
    """The bytes from `begin` to `end`: place, address and number, never of two chunks together.

    A view for each of them would take longer than to copy a small one.
    """
    for start, whole in slices:
        first, stop = max(start, begin), min(start + whole.nbytes, end)
        address = whole.data_ptr() - start
        while first < stop:
            last = min(stop, (first // CHUNK + 1) * CHUNK)
            yield first, address + first, last - first
            first = last


def _write_half(
    body: torch.Tensor, batch: Sequence[TensorSlice], begin: int, end: int
) -> dict[int, bytes]:
    """Copy the bytes from `begin` to `end`. The sums of the chunks that they reach.

    Each is taken when the chunk is whole, or the last slice is there: the last one's may be taken
    again with the next batch.
    """
    sums: dict[int, bytes] = {}
    chunk = -1
    target = body.data_ptr()
    for start, address, size in _within_chunks(batch, begin, end):
        if start // CHUNK != chunk and chunk >= 0:
            sums[chunk] = _sum_chunk(body, chunk)
        chunk = start // CHUNK
        ctypes.memmove(target + start, address, size)
    if chunk >= 0:
        sums[chunk] = _sum_chunk(body, chunk)
    return sums
