# make tune    tune a real workload on what this machine has
# make test    lint, type check, import contracts and every test that this machine can run
# Both make .venv first; nothing else has to be done on a fresh machine.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
GPU := $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU' && echo yes)

ifeq ($(GPU),yes)
EXTRAS := gpu,test,dev
CONSTRAINTS :=
PARALLEL :=
WORKLOADS ?= examples/h200.toml
TRIALS ?= 32
LOOKUP ?= --pattern 'sliding_window(1024)' --batch 2 --heads 16 --seqlen 8192 --head-dim 128 --dtype bfloat16
else
EXTRAS := compile,test,dev
CONSTRAINTS := constraints-cpu.txt
# most tests wait for processes; a GPU measures for one test at a time
PARALLEL := -n 3 --dist loadfile
WORKLOADS ?= examples/quick_cpu.toml
TRIALS ?= 10
LOOKUP ?= --pattern 'sliding_window(256)' --batch 1 --heads 8 --seqlen 2048 --head-dim 64 --dtype float32
endif

.PHONY: help tune test lint clean

help:
	@echo 'make tune    tune $(WORKLOADS) here and look one winner up (WORKLOADS=file LOOKUP="options" to choose)'
	@echo 'make test    lint, type check, import contracts, then every test that this machine can run'
	@echo 'make lint    the same without the tests'
	@echo 'make clean   remove $(VENV) and the caches'

tune: $(STAMP)
	@[ '$(GPU)' = yes ] || command -v "$${CXX:-g++}" >/dev/null || { \
	    echo 'No C++ compiler: FlexAttention needs one to run on a CPU. Install it with: apt-get install g++' >&2; exit 1; }
	$(BIN)/flashtune tune $(WORKLOADS) --trials $(TRIALS)
	$(BIN)/flashtune lookup $(LOOKUP)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest $(PARALLEL)

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A torch that already sees the GPU fits its driver: the environment then uses it instead of fetching another.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo '$(PYTHON) is older than 3.11; name a newer one: make PYTHON=python3.12' >&2; exit 1; }
	@site=; if [ '$(GPU)' = yes ] && $(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; \
	then site=--system-site-packages; fi; \
	echo "==> making $(VENV) with $$($(PYTHON) --version) $$site"; \
	$(PYTHON) -m venv $$site $(VENV) || { rm -rf $(VENV); \
	    echo 'Could not make $(VENV); on Debian and Ubuntu: apt-get install python3-venv' >&2; exit 1; }

$(STAMP): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo '==> installing flashtune[$(EXTRAS)] into $(VENV); the first time this takes some minutes'
	@$(BIN)/python -m pip install --progress-bar off $(addprefix -c ,$(CONSTRAINTS)) -e '.[$(EXTRAS)]' | sed -u -n \
	    -e 's/^ *Downloading \(.* [0-9.]* [MG]B)\).*/    downloading \1/p' -e 's/^Installing collected packages.*/    unpacking/p'
	@touch $@
