"""Does the duties of a container's first process, where the agent would be that process.

The kernel gives it every process whose parent has ended, and nobody but it can reap them; and it
gets no signal for which it has no handler. Reaping all that ends would take the exit codes of an
agent's own children from it. So the first process stays behind for this, and the agent is its
child.
"""

from __future__ import annotations

import os
import signal
import sys

_SI_USER = 0  # si_code of a signal that a process has sent is this or below


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
