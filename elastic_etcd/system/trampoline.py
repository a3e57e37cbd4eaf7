"""Runs a command that dies with the process that asked for it, also when that one is SIGKILLed.

`python -I -S trampoline.py PPID [NOFILE] -- COMMAND ...` asks the kernel for SIGKILL at the death
of the parent, to be exact of the thread that started it, and becomes COMMAND, which may open NOFILE
descriptors. A preexec_fn would run Python between fork and exec. Standard library only, and little
of it: every worker start waits for this.
"""

import ctypes
import os
import resource
import sys

PR_SET_PDEATHSIG = 1
SIGKILL, SIGUSR2, SIGPIPE, SIGXFSZ = 9, 12, 13, 25  # the signal module costs 5 ms to import
SIG_IGN = ctypes.c_void_p(1)


def main(argv: list[str]) -> int:
    """Become what follows "--"; the exit status is a shell's (126, 127) when that cannot be."""
    given, command = argv[1 : argv.index("--")], argv[argv.index("--") + 1 :]
    parent, *limit = map(int, given)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, SIGKILL) != 0:
        sys.stderr.write(f"elastic_etcd: prctl: {os.strerror(ctypes.get_errno())}\n")
        return 126
    if os.getppid() != parent:  # it died before prctl, so no signal will come
        return 1
    for number in (SIGPIPE, SIGXFSZ):  # Python ignores them, and exec would pass that on
        libc.signal(number, None)  # None: SIG_DFL
    libc.signal(SIGUSR2, SIG_IGN)  # a scheduler's word to drain, which may reach all of a node
    for soft in limit:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if cpus := os.environ.get("ELASTIC_ETCD_CPUS"):  # a worker's, see --numa-binding
        os.sched_setaffinity(0, map(int, cpus.split(",")))
    try:
        os.execvp(command[0], command)  # noqa: S606  (the user's command, as it stands)
    except OSError as error:
        sys.stderr.write(f"elastic_etcd: cannot run {command[0]}: {error.strerror}\n")
        return 127 if isinstance(error, FileNotFoundError) else 126


if __name__ == "__main__":
    sys.exit(main(sys.argv))
