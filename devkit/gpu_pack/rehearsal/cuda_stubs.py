"""Shared libraries in the place of CUDA's, so that a CUDA build of torch imports where there is no GPU.

    python cuda_stubs.py OUT TORCH_LIB_DIR [LIBRARY]...     put OUT on LD_LIBRARY_PATH

Every function of them returns 100, cudaErrorNoDevice.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

_SYSTEM: Final = re.compile(
    r"^(libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+|libgomp|libutil|ld-linux.*)\.so"
)
_PREFIXES: Final = {
    "libcuda": "cu",
    "libcufile": "cuFile",
    "libnvshmem_host": "nvshmem",
    **{
        f"lib{name}": name
        for name in ("nccl", "cupti", "cusparseLt", "curand", "cufft", "cusolver", "nvrtc", "cudnn")
    },
}
"""Library -> the first letters of its functions, where these have no version that names the library."""
_RUNTIME: Final = "__cuda"
"""First letters of the functions that compiled kernels call in libcudart."""


class Wanted:
    """Symbols that libraries need of others, and the libraries that they need."""

    def __init__(self, libraries: Sequence[Path]) -> None:
        self.needed: set[str] = set()
        self.versions: defaultdict[str, set[str]] = defaultdict(set)
        undefined: set[str] = set()
        defined: set[str] = set()
        for library in libraries:
            self.needed |= set(re.findall(r"NEEDED.*\[(.*)\]", _run("readelf", "-d", str(library))))
            for block in re.split(r"File: ", _run("readelf", "-VW", str(library)))[1:]:
                self.versions[block.split()[0]] |= set(re.findall(r"Name: (\S+)\s+Flags", block))
            undefined |= set(_symbols(library, "--undefined-only"))
            defined |= {symbol.split("@")[0] for symbol in _symbols(library, "--defined-only")}
        self.needed -= {library.name for library in libraries}
        versioned = [symbol.partition("@") for symbol in undefined]
        self.by_version: defaultdict[str, set[str]] = defaultdict(set)
        for name, _, version in versioned:
            self.by_version[version].add(name)
        given = {name for versions in self.versions.values() for v in versions for name in self.by_version[v]}
        self.plain = self.by_version.pop("", set()) - defined - given

    def take(self, prefix: str) -> set[str]:
        """Symbols without a version that begin so. They are taken once."""
        taken = {name for name in self.plain if name.startswith(prefix)}
        self.plain -= taken
        return taken


def main() -> int:
    """Write the libraries."""
    out, torch, *more = map(Path, sys.argv[1:])
    wanted = Wanted([*sorted(torch.glob("lib*.so*")), *more])
    out.mkdir(parents=True, exist_ok=True)
    stubs = (name for name in wanted.needed if not _SYSTEM.match(name))
    # libcuda's prefix is that of others, too.
    for name in sorted(stubs, key=lambda name: (name.startswith("libcuda."), name)):
        of = {version: wanted.by_version[version] for version in sorted(wanted.versions[name])}
        loose = wanted.take(prefix) if (prefix := _PREFIXES.get(name.split(".so")[0])) else set()
        if name.startswith("libcudart"):
            loose |= wanted.take(_RUNTIME)
        _write(out / name, of, loose)
    return 0


def _write(library: Path, of: dict[str, set[str]], loose: set[str]) -> None:
    names = sorted(loose.union(*of.values()))
    with tempfile.TemporaryDirectory() as name:
        source, script = Path(name) / "stub.c", Path(name) / "versions"
        source.write_text(
            "".join(f"int {function}() {{ return 100; }}\n" for function in names) or "int none;\n"
        )
        command = [
            "gcc",
            "-shared",
            "-fPIC",
            "-w",
            f"-Wl,-soname,{library.name}",
            "-o",
            str(library),
            str(source),
        ]
        if any(of.values()):
            blocks = (
                f"{v} {{ global: {' '.join(f'{s};' for s in sorted(symbols)) or '*;'} }};\n"
                for v, symbols in of.items()
            )
            script.write_text("".join(blocks))
            command.append(f"-Wl,--version-script={script}")
        subprocess.run(command, check=True)


def _symbols(library: Path, which: str) -> Iterator[str]:
    for line in _run("nm", "-D", which, str(library)).splitlines():
        yield line.split()[-1]


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())
