# SPDX-License-Identifier: BSD-3-Clause
"""The compiled half of tfg: a C11 library (core, cpu) and the C++20 extension tfg._C (torch) that links it.

Ninja would hand a .c file to the C++ compiler, so C is never a source of the extension. Everything else is in
pyproject.toml. TFG_DEBUG=1 builds with the asserts and debug symbols; MAX_JOBS limits the compilers side by side; TFG_CUDA=auto|0|1:
see build_backend/cuda_toolkit.py.
"""

import os
import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "build_backend"))

import cuda_toolkit  # noqa: E402
from tfg_build import require_torch  # noqa: E402

TORCH = require_torch()

import torch  # noqa: E402

CUDA_HOME = cuda_toolkit.choose(torch.version.cuda)

from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension  # noqa: E402

CSRC = ROOT / "csrc"
CORE_SOURCES = [
    f"csrc/core/{name}.c"
    for name in ("status", "tape", "closure", "keep", "ledger", "putback", "cut", "chain", "plan", "interval", "clip", "staging")
]
CPU_SOURCES = [f"csrc/cpu/{name}.c" for name in ("fingerprint", "clip_loops", "digest_loops", "bits_loops", "staging_loops")]
TORCH_SOURCES = [
    f"csrc/torch/{name}.cpp"
    for name in (
        "module",
        "recorder",
        "held_tape",
        "keeping",
        "device_ledger",
        "fork",
        "costs",
        "prices",
        "handles",
        "replay",
        "rules",
        "rng",
        "ambient",
        "watch",
        "proof",
        "geometry",
        "cpu_allocator",
        "make_up",
        "peak",
        "policy",
        "rerun",
        "rerun_ambient",
        "rerun_call",
        "rerun_frame",
        "rerun_reentrant",
        "stats",
        "clipping",
    )
]
CUDA_SOURCES = [f"csrc/cuda/{name}.cu" for name in ("clip_kernels", "digest_kernels", "bits_kernels", "staging_kernels")]
HEADERS = sorted(str(path.relative_to(ROOT)) for path in CSRC.rglob("*.h"))

DEBUG = ["-g", "-DTFG_DEBUG=1"] if os.environ.get("TFG_DEBUG") == "1" else ["-g0"]
FLAGS = ["-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", *DEBUG]
CXX_FLAGS = ["-std=c++20", *FLAGS, "-Wno-unused-parameter", "-Wno-missing-field-initializers"]
# at::parallel_for is a template: without the flag it runs on one thread. Not for the linker: torch brings the library.
CXX_FLAGS += ["-fopenmp"] if sys.platform.startswith("linux") else []


def use_packaged_ninja():
    """Puts the ninja that pip installed on the path; without ninja the sources compile one after another."""
    try:
        import ninja
    except ImportError:
        return
    os.environ["PATH"] = os.pathsep.join([ninja.BIN_DIR, os.environ.get("PATH", "")])


class BuildExt(BuildExtension):
    """torch's BuildExtension, with the C library built first and the torch version left beside the binary."""

    def finalize_options(self):
        super().finalize_options()
        # Ninja knows what to compile; linking always, or a change in the C library alone would be missed.
        self.force = True
        # Editable builds would otherwise start from an empty folder every time.
        self.build_temp = str(ROOT / "build" / f"objects-{sys.implementation.cache_tag}")

    def run(self):
        self.run_command("build_clib")
        super().run()
        folders = [Path(self.build_lib) / "tfg"] + ([ROOT / "tfg"] if self.inplace else [])
        for folder in folders:
            (folder / "_built.py").write_text(f'# Written by setup.py.\nTORCH = "{TORCH}"\n', encoding="utf-8")


core = {
    "sources": CORE_SOURCES + CPU_SOURCES,
    "include_dirs": [str(CSRC)],
    "cflags": ["-std=c11", "-ffp-contract=off", *FLAGS],  # sums are to have the same bits everywhere
    "obj_deps": {"": HEADERS},
}
# Sums are to have the CPU's bits: no contraction. torch adds the architectures.
NVCC_FLAGS = ["-std=c++20", "-O3", "-fmad=false", "-lineinfo", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wextra"]
binary = (CUDAExtension if CUDA_HOME else CppExtension)(
    "tfg._C",
    TORCH_SOURCES + (CUDA_SOURCES if CUDA_HOME else []),
    include_dirs=[str(CSRC)],
    define_macros=[("TFG_BUILT_TORCH", f'"{TORCH}"')] + ([("TFG_WITH_CUDA", None)] if CUDA_HOME else []),
    extra_compile_args={"cxx": CXX_FLAGS, "nvcc": NVCC_FLAGS},
    depends=HEADERS + CORE_SOURCES + CPU_SOURCES + CUDA_SOURCES,
)

use_packaged_ninja()
setup(libraries=[("tfg_core", core)], ext_modules=[binary], cmdclass={"build_ext": BuildExt})
