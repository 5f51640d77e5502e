# SPDX-License-Identifier: BSD-3-Clause
"""The doors of the build: wrong torch versions are refused in one line, before anything heavy is touched."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def load_alone(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def guard():
    """tfg/_binary.py on its own: a fresh copy, whatever the state of the installed package."""
    return load_alone(ROOT / "tfg" / "_binary.py", "_tfg_binary_under_test")


@pytest.fixture
def faked(guard, monkeypatch):
    """faked(found, built): the guard in a process with these versions, in which loading the binary is an error."""

    class Torch:
        __version__ = None

    def set_up(found, built):
        Torch.__version__ = found
        monkeypatch.setitem(sys.modules, "torch", Torch)
        monkeypatch.setattr(guard, "built_torch", lambda: built)
        monkeypatch.setattr(guard.importlib, "import_module", lambda name: pytest.fail(f"{name} was imported"))
        return guard

    return set_up


def message(guard):
    with pytest.raises(ImportError) as caught:
        guard.load()
    text = str(caught.value)
    assert "\n" not in text and text.startswith("tfg: ")
    return text


@pytest.mark.parametrize(("found", "built"), [("2.13.0+cpu", "2.14.1"), ("2.14.1+cu130", "2.13.0+cpu")])
def test_binary_of_another_minor_is_refused_before_it_is_imported(faked, found, built):
    text = message(faked(found, built))
    assert f"built for torch {built}" in text and f"found torch {found}" in text
    assert "pip install --force-reinstall --no-deps ." in text


@pytest.mark.parametrize("found", ["2.12.1", "1.13.1+cu117", "2.9.0a0+git123"])
def test_torch_too_old_is_named_with_what_is_needed(faked, found):
    text = message(faked(found, "2.13.0"))
    assert f"found torch {found}, which is too old" in text and "torch>=2.13,<2.16" in text


@pytest.mark.parametrize("found", ["2.16.0", "2.100.0", "3.0.0.dev20270101"])
def test_torch_too_new_is_named_with_what_is_needed(faked, found):
    text = message(faked(found, "2.13.0"))
    assert f"found torch {found}, which is too new" in text and "torch>=2.13,<2.16" in text


def test_missing_binary_says_how_to_build(faked):
    text = message(faked("2.13.0", None))
    assert "no binary" in text and "pip install -e ." in text


def test_missing_torch_says_what_to_install(guard, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "pip install 'torch>=2.13,<2.16'" in message(guard)


def test_linker_words_become_one_line(faked, monkeypatch):
    guard = faked("2.13.1", "2.13.0")

    def broken(name):
        raise ImportError("/somewhere/_C.so: undefined symbol: _ZN3c10")

    monkeypatch.setattr(guard.importlib, "import_module", broken)
    text = message(guard)
    assert "undefined symbol" not in text and "reinstall" in text


def test_the_binarys_own_refusal_passes_unchanged(faked, monkeypatch):
    guard = faked("2.13.1", "2.13.0")

    def refuses(name):
        raise ImportError("tfg: the dispatch key Fake is taken")

    monkeypatch.setattr(guard.importlib, "import_module", refuses)
    assert message(guard) == "tfg: the dispatch key Fake is taken"


@pytest.mark.parametrize("found", ["2.13.0+cpu", "2.13.1", "2.15.9"])
def test_same_minor_is_accepted(guard, found):
    major, minor = guard.minor(found)
    assert guard.unsupported(found) is None and guard.mismatch(found, f"{major}.{minor}.0+cpu") is None


def test_guard_compares_numbers_not_text(guard):
    assert guard.minor("2.9.1") < guard.minor("2.13.0")
    with pytest.raises(ValueError, match="not a torch version: 'main'"):
        guard.minor("main")


def test_installed_binary_knows_its_torch(guard):
    import tfg._binary

    module = tfg._binary.load()
    assert guard.minor(module.BUILT_TORCH) == guard.minor(tfg._binary.built_torch())
    assert tfg._binary.built_torch() == module.BUILT_TORCH


def test_supported_range_is_the_same_everywhere(guard):
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"torch{guard.TORCH_WANTED}"' in project
    compat = (ROOT / "csrc" / "torch" / "compat.h").read_text(encoding="utf-8")
    low, high = re.search(r"TORCH_VERSION_MINOR < (\d+) \|\| TORCH_VERSION_MINOR > (\d+)", compat).groups()
    assert (guard.TORCH_MIN, guard.TORCH_BELOW) == ((2, int(low)), (2, int(high) + 1))


def run_setup(tmp_path, torch_version):
    """`setup.py --version` in a process whose first torch is a fake of that version (None: it has no torch)."""
    hide = tmp_path / "torch"
    hide.mkdir()
    if torch_version:
        (hide / "__init__.py").touch()
        (hide / "version.py").write_text(f"__version__ = '{torch_version}'\n", encoding="utf-8")
        path = f"sys.path.insert(0, {str(tmp_path)!r})"
    else:
        path = "import importlib.util as u; real = u.find_spec; u.find_spec = lambda n: None if n == 'torch' else real(n)"
    code = f"import runpy, sys; {path}; sys.argv = ['setup.py', '--version']; runpy.run_path('setup.py')"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("2.12.1+cpu", "found torch 2.12.1+cpu, which is too old: torch>=2.13,<2.16 is needed"),
        ("2.16.0", "found torch 2.16.0, which is too new: torch>=2.13,<2.16 is needed"),
        (None, "no torch installed beside"),
    ],
)
def test_build_ends_with_one_line(tmp_path, version, words):
    done = run_setup(tmp_path, version)
    assert done.returncode == 1 and words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
