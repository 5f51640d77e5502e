# SPDX-License-Identifier: BSD-3-Clause
#
# Everything from a fresh clone: Python, a C++ compiler and make are enough.
#
#   make demo       trains a small transformer plain, with the stock checkpoint and with tfg, and compares
#   make test       C tests, then the Python tests
#   make bench      the benchmarks
#   make core-test  the C tests alone: neither torch nor Python
#   make lint, make format, make clean
#
# The first call creates .venv and installs torch and tfg there, in place; later calls reuse what is there and build
# only what changed. PYTHON=python3.12 picks the interpreter, VENV=path another environment (its torch is kept when it
# has one), TORCH=2.14.1 the torch to install, ARGS="..." goes to the command that runs. MAX_JOBS=1 for little memory.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= 2.13.0
ARGS ?=
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

PY := $(VENV)/bin/python
PIP := $(PY) -m pip
SOURCES := $(wildcard csrc/*/*.c csrc/*/*.cpp csrc/*/*.h csrc/*/*.cu)

.PHONY: demo test bench core-test lint format clean
.DELETE_ON_ERROR:

demo: $(VENV)/.built
	$(PY) -m tfg demo $(ARGS)

test: core-test $(VENV)/.built
	$(PY) -m pytest -m "not slow" $(ARGS)

bench: $(VENV)/.built
	$(PY) -m pytest benchmarks -s $(ARGS)

core-test:
	$(MAKE) -C tests/core test

lint: $(VENV)/.lint
	$(PY) -m ruff check .
	$(VENV)/bin/clang-format --dry-run -Werror $(wildcard csrc/*/*.c csrc/*/*.cpp csrc/*/*.h)

format: $(VENV)/.lint
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(wildcard csrc/*/*.c csrc/*/*.cpp csrc/*/*.h)

clean:
	$(MAKE) -C tests/core clean
	rm -rf build *.egg-info tfg/_built.py tfg/_C*.so $(VENV)/.built .pytest_cache .ruff_cache

$(PY):
	$(PYTHON) -m venv $(VENV)

# Without a GPU the CPU build is taken where PyTorch's own index can be reached; plain pip otherwise.
$(VENV)/.torch: | $(PY)
	$(PY) -c "import torch" 2>/dev/null \
	  || { nvidia-smi -L >/dev/null 2>&1 && $(PIP) install "torch==$(TORCH)"; } \
	  || $(PIP) install --retries 1 --timeout 15 "torch==$(TORCH)" --extra-index-url $(TORCH_CPU_INDEX) \
	  || $(PIP) install "torch==$(TORCH)"
	touch $@

$(VENV)/.packages: pyproject.toml $(VENV)/.torch
	$(PIP) install "setuptools>=77.0.3" ninja
	touch $@

$(VENV)/.built: setup.py build_backend/tfg_build.py $(VENV)/.packages $(SOURCES)
	$(PIP) install --no-build-isolation -e ".[demo,test,bench]"
	touch $@

$(VENV)/.lint: | $(PY)
	$(PIP) install ruff clang-format
	touch $@
