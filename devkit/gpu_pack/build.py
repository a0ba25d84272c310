"""Build the archive of engines, cornplug and benchmarks for a bare, offline GPU machine.

    python -m devkit.gpu_pack.build [--without-sglang]

vLLM's wheel is built on torch's stable ABI, so its libraries load beside the machine's older torch. GPU code
for other chips is blanked (`fatbin.py`), and in FlashAttention 3 all but the kernels for bfloat16. Left out:
kernels for mixtures of experts, FlashAttention 2, FlashInfer, PyAV, and SGLang's compiled attention, which
`--attention-backend triton` does without.
"""

from __future__ import annotations

import argparse
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

import cornplug
from devkit.gpu_pack import fatbin

TREE: Final = Path(__file__).parents[2]
FOLDER: Final = TREE / ".gpu-pack"
"""Ignored by git. Carry it with the checkout."""
ARCHIVE: Final = FOLDER / "engines.tar.xz"
LIMIT_BYTES: Final = 64 << 20
"""Of the archive and the checkout together: they travel to the machine in one transfer."""
WHEELS: Final = TREE / ".cache" / "gpu-pack" / "wheels"

_HERE: Final = Path(__file__).parent
_PYTHON: Final = "3.12"
_CHIP: Final = 90
_ENGINES: Final = ("vllm", "sglang", "sglang-kernel")
_GLIBC: Final = (17, 24, 27, 28, 31, 34, 35, 39)
_NOT_BFLOAT16: Final = re.compile(rb"half_t|float_e4m3_t")
_VLLM_UNUSED: Final = (
    *(f"*.{suffix}" for suffix in ("h", "hpp", "cuh", "inl", "cu", "cpp")),
    "vllm/vllm-rs",
    *(f"vllm/_{name}_C*" for name in ("qutlass", "flash*", "deepselect", "moe")),
    *(f"vllm/third_party/{name}/*" for name in ("deep_gemm", "fmha_sm100", "tml_fa4")),
    *("vllm/vllm_flash_attn/_vllm_fa2_C*", "vllm/model_executor/layers/*/configs/*"),
)
_SGLANG_UNUSED: Final = (
    *("sglang/multimodal_gen/*", "sglang/test/*"),
    *(f"sglang/srt/rust_extensions/_{name}*" for name in ("bench", "server", "multimodal")),
    *("sglang/srt/layers/moe/moe_runner/triton_utils/configs/*", "sglang/srt/layers/quantization/configs/*"),
)
_SGLANG_KERNEL: Final = ("sgl_kernel/*.py", "sgl_kernel/sm90/*", "sglang_kernel-*.dist-info/*")
_SMALL_UNUSED: Final = (*("bin", "share", "mistral_common/data", "pycountry/locales"),)
_CHECKOUT: Final = (
    "cornplug",
    "devkit",
    "benchmarks",
    "dev",
    "script",
    "tests",
    "pyproject.toml",
    "README.md",
)
_CHECKOUT_UNUSED: Final = ("benchmarks/results/*", "benchmarks/traces/*", "tests/planner/*", "tests/replay/*")


def main() -> int:
    """Build the archive and print its size; 1 if it and the checkout are too large to travel."""
    parser = argparse.ArgumentParser(prog="gpu-pack", description=__doc__.partition("\n")[0])
    parser.add_argument("--without-sglang", action="store_true", help="leave SGLang out")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpu-pack-") as name:
        root = Path(name)
        assemble(root, sglang=not chosen.without_sglang)
        FOLDER.mkdir(exist_ok=True)
        shutil.copy(_HERE / "unpack.py", FOLDER)
        compress(root, ARCHIVE)
    archive, checkout = ARCHIVE.stat().st_size, checkout_bytes()
    print(f"gpu-pack: {ARCHIVE.relative_to(TREE)} {_mib(archive)}, checkout {_mib(checkout)}")
    if problem := size_problem(archive, checkout):
        print(f"gpu-pack: {problem}", file=sys.stderr)
        return 1
    return 0


def size_problem(archive: int, checkout: int) -> str | None:
    """Why files of these sizes in bytes cannot travel together, with a remedy; None if they can."""
    if archive + checkout <= LIMIT_BYTES:
        return None
    return (
        f"{_mib(archive + checkout)} together, and at most {_mib(LIMIT_BYTES)} can travel. "
        "Extend the lists of unused files in devkit/gpu_pack/build.py, or use --without-sglang."
    )


def assemble(root: Path, *, sglang: bool) -> None:
    """Lay everything the archive holds below `root`: `site`, `tree`, `bin` and `env.sh`."""
    site = root / "site"
    site.mkdir()
    pinned = dict(requirements())
    small = [f"{name}=={version}" for name, version in pinned.items() if name not in _ENGINES]
    _pip("install", "--no-compile", "--target", str(site), *small)
    for unused in _SMALL_UNUSED:
        _remove(site / unused)
    _vllm(site, _wheel("vllm", pinned["vllm"]))
    if sglang:
        _extract(_wheel("sglang", pinned["sglang"]), site, unused=_SGLANG_UNUSED)
        _sglang_kernel(site, _wheel("sglang-kernel", pinned["sglang-kernel"]))
    _checkout(root / "tree")
    _entry_points(site / f"cornplug-{cornplug.__version__}.dist-info")
    for file in (_HERE / "site").iterdir():
        shutil.copy(file, site)
    shutil.copy(_HERE / "env.sh", root)
    for name, module in (("vllm", "vllm.entrypoints.cli.main"), ("cornplug", "cornplug.cli")):
        _command(root / "bin" / name, module)


