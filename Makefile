# Two commands for a newcomer: `make demo` and `make test`. Everything is installed into .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test test-long bench lint fmt docs clean

$(STAMP): pyproject.toml requirements.lock
	@echo "== creating $(VENV) and installing the project (once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip install --quiet -c requirements.lock -e '.[dev]'
	@touch $@

demo: $(STAMP)
	@echo "== tops demo"
	@$(BIN)/tops demo

test: $(STAMP)
	@echo "== lint and types"
	@$(MAKE) --no-print-directory lint
	@echo "== tests"
	@$(BIN)/python -m pytest -q

test-long: $(STAMP)
	@$(BIN)/python -m pytest -q -m long --timeout 7200

bench: $(STAMP)
	@$(BIN)/tops bench core

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

fmt: $(STAMP)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

docs:
	@echo "docs are Markdown under docs/; start at docs/architecture.md"

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build *.egg-info
