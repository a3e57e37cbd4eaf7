"""Brings a GPU's tensors into host memory, on their way to a snapshot, a batch at a time.

They go through page-locked memory, on a stream of their own. Two buffers take turns: while one is
copied on into the snapshot, the GPU fills the other.
"""

from collections.abc import Iterable, Iterator

import torch

from elastic_etcd.train.state.snapshot import Piece

BUFFER = 32 << 20  # bytes, of a batch; and
_TIMES = 4  # that of what is in host memory, and needs no buffer


class Staging:
    """Two buffers, pinned if `device_type` is "cuda", and a stream for each device."""

    def __init__(self, device_type: str = "cuda", size: int = BUFFER) -> None:
        self.device_type = device_type
        self.size = size
        self._pinned = device_type == "cuda"
        self._buffers: list[torch.Tensor] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def through(self, pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
        """Yield the same pieces in the same order, those of `device_type` now in host memory.

        A batch is good until the next is asked for.
        """
        coming = None
        for turn, batch in enumerate(self._split_batches(pieces)):
            # With the batch itself: a tensor that is only in it must live until it is copied.
            filling = (*self._copy_batch(turn % 2, batch), batch)
            if coming is not None:
                yield _wait_copied(*coming[:2])
            coming = filling
        if coming is not None:
            yield _wait_copied(*coming[:2])

    def _split_batches(self, pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
        """Pieces that fit one buffer together, those in host memory by a part of their size."""
        batch: list[Piece] = []
        room = self.size
        for start, piece in pieces:
            times = _TIMES if self._pinned and piece.is_cpu else 1
            first = 0
            while first < piece.nbytes:
                if room < 64:
                    yield batch
                    batch, room = [], self.size
                part = piece[first : first + room * times]
                batch.append((start + first, part))
                first += part.nbytes
                room -= -(-part.nbytes // (64 * times)) * 64
        if batch:
            yield batch

    def _copy_batch(
        self, turn: int, batch: list[Piece]
    ) -> tuple[list[Piece], list[torch.cuda.Event]]:
        """Begin the copies; the events tell when they are done."""
        moved: list[Piece] = []
        streams: list[torch.cuda.Stream] = []
        end = 0
        for start, piece in batch:
            if piece.device.type != self.device_type:
                moved.append((start, piece.cpu()))  # of a device that is neither, as xpu
                continue
            room = self._buffer_of(turn)[end : end + piece.nbytes]
            end += -(-piece.nbytes // 64) * 64
            self._copy_piece(piece, room, streams)
            moved.append((start, room))
        return moved, [stream.record_event() for stream in streams]

    def _copy_piece(
        self, piece: torch.Tensor, room: torch.Tensor, streams: list[torch.cuda.Stream]
    ) -> None:
        """Copy on the device's stream, which is added to `streams`; without one at once."""
        if not self._pinned:
            room.copy_(piece)
            return
        stream = self._copy_stream(piece.device)
        if stream not in streams:  # what the training has queued comes first
            stream.wait_stream(torch.cuda.current_stream(piece.device))
            streams.append(stream)
        with torch.cuda.stream(stream):
            room.copy_(piece, non_blocking=True)

    def _buffer_of(self, turn: int) -> torch.Tensor:
        while len(self._buffers) <= turn:
            buffer = torch.empty(self.size, dtype=torch.uint8, pin_memory=self._pinned)
            self._buffers.append(buffer)
        return self._buffers[turn]

    def _copy_stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


def _wait_copied(pieces: list[Piece], events: list[torch.cuda.Event]) -> list[Piece]:
    for event in events:
        event.synchronize()
    return pieces
