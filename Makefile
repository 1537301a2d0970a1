# Two commands for a newcomer: `make demo` and `make test`. Everything is installed into .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Tests and the demo start hundreds of processes: none should compile again what another has compiled.
unexport PYTHONDONTWRITEBYTECODE
# Workers must collect the same tests in the same order, also where an id shows a set.
PYTEST := PYTHONHASHSEED=0 $(BIN)/python -m pytest -q

COMPOSE := docker compose -f compose/compose.yaml

.PHONY: demo test test-long coverage bench lint fmt docs java chromium clean compose-up compose-demo compose-check compose-down

$(STAMP): pyproject.toml requirements.lock
	@echo "== creating $(VENV) and installing the project (once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip install --quiet -c requirements.lock -e '.[dev,bench,docs]'
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

# How much of the machines the tests of the core, the scenarios and the simulator execute, by line and branch.
coverage: $(STAMP)
	@PYTHONHASHSEED=0 $(BIN)/python -m coverage run -m pytest -q --timeout 3000 -o faulthandler_timeout=3600 \
		tests/core tests/scenarios tests/sim
	@$(BIN)/python -m coverage report

bench: $(STAMP)
	@$(BIN)/tops bench core

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

fmt: $(STAMP)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

# The documentation as pages, with the API reference: open site/index.html. A warning is an error.
docs: $(STAMP)
	@$(BIN)/python docs/package_graph.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "site/index.html"

# A stack in production shape, in containers: docs/compose.md. These need Docker and its compose plugin, and no Python
# packages.
compose-up:
	@$(COMPOSE) build
	@$(COMPOSE) up --detach --wait
	@echo "Grafana: http://127.0.0.1:$${TOPS_GRAFANA_PORT:-3000}, Prometheus: http://127.0.0.1:$${TOPS_PROMETHEUS_PORT:-9090}"

compose-demo: compose-up
	@$(PYTHON) compose/demo.py

# Workers call the driver by its name: the alias.
compose-check: compose-up
	@$(COMPOSE) --profile check run --rm --use-aliases check

# Containers and networks; `docker compose -f compose/compose.yaml down --volumes` also removes data and keys.
compose-down:
	@$(COMPOSE) --profile demo --profile check --profile operator down

# Spark needs Java 17 or newer.
java:
	@.ci/java

# One test runs a web page in a real browser.
chromium:
	@.ci/chromium

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .coverage build site *.egg-info
