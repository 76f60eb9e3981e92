PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINTS := -c constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint format clean

help:
	@echo 'make demo    learn from data that is 90 % corrupt, and write a report  (ARGS="..." is passed on)'
	@echo 'make test    run the tests                                             (ARGS="-k name" is passed on)'
	@echo 'make lint    run ruff and mypy'
	@echo 'make format  let ruff format the code and sort the imports'
	@echo 'make clean   remove the virtual environment, builds and caches'
	@echo
	@echo 'Each sets up $(VENV) first where it has to. It is made with $(PYTHON); to choose another,'
	@echo 'make PYTHON=python3.12 VENV=.venv312 test'

demo: $(VENV)/.installed
	$(BIN)/nestedmaml demo $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy src

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --select I --fix
	$(BIN)/ruff format

# The build tools are installed by hand and isolation is off, so that constraints.txt pins them as well.
$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) install $(CONSTRAINTS) hatchling editables
	$(PIP) install $(CONSTRAINTS) --no-build-isolation --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install $(CONSTRAINTS) --no-build-isolation --editable '.[dev]'
	@touch $@

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo 'nestedmaml needs Python 3.11 or later, which "$(PYTHON)" is not: name one, as in make PYTHON=python3.12' >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

clean:
	rm -rf $(VENV) build dist .coverage htmlcov .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
