"""What an import asks for that each process should have for itself: numbers, generators, names.

A profile function sees it, which leaves nothing behind in what is imported. Loaded by its path, as
entry.py is.
"""

from __future__ import annotations

import gc
import os
import random
import re
import sys
import tempfile
import uuid
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import FrameType, ModuleType

_MAKERS = {1: uuid.uuid1, 4: uuid.uuid4}
_CODES = {id(call.__code__) for call in _MAKERS.values()}
_SEED = id(random.Random.seed.__code__)
_BITS = id(random.SystemRandom.getrandbits.__code__)  # numpy's generators ask by it
_NAME = id(tempfile._RandomNameSequence.__next__.__code__)  # type: ignore[attr-defined]  # noqa: SLF001
_FORMS: tuple[Callable[[uuid.UUID], object], ...] = (lambda u: u, lambda u: u.hex, str)


class Asked:
    """What was asked for while it was `noted`.

    `kept(modules)` says what these have of it and is no other process's, "" if nothing. They may
    have `numbers`, as globals: `Renewed` finds them.
    """

    def __init__(self) -> None:
        self.numbers: list[uuid.UUID] = []
        self._bits: set[int] = set()
        self._generators: list[weakref.ref[random.Random]] = []
        self._pid_by: set[str] = set()  # the modules that have asked for the process's number
        self._fault = ""

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what is asked for in here."""
        look = self._look_at_call
        sys.setprofile(look)
        try:
            yield
        finally:
            if sys.getprofile() is look:
                sys.setprofile(None)
            else:
                self._fault = "a profile function of its own"

    def kept(self, modules: Mapping[str, ModuleType]) -> str:
        """What these modules have that only one process may have, or ""."""
        if any(each() for each in self._generators) or self._has_sequence():
            return "a generator of random numbers that has no seed"
        if any(not Renewed([number], modules).places for number in self.numbers):
            return "a unique number"
        if any(value in self._bits for _, _, value in _globals(modules) if type(value) is int):
            return "a random number"
        if _has_pid({name: modules[name] for name in self._pid_by & modules.keys()}):
            return "the number of its process"
        return self._fault

    def _look_at_call(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call":
            if arg is os.getpid:
                self._pid_by.add(_asker(frame))
            elif arg is os.urandom:
                self._note_entropy(frame)
        elif event == "call":
            if id(frame.f_code) == _SEED:
                self._note_seed(frame)
            elif id(frame.f_code) == _NAME:
                self._note_name(frame)
        elif event == "return":
            if id(frame.f_code) in _CODES and arg is not None:
                self.numbers.append(arg)
            elif id(frame.f_code) == _BITS and arg is not None:
                self._bits.add(arg)

    def _note_entropy(self, frame: FrameType) -> None:
        if id(frame.f_code) not in (_BITS, *_CODES) and _asker(frame):
            self._fault = "random bytes"

    def _note_seed(self, frame: FrameType) -> None:
        if frame.f_locals["a"] is None and _asker(frame):
            self._generators.append(weakref.ref(frame.f_locals["self"]))

    def _note_name(self, frame: FrameType) -> None:
        caller = frame.f_back
        if caller is None or caller.f_globals.get("__name__") != "tempfile":  # it knows of forks
            return
        if caller.f_code.co_name != "_get_default_tempdir":
            self._fault = "a temporary file"

    def _has_sequence(self) -> bool:
        """Whether a generator of numpy's is there that began with such bits, but for its own."""
        numpy: Any = sys.modules.get("numpy.random")
        if not (self._bits and numpy):
            return False
        own = numpy.mtrand._rand._bit_generator.seed_seq  # noqa: SLF001 - each worker seeds it
        gc.collect()
        kept = (each for each in gc.get_objects() if type(each) is numpy.SeedSequence)
        return any(each is not own and each.entropy in self._bits for each in kept)


class Renewed:
    """Unique numbers that are globals of `modules`: others in each process, which calls `renew`."""

    def __init__(self, numbers: list[uuid.UUID], modules: Mapping[str, ModuleType]) -> None:
        known = {form(u): (form, u) for u in numbers for form in _FORMS}
        kinds = (str, uuid.UUID)
        found = (each for each in _globals(modules) if type(each[2]) in kinds) if known else ()
        self.places = [(owner, name, *known[v]) for owner, name, v in found if v in known]

    def renew(self) -> None:
        """Have others, the same wherever it was the same."""
        fresh = {number: _MAKERS[number.version or 4]() for *_, number in self.places}
        for owner, name, form, number in self.places:
            owner[name] = form(fresh[number])


def _globals(modules: Mapping[str, ModuleType]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    for module in modules.values():
        owner = getattr(module, "__dict__", {})  # what is in sys.modules may be anything
        for name, value in list(owner.items()):
            if not name.startswith("__"):
                yield owner, name, value


def _has_pid(modules: Mapping[str, ModuleType]) -> bool:
    """Whether it is a global, or in the text of one: in objects it tells whether one has forked."""
    number = re.compile(rf"(?<!\d){os.getpid()}(?!\d)")
    found = (value for _, _, value in _globals(modules) if type(value) in (int, str))
    return any(number.search(str(value)) for value in found)


def _asker(frame: FrameType | None) -> str:
    """The module that has asked, through Python's own or not; "" if one of these was imported."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name.partition(".")[0] not in sys.stdlib_module_names:
            return name
        if frame.f_code.co_name == "<module>" or name == "tempfile":
            return ""
        frame = frame.f_back
    return ""