def compress(root: Path, archive: Path) -> None:
    """Write all files below `root` as a tar.xz, like beside like, so that it is small."""
    # Python's own xz reads the x86 filter, too: the machine needs no further program.
    filters: list[dict[str, Any]] = [
        {"id": lzma.FILTER_X86},
        {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 64 << 20},
    ]
    files = [path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    files.sort(key=lambda path: (path.suffix, path.name, path))
    draft = archive.with_suffix(".draft")
    with lzma.open(draft, "wb", filters=filters) as out, tarfile.open(fileobj=out, mode="w") as tar:
        for path in files:
            tar.add(path, str(path.relative_to(root)))
    draft.rename(archive)


def checkout_bytes() -> int:
    """Bytes of the checkout's files, tracked or new, that git does not ignore."""
    return sum((TREE / name).lstat().st_size for name in _files())


def _vllm(site: Path, wheel: Path) -> None:
    _extract(wheel, site, unused=_VLLM_UNUSED)
    attention = next((site / "vllm" / "vllm_flash_attn").glob("_vllm_fa3_C*.so"))
    for library in (*(site / "vllm").glob("_C_stable_libtorch*.so"), attention):
        drop = _NOT_BFLOAT16 if library == attention else None
        _say_pruned(library, fatbin.prune(library, _CHIP, drop=drop))


def _sglang_kernel(site: Path, wheel: Path) -> None:
    """Lay SGLang's small kernels. They were built for a newer torch, whose names sgl_abi_211.S adds."""
    _extract(wheel, site, wanted=_SGLANG_KERNEL)
    for library in (site / "sgl_kernel" / "sm90").glob("common_ops*.so"):
        _say_pruned(library, fatbin.prune(library, _CHIP))
    # Linked to empty libraries with the names of torch's, which are there by the time this one is loaded.
    with tempfile.TemporaryDirectory() as name:
        stubs = []
        for stub in ("libc10.so", "libtorch_cpu.so", "libc10_cuda.so"):
            path = Path(name) / stub
            _run(
                "gcc", "-shared", "-nostdlib", f"-Wl,-soname,{stub}", "-o", str(path), "-x", "c", "/dev/null"
            )
            stubs.append(str(path))
        shim = site / "sgl_kernel" / "libsgl_abi_211.so"
        _run(
            "gcc", "-shared", "-fPIC", "-nostdlib", "-Wl,--no-as-needed", "-o", str(shim),
            str(_HERE / "sgl_abi_211.S"), *stubs,
        )  # fmt: skip
    init = site / "sgl_kernel" / "__init__.py"
    load = (
        "import ctypes, pathlib, torch\n"
        f"ctypes.CDLL(str(pathlib.Path(__file__).with_name({shim.name!r})), mode=ctypes.RTLD_GLOBAL)\n"
    )
    init.write_text(load + init.read_text())


def _checkout(target: Path) -> None:
    for name in _files(*_CHECKOUT):
        if not _matches(name, _CHECKOUT_UNUSED):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(TREE / name, target / name)


def _entry_points(info: Path) -> None:
    """The metadata by which engines find cornplug's plugins."""
    project = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]
    info.mkdir()
    about = ("Metadata-Version: 2.1", "Name: cornplug", f"Version: {cornplug.__version__}", "")
    (info / "METADATA").write_text("\n".join(about))
    lines = []
    for group, of in {"console_scripts": project["scripts"], **project["entry-points"]}.items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in of.items())]
    (info / "entry_points.txt").write_text("\n".join([*lines, ""]))


def _command(path: Path, module: str) -> None:
    # With a guard: processes that an engine spawns import this file.
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        f"#!/usr/bin/env python3\nimport sys\n\nfrom {module} import main\n\n"
        'if __name__ == "__main__":\n    sys.exit(main())\n'
    )
    path.chmod(0o755)


def requirements() -> Iterator[tuple[str, str]]:
    """Names and versions of the wheels."""
    for line in (_HERE / "requirements.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            yield name, version


def _wheel(name: str, version: str) -> Path:
    """A wheel of `WHEELS`, downloaded once."""
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not any(WHEELS.glob(pattern)):
        WHEELS.mkdir(parents=True, exist_ok=True)
        _pip("download", "--dest", str(WHEELS), f"{name}=={version}")
    return next(WHEELS.glob(pattern))


def _extract(wheel: Path, site: Path, *, wanted: Sequence[str] = ("*",), unused: Sequence[str] = ()) -> None:
    with zipfile.ZipFile(wheel) as source:
        for name in source.namelist():
            if _matches(name, wanted) and not _matches(name, unused):
                source.extract(name, site)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _pip(command: str, *arguments: str) -> None:
    """pip for the GPU machine, whatever this one is."""
    tags = [f"manylinux_2_{minor}_x86_64" for minor in _GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
    _run(
        sys.executable, "-m", "pip", command, "-q", "--no-deps", "--only-binary=:all:",
        "--python-version", _PYTHON, "--implementation", "cp",
        *(flag for tag in tags for flag in ("--platform", tag)), *arguments,
    )  # fmt: skip


def _files(*below: str) -> Iterator[str]:
    """The checkout's files, tracked or new, that git does not ignore."""
    command = [
        "git",
        "-C",
        str(TREE),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
        "--",
        *below,
    ]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (TREE / name).is_file():
            yield name


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _say_pruned(library: Path, pruned: fatbin.Pruned) -> None:
    print(f"gpu-pack: {library.name}: kept {_mib(pruned.kept)} of GPU code, blanked {_mib(pruned.blanked)}")


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


if __name__ == "__main__":
    raise SystemExit(main())
