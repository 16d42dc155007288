"""A prefix for commands, which forbids them flock as a file system without a lock manager does: it gives ENOLCK.

    host.prefix = [sys.executable, "-I", without_flock.__file__]

A seccomp filter does it, so that everything that the command starts is under it, too.
"""

import ctypes
import errno
import os
import platform
import struct
import sys

# The system call's number (asm/unistd_64.h, asm-generic/unistd.h).
_FLOCK = {"x86_64": 73, "aarch64": 32}
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 22, 38, 2
# linux/bpf_common.h and linux/seccomp.h.
_LOAD_WORD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


def _become(command: list[str]) -> None:
    steps = (
        (_LOAD_WORD, 0, 0, 0),  # seccomp_data.nr
        (_JUMP_EQUAL, 0, 1, _FLOCK[platform.machine()]),
        (_RETURN, 0, 0, _ERRNO | errno.ENOLCK),
        (_RETURN, 0, 0, _ALLOW),
    )
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, program, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    os.execvp(command[0], command)


if __name__ == "__main__":
    _become(sys.argv[1:])
