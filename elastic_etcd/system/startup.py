"""The first things of a process: standard streams, signals, the duties of a container's init.

The kernel gives a container's first process every process whose parent has ended, and nobody but it
can reap them; and it gets no signal for which it has no handler. Reaping all that ends would take
the exit codes of an agent's own children from it. So the first process stays behind for this, and
the agent is its child.
"""

from __future__ import annotations

import os
import signal
import sys

_SI_USER = 0  # si_code of a signal that a process has sent is this or below


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


def reset_signals() -> None:
    """Take back what a starter has left: a SIGCHLD that is ignored, signals that are blocked.

    With SIGCHLD ignored (`trap '' CHLD`, some daemons) the kernel forgets how children end. SIGHUP
    and SIGINT stay ignored if they are, as nohup and a shell's `&` want it. Main thread only.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())


def be_init() -> None:
    """In the first process of a container: fork, and return in the child only.

    The first process hands signals on, and ends as the child does: with its exit code, or 128 + the
    signal. Call it while there is one thread and nothing is open.
    """
    if os.getpid() != 1:
        return
    sys.stdout.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    child = os.fork()
    if not child:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    while True:
        got = signal.sigwaitinfo(signal.valid_signals())
        if got.si_signo == signal.SIGCHLD:
            _reap(child)
        elif got.si_code <= _SI_USER or got.si_signo == signal.SIGHUP:
            # The child has got what the terminal sends (Ctrl-C), too.
            os.kill(child, got.si_signo)


def _reap(child: int) -> None:
    """Reap all that has ended; end with the child."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
