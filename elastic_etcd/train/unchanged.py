"""Which tensors lie in a memory file already, so that a commit need not copy them again.

Only parameters that ask for no gradient come into question, and their moments, and only where
torch's version counter says that nothing was written to them since. That is not the whole truth:
the counter does not see what is written through `.data`, through numpy's view of the memory, by
kernels outside of torch or by a replayed CUDA graph, and averages of weights (EMA) are often kept
in such parameters and written so. So a parameter is trusted only after it was compared, bit by bit,
and found as it was PROBATION times, is compared again each AGAIN-th time, and in some places at
every commit; one that was found changed without a word is always copied from then on.
"""

import ctypes
from collections.abc import Mapping

import torch

PROBATION = 2
AGAIN = 32
SMALLEST = 256 << 10  # bytes; less is copied as soon as it is compared
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
_STRIDE = 16 << 10  # words of 8 bytes, from one place to the next


class Frozen:
    """A tensor as a memory file has it from byte `start` of the body on."""

    def __init__(self, tensor: torch.Tensor, turn: int) -> None:
        self.tensor = tensor  # held, so that no other can have its address
        self._words = _words_of(tensor)
        self.version = tensor._version  # noqa: SLF001 - torch has no public name for it
        self.visits = 0
        self._turn = turn  # so that not all are compared at the same commit

    def is_same(self, tensor: torch.Tensor) -> bool:
        """Whether this is the tensor, and torch says that nothing was written to it."""
        one, other = self.tensor, tensor
        same = one.data_ptr() == other.data_ptr() and one.device == other.device
        same = same and one.dtype == other.dtype and one.shape == other.shape
        return bool(same and self.version == other._version)  # noqa: SLF001

    def holds(self, place: torch.Tensor) -> bool:
        """Whether the bytes in the memory file are the tensor's, as far as is looked."""
        self.visits += 1
        words, kept = self._words, place.view(torch.int64)
        if self.visits > PROBATION and (self.visits + self._turn) % AGAIN:
            first = self.visits * 7919 % _STRIDE
            return bool(torch.equal(words[first::_STRIDE].cpu(), kept[first::_STRIDE]))
        here = words.cpu()  # torch.equal takes ten times as long as the C library
        return not _memcmp(here.data_ptr(), kept.data_ptr(), here.nbytes)


def _words_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8).view(torch.int64)


class Unchanged:
    """What of the tensors at their places in one memory file is still there."""

    def __init__(self) -> None:
        self._frozen: dict[int, Frozen] = {}
        self._distrusted: set[int] = set()  # addresses

    def forget(self) -> None:
        """The memory file is another's now, or is being written."""
        self._frozen = {}

    def distrust(self, start: int, stop: int) -> None:
        """What lies between these bytes of the body has changed without a word."""
        for first, frozen in self._frozen.items():
            if first < stop and start < first + frozen.tensor.nbytes:
                self._distrusted.add(frozen.tensor.data_ptr())

    def same(self, tensors: Mapping[int, torch.Tensor]) -> dict[int, Frozen]:
        """Those of `tensors`, by where they begin in the body, of which torch says that."""
        return {
            start: frozen
            for start, tensor in tensors.items()
            if (frozen := self._frozen.get(start)) and frozen.is_same(tensor)
        }

    def find(self, tensors: Mapping[int, torch.Tensor], body: torch.Tensor) -> dict[int, Frozen]:
        """Those of `tensors`, by where they begin in the body, that are there already."""
        found = {}
        for start, frozen in self.same(tensors).items():
            tensor = tensors[start]
            if frozen.holds(body[start : start + tensor.nbytes]):
                found[start] = frozen
            else:
                self._distrusted.add(tensor.data_ptr())
        return found

    def keep(self, tensors: Mapping[int, torch.Tensor], found: Mapping[int, Frozen]) -> None:
        """All of `tensors` are in the memory file now; those in `found` were before."""
        self._frozen = {
            start: found.get(start) or Frozen(tensor, turn)
            for turn, (start, tensor) in enumerate(tensors.items())
            if tensor.data_ptr() not in self._distrusted
        }


def can_be_skipped(tensor: torch.Tensor) -> bool:
    """Whether it is worth it, and torch counts what is written to it."""
    large = tensor.nbytes >= SMALLEST and tensor.nbytes % 8 == 0
    in_words = tensor.storage_offset() * tensor.itemsize % 8 == 0 and tensor.is_contiguous()
    as_it_is = not (tensor.is_inference() or tensor.is_conj() or tensor.is_neg())
    return large and in_words and as_it_is
