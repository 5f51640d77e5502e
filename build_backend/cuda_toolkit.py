# SPDX-License-Identifier: BSD-3-Clause
"""Whether to build the CUDA kernels, with which toolkit, for which GPUs. Asks no GPU.

    TFG_CUDA=auto (default)   built where torch is a CUDA build and a toolkit of its major version is found; else left out, and said why
    TFG_CUDA=1                an error in one line where that is not so
    TFG_CUDA=0                left out

A toolkit is a folder with include/cuda_runtime.h and bin/nvcc. Where nvcc on the path is only a script that calls the real one, the
folder above it has neither headers nor libraries, and torch's own guess is wrong: so each candidate is looked into.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

USUAL_HOME = Path("/usr/local/cuda")
NEWEST_ARCHITECTURE_SINCE = (12, 8)  # sm_120


def candidates(environment, nvcc):
    """Where a toolkit may be, best first. nvcc: its path, or None."""
    named = [environment[name] for name in ("CUDA_HOME", "CUDA_PATH") if environment.get(name)]
    above = [Path(nvcc).resolve().parent.parent, Path(nvcc).parent.parent] if nvcc else []
    return list(dict.fromkeys(Path(place) for place in [*named, *above, USUAL_HOME]))


def is_toolkit(home):
    return (home / "include" / "cuda_runtime.h").is_file() and (home / "bin" / "nvcc").is_file()


def version_of(home):
    """(13, 0) of the toolkit's nvcc."""
    said = subprocess.run([home / "bin" / "nvcc", "--version"], capture_output=True, text=True, timeout=60).stdout
    numbers = re.search(r"release (\d+)\.(\d+)", said)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def architectures(version):
    return "8.0;9.0;12.0+PTX" if version >= NEWEST_ARCHITECTURE_SINCE else "8.0;9.0+PTX"


def find(torch_cuda, environment, nvcc, version_of=version_of):
    """(home, version, ""), or (None, None, why not). torch_cuda: torch.version.cuda."""
    if not torch_cuda:
        return None, None, "this torch is not a CUDA build"
    places = candidates(environment, nvcc)
    home = next(filter(is_toolkit, places), None)
    if home is None:
        return None, None, f"no CUDA toolkit in {', '.join(map(str, places))}"
    version = version_of(home)
    if version[0] != int(torch_cuda.split(".")[0]):
        return None, None, f"the toolkit in {home} is CUDA {version[0]}.{version[1]}, torch's is {torch_cuda}"
    return home, version, ""


def choose(torch_cuda):
    """The toolkit's folder, or None: no kernels. Sets CUDA_HOME and TORCH_CUDA_ARCH_LIST for torch, before its cpp_extension is imported."""
    wish = os.environ.get("TFG_CUDA", "auto")
    if wish not in ("auto", "0", "1"):
        sys.exit(f"tfg: TFG_CUDA must be auto, 0 or 1, not {wish!r}")
    if wish == "0":
        return _say(None, "left out: TFG_CUDA=0")
    home, version, why_not = find(torch_cuda, os.environ, shutil.which("nvcc"))
    if home is None:
        if wish == "1":
            sys.exit(f"tfg: TFG_CUDA=1, but {why_not}")
        return _say(None, f"left out: {why_not}")
    os.environ["CUDA_HOME"] = str(home)
    chosen = os.environ.setdefault("TORCH_CUDA_ARCH_LIST", architectures(version))
    return _say(home, f"with the toolkit {version[0]}.{version[1]} in {home}, for {chosen}")


def _say(home, words):
    print(f"tfg: CUDA kernels {words}", file=sys.stderr)
    return home
