"""`refused.py ERRNO CALL,... COMMAND...`: these system calls fail with ERRNO in COMMAND (seccomp).

As an older kernel (ENOSYS) or a container's profile (EPERM) has it. For x86-64 and arm64.
"""

import ctypes
import os
import struct
import sys

NUMBERS = {
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "memfd_create": (319, 279),
}
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
FAIL, ALLOW = 0x00050000, 0x7FFF0000
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38
FILTER = 2


def main(code: int, names: list[str], command: list[str]) -> None:
    arm = os.uname().machine == "aarch64"
    program = [struct.pack("HBBI", LOAD, 0, 0, 0)]
    for name in names:
        program.append(struct.pack("HBBI", JUMP_IF_EQUAL, 0, 1, NUMBERS[name][arm]))
        program.append(struct.pack("HBBI", RETURN, 0, 0, FAIL | code))
    program.append(struct.pack("HBBI", RETURN, 0, 0, ALLOW))
    rules = ctypes.create_string_buffer(b"".join(program))
    given = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(program), ctypes.addressof(rules))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    for asked in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, FILTER, given)):
        if libc.prctl(*asked) != 0:
            sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:])
