"""What code in a decoding process can reach, once a hostile file has taken it over."""

from __future__ import annotations

import ctypes
import ctypes.util
import json
import logging
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from cornplug.encoder_service.formats import sealed_memory
from cornplug.encoder_service.preprocess import decoder_process, decoders, jail
from cornplug.encoder_service.preprocess.decoder_process import DecoderProcess

_TAKEN_OVER: Final = """
import contextlib, ctypes, json, os, signal, socket, subprocess, sys, threading
from PIL import Image, ImageFile
from cornplug.encoder_service.preprocess import decoder_main as process

secret, absent, inherited = sys.argv.pop(), sys.argv.pop(), socket.socket()
if absent == "Landlock":
    process.jail._restrict_files = lambda folders: False
elif absent == "seccomp":
    process.jail._filter_calls = lambda may_open: False

def read_inside_a_package():
    # Public code stays readable, so that an import in the middle of a decoding works.
    open(json.__file__).read()

def thread():
    worker = threading.Thread(target=lambda: None)
    worker.start()
    worker.join()

ATTEMPTS = {
    "read the secret": lambda: open(secret).read(),
    "list its folder": lambda: os.listdir(os.path.dirname(secret)),
    "write a file": lambda: open(secret + ".new", "w"),
    "remove it": lambda: os.remove(secret),
    "rename it": lambda: os.rename(secret, secret + ".old"),
    "chmod it": lambda: os.chmod(secret, 0o777),
    "link it": lambda: os.symlink(secret, secret + ".link"),
    "read the service's memory": lambda: open(f"/proc/{os.getppid()}/mem", "rb"),
    "read the service's environment": lambda: open(f"/proc/{os.getppid()}/environ", "rb"),
    "a tcp socket": lambda: socket.socket(socket.AF_INET),
    "a unix socket": lambda: socket.socket(socket.AF_UNIX),
    "a pair of sockets": socket.socketpair,
    "bind a socket it has": lambda: inherited.bind(("127.0.0.1", 0)),
    "connect a socket it has": lambda: inherited.connect(("127.0.0.1", 9)),
    "fork": lambda: os._exit(0) if os.fork() == 0 else os.wait(),
    "run a program": lambda: subprocess.run(["/bin/true"]),
    "become a program": lambda: os.execv("/bin/true", ["true"]),
    "signal the service": lambda: os.kill(os.getppid(), 0),
    "more memory": lambda: process.resource.setrlimit(process.resource.RLIMIT_AS, (-1, -1)),
    "another thread": thread,
    "package code": read_inside_a_package,
}

class Hostile(ImageFile.ImageFile):
    format = "HOSTILE"

    def _open(self):
        self._size, self._mode, self.tile = (1, 1), "RGB", []

    def load(self):
        done = []
        for name, attempt in ATTEMPTS.items():
            with contextlib.suppress(OSError, ValueError):
                attempt()
                done.append(name)
        raise ValueError(json.dumps(done))

# In place of the reader of an accepted format.
Image.preinit()
Image.register_open("BMP", Hostile, lambda prefix: prefix.startswith(b"HOSTILE"))
process.main()
"""


def reach(secret: Path, absent: str = "") -> list[str]:
    """Names of the attempts that succeed in the middle of decoding a file, on a kernel without a bar."""
    service, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    service.settimeout(60)
    with child:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _TAKEN_OVER, str(2 << 30), str(child.fileno()), absent, str(secret)],
            pass_fds=[child.fileno()],
        )
    with service:
        ready, _ = decoders.receive(service, decoders.DecoderReady)
        assert set(ready.bars) == set(jail.RESTRICTIONS) - {absent}
        job = decoders.ImageJob(max_pixels=100, decoding="vllm-0.33", limit_s=30.0)
        decoders.send(service, job, sealed_memory.create_memfd([b"HOSTILE"]))
        decoders.receive(service, decoders.FromDecoder)
        decoders.send(service, decoders.DecodeGo())
        failed, _ = decoders.receive(service, decoders.FromDecoder)
    process.wait(60)
    done: list[str] = json.loads(failed.message.partition("damaged: ")[2])
    return done


FILES: Final = {
    *("read the secret", "list its folder", "write a file", "remove it", "rename it", "link it"),
    *("read the service's memory", "read the service's environment"),
}


@pytest.fixture(autouse=True)
def kernel() -> None:
    """Skips where the kernel has not every bar: the service logs that."""
    landlock = ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    if landlock < 1 or "Seccomp:" not in Path("/proc/self/status").read_text():
        pytest.skip("this kernel has no Landlock, or no seccomp")


def test_decoder_taken_over_reaches_no_file_socket_or_process(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    assert reach(secret) == ["another thread", "package code"]
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_jail_of_a_kernel_without_one_bar_keeps_the_secret(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    # Without Landlock no file opens at all.
    assert reach(secret, absent="Landlock") == ["another thread"]
    assert not FILES & set(reach(secret, absent="seccomp"))


def test_decoder_process_reports_its_bars(caplog: pytest.LogCaptureFixture) -> None:
    process = DecoderProcess(max_bytes=2 << 30, on_killed=lambda why: None)
    decoder_process._log_restrictions.cache_clear()
    with caplog.at_level(logging.INFO):
        process.start()
    status = Path(f"/proc/{process.pid}/status").read_text()
    process.close()
    assert "NoNewPrivs:\t1" in status
    assert "Seccomp:\t2" in status
    assert "confined by no_new_privs, Landlock, seccomp" in caplog.text
    caplog.clear()
    decoder_process._log_restrictions(("no_new_privs",))
    assert "without Landlock, seccomp" in caplog.text


@pytest.mark.parametrize("machine", sorted(jail.ARCHITECTURES))
def test_jail_numbers_are_the_kernels(machine: str) -> None:
    column, architecture = jail.ARCHITECTURES[machine]
    name = ctypes.util.find_library("seccomp")
    if name is None:
        pytest.skip("no libseccomp, which has the kernels' tables")
    library = ctypes.CDLL(name)
    calls = {**jail.SYSCALLS, "openat": jail.OPENAT, "clone": jail.CLONE, "clone3": jail.CLONE3}
    for call, numbers in calls.items():
        found = library.seccomp_syscall_resolve_name_arch(ctypes.c_uint32(architecture), call.encode())
        assert found == numbers[column], call
