# Two commands for a newcomer: `make demo` and `make test`. Everything is installed into .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Tests and the demo start hundreds of processes: none should compile again what another has compiled.
unexport PYTHONDONTWRITEBYTECODE
# Workers must collect the same tests in the same order, also where an id shows a set.
PYTEST := PYTHONHASHSEED=0 $(BIN)/python -m pytest -q

.PHONY: demo test test-long bench lint fmt docs java chromium clean

$(STAMP): pyproject.toml requirements.lock
	@echo "== creating $(VENV) and installing the project (once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip install --quiet -c requirements.lock -e '.[dev,bench]'
	@touch $@

demo: $(STAMP)
	@echo "== tops demo"
	@$(BIN)/tops demo

# In the order of the tree, short files come last, and no worker is left alone with a long one.
test: $(STAMP) java chromium
	@echo "== lint and types"
	@$(MAKE) --no-print-directory lint
	@echo "== simulated clusters"
	@$(PYTEST) tests/sim
	@echo "== everything else, two files at a time"
	@$(PYTEST) --ignore tests/sim -n 2 --dist loadfile --no-loadscope-reorder

test-long: $(STAMP) java
	@$(PYTEST) -m long --timeout 7200 -o faulthandler_timeout=7320

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

# Spark needs Java 17 or newer.
java:
	@.ci/java

# One test runs a web page in a real browser.
chromium:
	@.ci/chromium

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build *.egg-info
