# install: makes .venv with everything.  serve: the packaged demo model on 127.0.0.1:8000.  test, lint, types: checks.
#   make serve ARGS="--port 8001"        make serve MODEL=path/or/hub-id        make test ARGS="-k gate"
# WORKERS: processes that `test` spreads the tests' files over; 0 for none but its own, as a debugger wants it.

PYTHON ?= $(firstword $(foreach p,python3.12 python3.11 python3.13 python3,$(shell $(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(p))))
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= demo
WORKERS ?= 2
ARGS ?=

ifeq ($(shell uname -s),Darwin)
BACKEND :=
else ifneq ($(shell command -v nvidia-smi 2>/dev/null),)
BACKEND := cuda,
else
BACKEND := cpu,
endif

# coverage: every line and branch of core/, engine/ and cache/.

.PHONY: install serve test coverage lint types format clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Treadle needs Python 3.11 or newer: install it, or name one with PYTHON=..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (a minute or two the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(BACKEND)demo,dev]'
	@touch $@

serve: install
	@exec $(BIN)/treadle serve $(MODEL) $(ARGS)

test: install
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

coverage: install
	@$(BIN)/python -m pytest -q tests/core tests/engine tests/cache --cov=treadle.core --cov=treadle.engine --cov=treadle.cache --cov-branch --cov-report=term:skip-covered --cov-fail-under=100

lint: install
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: install
	@$(BIN)/mypy

format: install
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .coverage*
