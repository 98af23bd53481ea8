# Two commands matter: `make quickstart` and `make test`. Both make the environment if it is missing.
PYTHON ?= python3.11
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
STAMP := $(VENV)/.installed
# DeepSpeed's extension build looks for ninja on PATH; the environment brings it.
export PATH := $(BIN):$(PATH)
RUNS ?= $(CURDIR)/runs
# Expanded once: the job and the last line must name the same folder.
ifndef NAME
NAME := quickstart-$(shell date +%Y%m%d-%H%M%S)
endif
SPACE ?= pqt:quickstart
ARGS ?=

.PHONY: help env quickstart sweep test test-fast test-gpu style quality clean

help:
	@echo "make quickstart   environment, local Ray head, a real sweep by 'ray job submit', report"
	@echo "make test         environment if missing, the whole suite"
	@echo "make sweep SPACE=pqt:banking77_10_intents_2cpu NAME=banking ARGS='space.rank=[4]'"
	@echo "make style | quality | test-fast | test-gpu | env | clean"

env: $(STAMP)

# setuptools first: DeepSpeed is source only, and a new environment's setuptools is too old for pyproject.toml's licence field.
$(STAMP): requirements/cpu.txt requirements/dev.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c requirements/cpu.txt setuptools
	$(BIN)/pip install -q --disable-pip-version-check --no-deps --no-build-isolation -r requirements/cpu.txt -r requirements/dev.txt
	$(BIN)/pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(BIN)/python -c "import torch; assert torch.version.cuda is None, 'the cpu profile needs a CPU build of torch'"
	touch $(STAMP)

# A head of its own on free loopback ports with two logical CPUs, for which the quickstart is sized; it is gone when the job has ended.
sweep: $(STAMP)
	@$(BIN)/prism-ray package . --limit-mib 20
	@$(BIN)/prism-ray local -- $(BIN)/ray job submit --runtime-env cluster/runtime-env.sweep.yaml --working-dir . -- \
		python jobs/sweep_pqt.py --space $(SPACE) name=$(NAME) storage=$(RUNS) $(ARGS)

quickstart: sweep
	@echo "report: $(RUNS)/$(NAME)/report.html"

# Unit tests share the cores; Ray tests start clusters of their own and want the machine for themselves. Both run, whatever the first says.
test: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 tests/unit tests/numerics tests/kernels; first=$$?; \
	$(BIN)/python -m pytest -q tests/ray tests/e2e tests/gpu && exit $$first

test-fast: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 tests/unit tests/numerics tests/kernels

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -q tests/gpu

style: $(STAMP)
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

quality: $(STAMP)
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info
