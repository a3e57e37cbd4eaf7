"""A function on its way to the workers, and what it returns on its way back: files of pickles.

Functions and classes go by name where workers can import them, as with multiprocessing, and by
value, with cloudpickle, where they can't: what is defined in a notebook, or in another function.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import sys
from multiprocessing import current_process
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from elastic_etcd.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def save_function(folder: Path, function: Callable[..., Any], args: Sequence[Any]) -> Path:
    """Write the file that api/run_function.py reads. Raises UsageError if that can't be."""
    if getattr(current_process(), "_inheriting", False):
        raise UsageError(
            "elastic_launch is called again by a worker that imports the program's main file: put "
            'the call under `if __name__ == "__main__":`'
        )
    buffer = io.BytesIO()
    pickler = _ByName(buffer)
    preparation: dict[str, Any] = {"sys_path": sys.path, "sys_argv": sys.argv}
    try:
        pickler.dump((function, tuple(args)))
        payload = buffer.getvalue()
    except Exception as error:  # noqa: BLE001 - pickling raises what it likes
        payload = _by_value(function, args, error)
    else:
        if pickler.needs_main:
            preparation |= _main()
    file = folder / "function"
    file.write_bytes(pickle.dumps(preparation) + payload)
    return file


def load_values(folder: Path, generation: int) -> dict[int, Any]:
    """{rank: value} of the ranks that returned in this generation.

    Raises UsageError for a value that could not be written, or can't be loaded here.
    """
    if folder.exists() and folder.stat().st_uid != os.geteuid():
        raise UsageError(
            f"{folder} was removed, and is another user's now: its values are not read"
        )
    values = {}
    files = {int(path.name.split(".")[1]): path for path in folder.glob(f"{generation}.*.*")}
    for rank, path in sorted(files.items()):
        if path.suffix == ".error":
            why = path.read_text() or os.strerror(errno.ENOSPC)
            raise UsageError(
                f"rank {rank} returned what can't be written into {folder}: {why}.\n"
                "Let the function return plain data, or write the rest to a file; set TMPDIR where "
                "there is room for what it returns."
            )
        try:
            with path.open("rb") as file:
                values[rank] = pickle.load(file)  # noqa: S301 - our own worker wrote it
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise UsageError(f"what rank {rank} returned can't be loaded here: {what}") from error
    return values


def name_of(function: object) -> str:
    """The name of a function, for messages."""
    return str(getattr(function, "__qualname__", None) or function)


class _ByName(pickle.Pickler):
    """A pickler that refuses what workers can't import: a `__main__` that is no file or module."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.needs_main = False

    def reducer_override(self, value: Any) -> Any:
        """As pickle asks of each function, class and object."""
        if isinstance(value, FunctionType | type) and value.__module__ == "__main__":
            self.needs_main = True
            if not _main():
                raise pickle.PicklingError(
                    f"{value.__qualname__} is defined in __main__, which workers can't import"
                )
        return NotImplemented


def _main() -> dict[str, str]:
    """How multiprocessing's `prepare` finds the main module again; {} where that can't be."""
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name:
        if name.rpartition(".")[2] == "__main__":  # which multiprocessing never imports again
            return {}
        return {"init_main_from_name": name}
    file = getattr(main, "__file__", None)
    if file and Path(file).is_file() and not hasattr(main, "get_ipython"):
        return {"init_main_from_path": os.path.abspath(file)}  # noqa: PTH100 - links stay
    return {}


def _by_value(function: Callable[..., Any], args: Sequence[Any], why: Exception) -> bytes:
    try:
        import cloudpickle  # noqa: PLC0415 - only for what has no name
    except ImportError:
        raise UsageError(
            f"{name_of(function)} and its arguments can't be given to workers: {why}.\n"
            "Put the function into a module that workers can import, or "
            "pip install 'elastic_etcd[notebook]' (cloudpickle)."
        ) from why
    try:
        payload: bytes = cloudpickle.dumps((function, tuple(args)))
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise UsageError(
            f"{name_of(function)} and its arguments can't be given to workers: {what}.\n"
            "Let the function make such things itself, in the worker."
        ) from error
    return payload
