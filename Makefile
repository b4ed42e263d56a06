# For newcomers: `make train` and `make test` need nothing but a Python and this checkout.
# The environment lives in .venv and is installed again only when pyproject.toml or constraints.txt changes.

PYTHON ?= python3
ARGS ?=
SEEDS ?= 1000

VENV := .venv
PIP_INSTALL := $(VENV)/bin/python -m pip install -qq --no-input --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help train test test-slow check dst soak proto clean

help:
	@echo "make train      train four islands and a syncer on this machine (configs/default.toml)"
	@echo "make test       run the tests; a few minutes on two cores"
	@echo "make test-slow  the tests that start whole runs of real processes and kill them; a few minutes more"
	@echo "make check      formatting, lint, types and import direction"
	@echo "make dst        whole runs in virtual time with faults of every kind, from seeds; SEEDS=10000, ARGS='--first 42 --notes'"
	@echo "make soak       20 minutes of random faults over eight islands, then a look for leaks; ARGS='--minutes 5'"
	@echo "make proto      generate the wire messages again after a change to skerry.proto"
	@echo "make clean      remove the environment, builds and caches; finished runs stay"
	@echo
	@echo "ARGS='...' is passed on to 'skerry train' or pytest; PYTHON=python3.12 picks the Python of a new environment"

train: $(VENV)/.installed-run
	$(VENV)/bin/skerry train configs/default.toml $(ARGS)

test: $(VENV)/.installed-dev
	$(VENV)/bin/python -m pytest -q -n auto --maxprocesses 4 --dist worksteal -m "not slow" $(ARGS)

test-slow: $(VENV)/.installed-dev
	$(VENV)/bin/python -m pytest -q -m slow --timeout 300 $(ARGS)

check: $(VENV)/.installed-dev
	scripts/check

dst: $(VENV)/.installed-dev
	cd tests && ../$(VENV)/bin/python -m simulation --seeds $(SEEDS) $(ARGS)

soak: $(VENV)/.installed-dev
	$(VENV)/bin/python benchmarks/soak.py $(ARGS)

proto: $(VENV)/bin/pip
	scripts/proto

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed-run: pyproject.toml constraints.txt | $(VENV)/bin/pip
	@echo "installing skerry and what it needs into $(VENV) (a minute or two)..."
	@$(PIP_INSTALL) -e '.[plot,text]'
	@touch $@

# Holds everything .installed-run does, so it vouches for that one too.
$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/pip
	@echo "installing skerry and its development tools into $(VENV) (a minute or two)..."
	@$(PIP_INSTALL) -e '.[plot,text,dev]'
	@touch $(VENV)/.installed-run $@

# pip is the last thing that venv writes, so an environment that was left half made is made again.
$(VENV)/bin/pip:
	@version=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || \
	  { echo "error: PYTHON must be a Python 3.10 to 3.13, but '$(PYTHON)' does not run" >&2; exit 1; }; \
	case "$$version" in \
	  3.10|3.11|3.12|3.13) ;; \
	  *) echo "error: PYTHON must be a Python 3.10 to 3.13, got $$version ('$(PYTHON)'); try: make PYTHON=python3.12" >&2; exit 1;; \
	esac; \
	$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "error: '$(PYTHON)' has no venv module; install it (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }; \
	echo "creating $(VENV) with Python $$version"; \
	$(PYTHON) -m venv $(VENV)
