"""Opens the standard streams that a shell (`>&-`) or a daemon has closed."""

import os
import sys


def open_standard_streams() -> None:
    """Open /dev/null as 0, 1 or 2 where that is closed, and Python's own stream of it.

    Else the next file opened would get the number, and `print` to no stderr goes to stdout.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
