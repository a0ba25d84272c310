"""Kernel restrictions of a decoding process, in case a hostile file takes control of it.

- `no_new_privs`: the process gets no privileges from setuid programs.
- Landlock: the process can read only Python's library and the decoders' packages. Newer kernels also block
  TCP, signals to other processes, and abstract sockets.
- seccomp: the process can make only the system calls that decoding needs. It cannot open sockets, start
  processes or programs, or change files. If Landlock is not supported, it cannot open any file.

A blocked call fails with EPERM, so that a decoder can continue if it does not depend on the call.
Restrictions that the kernel does not support are skipped, and the service logs them.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Final

NO_NEW_PRIVS: Final = "no_new_privs"
LANDLOCK: Final = "Landlock"
SECCOMP: Final = "seccomp"
RESTRICTIONS: Final = (NO_NEW_PRIVS, LANDLOCK, SECCOMP)

SYSCALLS: Final = {
    # name: (x86-64, arm64)
    "brk": (12, 214),
    "clock_getres": (229, 114),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "close": (3, 57),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "fcntl": (72, 25),
    "fstat": (5, 80),
    "futex": (202, 98),
    "getcpu": (309, 168),
    "getdents64": (217, 61),
    "getpid": (39, 172),
    "getrandom": (318, 278),
    "getrusage": (98, 165),
    "gettid": (186, 178),
    "gettimeofday": (96, 169),
    "lseek": (8, 62),
    "madvise": (28, 233),
    "membarrier": (324, 283),
    "memfd_create": (319, 279),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "munmap": (11, 215),
    "nanosleep": (35, 101),
    "newfstatat": (262, 79),
    "ppoll": (271, 73),
    "pread64": (17, 67),
    "read": (0, 63),
    "readv": (19, 65),
    "recvmsg": (47, 212),
    "restart_syscall": (219, 128),
    "rseq": (334, 293),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sched_getaffinity": (204, 123),
    "sched_yield": (24, 124),
    "sendmsg": (46, 211),
    "set_robust_list": (273, 99),
    "setitimer": (38, 103),
    "sigaltstack": (131, 132),
    "statx": (332, 291),
    "sysinfo": (99, 179),
    "uname": (63, 160),
    "write": (1, 64),
    "writev": (20, 66),
}
"""System calls that decoding needs, with their numbers. None of these calls acts on another process, or opens
or changes a file by name."""
OPENAT: Final = (257, 56)
CLONE: Final = (56, 220)
CLONE3: Final = (435, 435)
"""System calls that `build_call_filter` handles separately, as (x86-64, arm64), like `OPENAT` and `CLONE`."""
ARCHITECTURES: Final = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of `SYSCALLS` and value of the kernel's AUDIT_ARCH, by machine."""

_PACKAGES: Final = ("PIL", "av", "cornplug", "msgspec", "numpy")

_EPERM: Final = 1
_ENOSYS: Final = 38
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_SET_SECCOMP: Final = 22
_SECCOMP_MODE_FILTER: Final = 2
_CLONE_THREAD: Final = 0x10000

_RET_KILL: Final = 0x80000000
_RET_ERRNO: Final = 0x00050000
_RET_ALLOW: Final = 0x7FFF0000
_LOAD: Final = 0x20
_IF_EQUAL: Final = 0x15
_IF_ANY_BIT: Final = 0x45
_RETURN: Final = 0x06
_NUMBER_OFFSET: Final = 0
_ARCHITECTURE_OFFSET: Final = 4
_ARGUMENT_OFFSET: Final = 16
"""Offset of the lower half of a call's first argument. Both architectures are little-endian."""

_LANDLOCK_CREATE: Final = 444
_LANDLOCK_ADD_RULE: Final = 445
_LANDLOCK_RESTRICT: Final = 446
_LANDLOCK_VERSION: Final = 1
_PATH_BENEATH: Final = 1
_READ_FILE: Final = 1 << 2
_READ_DIR: Final = 1 << 3

_libc = ctypes.CDLL(None, use_errno=True)


def confine() -> tuple[str, ...]:
    """Apply every restriction that the kernel supports, and return the names of the active restrictions.

    Call this in a process with a single thread, after importing all modules that the process needs.
    """
    found = [NO_NEW_PRIVS] if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 else []
    # Landlock and seccomp restrict only the calling thread.
    if found and len(os.listdir("/proc/self/task")) == 1:
        if _restrict_files(readable_folders()):
            found.append(LANDLOCK)
        if _filter_calls(may_open=LANDLOCK in found):
            found.append(SECCOMP)
    return tuple(found)


def readable_folders() -> list[Path]:
    """Return the folders with public code that decoding may import."""
    libraries = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    packages = {Path(path) for name in _PACKAGES for path in sys.modules[name].__path__}
    return sorted(libraries | packages)


def build_call_filter(column: int, architecture: int, *, may_open: bool) -> bytes:
    """Return the seccomp filter as a BPF program. `may_open` allows the process to open files."""
    allowed = sorted(numbers[column] for numbers in SYSCALLS.values())
    if may_open:
        allowed.append(OPENAT[column])
    program: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        (_IF_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _RET_KILL),
        (_LOAD, 0, 0, _NUMBER_OFFSET),
    ]
    for number in allowed:
        program += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _RET_ALLOW)]
    program += [
        # A filter cannot read clone3's arguments. If clone3 fails with ENOSYS, glibc calls clone instead.
        (_IF_EQUAL, 0, 1, CLONE3[column]),
        (_RETURN, 0, 0, _RET_ERRNO | _ENOSYS),
        (_IF_EQUAL, 0, 3, CLONE[column]),
        (_LOAD, 0, 0, _ARGUMENT_OFFSET),
        (_IF_ANY_BIT, 0, 1, _CLONE_THREAD),
        (_RETURN, 0, 0, _RET_ALLOW),
        (_RETURN, 0, 0, _RET_ERRNO | _EPERM),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in program)


def _restrict_files(folders: Sequence[Path]) -> bool:
    version = _libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(_LANDLOCK_VERSION))
    if version < 1:
        return False
    # Later versions of Landlock have additional access rights for files, TCP ports, signals and abstract
    # sockets.
    files = 13 + sum(version >= since for since in (2, 3, 5))
    rules = struct.pack("=QQQ", (1 << files) - 1, 0b11 if version >= 4 else 0, 0b11 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = _libc.syscall(_LANDLOCK_CREATE, rules, ctypes.c_size_t(size), ctypes.c_uint(0))
    if ruleset < 0:
        return False
    try:
        for folder in folders:
            descriptor = os.open(folder, os.O_PATH | os.O_CLOEXEC)
            try:
                beneath = struct.pack("=Qi", _READ_FILE | _READ_DIR, descriptor)
                added = _libc.syscall(_LANDLOCK_ADD_RULE, ruleset, _PATH_BENEATH, beneath, ctypes.c_uint(0))
            finally:
                os.close(descriptor)
            if added != 0:
                return False
        return bool(_libc.syscall(_LANDLOCK_RESTRICT, ruleset, ctypes.c_uint(0)) == 0)
    except OSError:
        return False
    finally:
        os.close(ruleset)


def _filter_calls(*, may_open: bool) -> bool:
    known = ARCHITECTURES.get(platform.machine())
    if known is None or struct.calcsize("P") != 8:
        return False
    steps = build_call_filter(*known, may_open=may_open)
    held = ctypes.create_string_buffer(steps, len(steps))
    program = struct.pack("@HP", len(steps) // 8, ctypes.addressof(held))
    return bool(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0) == 0)
