# Needs Python 3.10 or newer and make; everything else is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PACKAGING := pyproject.toml constraints.txt
# Two processes share the machine's cores, so each gets half of torch's threads.
PYTEST_WORKERS ?= 2
PYTEST_THREADS ?= 1

.PHONY: help train test test-gpu check readme clean

help:
	@echo "make train   install, then train a small language model (runs/quickstart)"
	@echo "make test    install, then run every test that needs no GPU"
	@echo "make test-gpu install, then run the tests that need a GPU"
	@echo "make check   install, then lint, check formatting and types"
	@echo "make readme  put the recorded measurements into README.md and docs/results.md"
	@echo "make clean   remove the environment, runs and caches"

train: $(VENV)/.installed
	$(BIN)/memopt fit --config configs/quickstart.yaml

test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=$(PYTEST_THREADS) $(BIN)/python -m pytest -m "not gpu" -n $(PYTEST_WORKERS) $(PYTEST_ARGS)

test-gpu: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

readme: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.readme

clean:
	rm -rf $(VENV) runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "$(PYTHON) is older than Python 3.10; name another one: make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The stamps keep make from installing again until the packaging files change.
$(VENV)/.installed: $(PACKAGING) | $(VENV)/bin/python
	$(INSTALL) -e ".[plot]"
	@touch $@

$(VENV)/.installed-dev: $(PACKAGING) | $(VENV)/bin/python
	$(INSTALL) -e ".[dev]"
	@touch $@ $(VENV)/.installed
