# `make` alone prints what there is. Everything runs in .venv, which the first target that needs it makes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# pip before 23.1, as in Debian 12, would build seqeval with setup.py, which fails.
export PIP_USE_PEP517 := 1
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

PYTHONS ?= 3.12 3.13
# Tests of a file share runs and models, which only one process should make. tests/conftest.py puts the longest first.
BY_FILE := --dist loadfile --no-loadscope-reorder
.DEFAULT_GOAL := help
.PHONY: help install demo course test versions conf faults matrix lint types bench docs gpu rehearse bundle clean

help:  ## Print this list.
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 18

$(VENV)/core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[hub,scores,trackers]'
	touch $@

$(VENV)/test: $(VENV)/core
	$(PIP) --editable '.[test]'
	touch $@

$(VENV)/bench: $(VENV)/core
	$(PIP) --editable '.[bench]'
	touch $@

$(VENV)/docs: $(VENV)/core
	$(PIP) --editable '.[docs]'
	touch $@

install: $(VENV)/test  ## Make .venv with lmtool and everything its tests need.

demo: $(VENV)/core  ## Pretrain and finetune a tiny BERT on text every machine has, at most 5 minutes.
	$(BIN)/lmtool demo

course: $(VENV)/test  ## Run docs/course.md, about 40 minutes on two slow cores, and write runs/course/index.html.
	$(BIN)/lmtool course

test: $(VENV)/test  ## Run the tests: offline, a few minutes on two cores.
	$(BIN)/python -m pytest -q -n 2 $(BY_FILE)

versions:  ## Run some two thousand tests with each of Python 3.12 and 3.13 that is installed.
	@for version in $(PYTHONS); do \
		if python$$version --version >/dev/null 2>&1; \
		then $(MAKE) VENV=.venv-$$version PYTHON=python$$version some || exit 1; \
		else echo "python$$version is not installed"; fi \
	done

some: $(VENV)/test
	$(BIN)/python -m pytest -q -n 2 $(BY_FILE) tests/cli tests/config tests/data tests/learners tests/nn tests/runs tests/system

faults: $(VENV)/test  ## Plant faults and see that nothing goes wrong silently, at most 20 minutes on two cores.
	$(BIN)/python scripts/faults.py

matrix: $(VENV)/test  ## Train every legal combination of family, tuning method and kind of task a few steps, 10 minutes.
	$(BIN)/python scripts/matrix.py

conf: $(VENV)/core  ## Write the fields of every base YAML from the configuration classes.
	$(BIN)/python scripts/conf.py

lint: $(VENV)/test  ## Check style, imports and spelling.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell lmtool conf scripts docs README.md

types: $(VENV)/test  ## Check types.
	$(BIN)/mypy

bench: $(VENV)/bench  ## Speed and memory compared with transformers, at most 35 minutes; `scripts/benchmark.py --help`.
	$(BIN)/python scripts/benchmark.py

docs: $(VENV)/docs  ## Write the site of these pages and of every key and YAML, searchable offline: build/docs/index.html.
	$(BIN)/python scripts/docs.py

gpu:  ## On a GPU, with PYTHON= and no installing: its tests and its speed compared with the transformers Trainer.
	$(PYTHON) scripts/gpu.py

rehearse: $(VENV)/test  ## Walk the CUDA path without a GPU: every family, method and command, or RUN='pretrain ...'.
ifdef RUN
	$(BIN)/python -m tests.rehearse $(RUN)
else
	$(BIN)/python -m pytest -q -n 2 -p tests.rehearse.plugin -m 'gpu or rehearse' \
		$$(grep -rl --include='test_*.py' 'mark\.gpu\|mark\.rehearse' tests)
endif

bundle: $(VENV)/core  ## The wheels of lmtool and all it needs but torch, for a machine without a network: PYTHON_VERSION=3.12.
	$(BIN)/python scripts/bundle.py --python-version '$(PYTHON_VERSION)'

clean:  ## Remove the environment, caches and build outputs; runs/ stays.
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
