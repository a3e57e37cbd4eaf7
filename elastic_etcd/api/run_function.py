"""`run_function.py FILE` is a worker of `elastic_launch`: it calls the function in that file.

The value that it returns is written beside that file for this generation and rank, and what it
raises to torch's error file. It is run by its path, as any script is, and loads the standard
library and what the function needs.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
import traceback
from contextlib import suppress
from multiprocessing import current_process, spawn
from pathlib import Path
from typing import Any, BinaryIO


def load(path: Path) -> tuple[Any, tuple[Any, ...]]:
    """The function and its arguments, in a process that imports as the program did."""
    current: Any = current_process()
    with _opened(path) as file:
        current._inheriting = True  # noqa: SLF001 - as in a child of multiprocessing's
        try:
            spawn.prepare(pickle.load(file))  # noqa: S301 - the program that started us wrote it
            function, args = pickle.load(file)  # noqa: S301 - as above
        finally:
            del current._inheriting  # noqa: SLF001 - as above
    return function, args


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError:  # somebody has removed it, and the program holds it
        return Path(os.environ["ELASTIC_ETCD_HELD_FUNCTION"]).open("rb")


def save(folder: Path, value: Any) -> None:
    """Write what was returned, or why that can't be: its training need not be repeated."""
    env = os.environ
    path = folder / f"{env['ELASTIC_ETCD_GENERATION']}.{env['RANK']}.pickle"
    folder.mkdir(0o700, parents=True, exist_ok=True)  # somebody may have removed it
    begun = folder / f"{os.getpid()}.begun"
    try:
        with begun.open("wb") as file:
            dump(value, file)
    except Exception as error:  # noqa: BLE001 - pickling raises what it likes
        with suppress(OSError):  # on a full disk the file's name has to say it
            begun.write_text(f"{type(error).__name__}: {error}")
        path = path.with_suffix(".error")
    begun.rename(path)


def dump(value: Any, file: Any) -> None:
    """Pickle by name, or else by value where cloudpickle is there."""
    try:
        pickle.dump(value, file, protocol=pickle.HIGHEST_PROTOCOL)
    except (AttributeError, TypeError, pickle.PicklingError):
        with suppress(ImportError):
            import cloudpickle  # noqa: PLC0415 - only for what has no name

            file.seek(0)
            file.truncate()
            cloudpickle.dump(value, file)
            return
        raise


def record(error: Exception) -> None:
    """Write torch's error file, unless the function has done that itself (@record)."""
    extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    with (
        suppress(OSError),  # its traceback is on the console, too
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).open("x") as file,
    ):
        json.dump({"message": message}, file)


def main(file: Path) -> None:
    """Call the function, and write what comes of it."""
    folder = file.parent
    try:
        function, args = load(file)
        value = function(*args)
    except SystemExit as end:
        if end.code in (None, 0):
            save(folder, None)
        raise
    except Exception as error:
        record(error)
        raise
    save(folder, value)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
