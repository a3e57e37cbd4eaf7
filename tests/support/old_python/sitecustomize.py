# ruff: noqa: INP001 - a folder of PYTHONPATH, not a package
"""A Python as conda, miniforge and older versions of uv give it: built with headers of 2012.

In PYTHONPATH this folder takes these calls out of any Python (python-trio/trio#2855,
astral-sh/uv#9374, astral-sh/uv#15081).
"""

import fcntl
import os
import signal

for module, names in (
    (os, ["pidfd_open", "memfd_create", "P_PIDFD", *(n for n in dir(os) if n.startswith("MFD_"))]),
    (signal, ["pidfd_send_signal"]),
    (fcntl, [n for n in dir(fcntl) if "SEAL" in n]),
):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
