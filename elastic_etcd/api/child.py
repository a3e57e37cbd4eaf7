"""The agent beside a Python program that has called `elastic_launch` (launcher.py).

`python -m elastic_etcd.api.child PID FOLDER FLAG...` is the launcher with these flags. It
leaves the job when the process PID ends, and writes into FOLDER how it went.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from elastic_etcd import launch
from elastic_etcd.api.run_writer import RunWriter
from elastic_etcd.errors import ElasticEtcdError
from elastic_etcd.system.child_process import signal_at_parents_death

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Be the agent until the job, or the program, has ended; gives the exit code."""
    program, folder = int(argv[0]), Path(argv[1])
    launch.open_standard_streams()
    run_writer = RunWriter()
    record = run_writer.record
    # Until the agent handles it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        signal_at_parents_death(signal.SIGTERM)  # of the thread that waits for this process
        if os.getppid() != program:
            sys.exit(128 + signal.SIGTERM)
        record.exit_code = launch.run(argv[2:], _environment(), follow=run_writer.follow)
        if not record.outcome:
            record.outcome = "left" if record.exit_code else "succeeded"
            record.reason = "this node has left" if record.exit_code else "it had succeeded before"
    except ElasticEtcdError as error:
        record.exit_code, record.error = error.exit_code, str(error)
    except BaseException as error:
        record.exit_code, record.error = 1, f"the agent has ended: {type(error).__name__}: {error}"
        raise
    finally:
        with suppress(OSError):  # the program has ended, or will see that there is no record
            (folder / "run_record.json").write_bytes(msgspec.json.encode(record))
        if os.getppid() != program:  # nobody else would
            shutil.rmtree(folder, ignore_errors=True)
    return record.exit_code


def _environment() -> dict[str, str]:
    """Without what is for a command line, or for scripts: LaunchConfig says it, and this Python."""
    ours = os.environ.items()
    return {k: v for k, v in ours if not k.startswith("PET_") and k != "PYTHON_EXEC"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
