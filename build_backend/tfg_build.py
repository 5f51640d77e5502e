# SPDX-License-Identifier: BSD-3-Clause
"""Builds tfg against the torch that is already installed, and never fetches another.

A binary serves one torch minor only. The usual way, naming torch as a build requirement, lets pip build in an
environment of its own against a torch it has just downloaded: gigabytes, and the wrong one. So nothing is asked for
here. pip hides the installed packages from an isolated build, but the interpreter is still the user's: the folders
where its torch lies are put at the end of `sys.path`, behind what the build brought along.

This is setuptools' PEP 517 backend with that one step before every hook; setup.py takes the step too.
"""

import importlib.util
import re
import site
import sys
import sysconfig
from pathlib import Path

from setuptools import build_meta

ROOT = Path(__file__).resolve().parent.parent


def guard():
    """tfg/_binary.py as a module, without importing the package: it knows which torch is supported."""
    spec = importlib.util.spec_from_file_location("_tfg_binary", ROOT / "tfg" / "_binary.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def site_folders():
    """Where this interpreter's packages lie, also when an isolated build has taken them off `sys.path`."""
    folders = [sysconfig.get_path("platlib"), sysconfig.get_path("purelib"), *site.getsitepackages()]
    if sys.prefix == sys.base_prefix:
        folders.append(site.getusersitepackages())
    return list(dict.fromkeys(folders))


def require_torch():
    """Makes the installed torch importable and returns its version, or ends with one line that says what to do."""
    if importlib.util.find_spec("torch") is None:
        sys.path += [folder for folder in site_folders() if (Path(folder) / "torch" / "version.py").is_file()][:1]
    importlib.invalidate_caches()
    spec = importlib.util.find_spec("torch")
    wanted = guard().TORCH_WANTED
    if spec is None or spec.origin is None:
        sys.exit(
            f"tfg: no torch installed beside {sys.executable}: install it first (pip install 'torch{wanted}'), "
            "or build with --no-build-isolation where it is"
        )
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    found = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE)[1]
    complaint = guard().unsupported(found)
    if complaint:
        sys.exit(f"{complaint} (found in {Path(spec.origin).parent})")
    return found


def _requires(config_settings=None):
    require_torch()
    return ["ninja"]


def _with_torch(hook):
    def run(*args, **kwargs):
        require_torch()
        return hook(*args, **kwargs)

    return run


get_requires_for_build_wheel = get_requires_for_build_editable = get_requires_for_build_sdist = _requires
prepare_metadata_for_build_wheel = _with_torch(build_meta.prepare_metadata_for_build_wheel)
prepare_metadata_for_build_editable = _with_torch(build_meta.prepare_metadata_for_build_editable)
build_wheel = _with_torch(build_meta.build_wheel)
build_editable = _with_torch(build_meta.build_editable)
build_sdist = _with_torch(build_meta.build_sdist)
