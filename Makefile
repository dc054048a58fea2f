# Two commands do everything: `make demo` and `make test`. `make help` lists the rest.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
VENV := .venv
PYTHON := $(VENV)/bin/python
# What has been installed. The developer's is the larger one: where it is there, it is kept up.
USER_STAMP := $(VENV)/.installed-user
DEV_STAMP := $(VENV)/.installed

.PHONY: help setup setup-dev dist demo test check unit process cluster cluster-down cluster-test \
	chaos bench clean

help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(if $(wildcard $(DEV_STAMP)),$(DEV_STAMP),$(USER_STAMP)) ## Make .venv with elastic-run and dlrover in it

setup-dev: $(DEV_STAMP) ## The same, with what tests and checks need

$(USER_STAMP): pyproject.toml constraints.txt
	@bash scripts/setup.sh $(VENV) user
	@touch $@

$(DEV_STAMP): pyproject.toml constraints.txt
	@bash scripts/setup.sh $(VENV) dev
	@touch $@

dist: ## Build the wheel into dist/ (seconds; torch is not needed)
	@bash scripts/setup.sh $(VENV) build
	@$(PYTHON) -m uv build --wheel --out-dir dist

demo: setup ## Train a small GPT on three local nodes, and break them on purpose
	@$(PYTHON) examples/demo.py

test: setup-dev ## Everything that CI runs: checks and all tests
	@$(MAKE) --no-print-directory check
	@$(PYTHON) -m tests.cluster.lab prepare
	@bash scripts/test.sh $(VENV)

check: setup-dev ## Seconds: format, lint, types, import contracts
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports --no-cache

unit: setup-dev ## The tests that start no process
	@$(VENV)/bin/pytest tests/unit tests/stateful

process: setup-dev ## The tests with real masters, agents and workers
	@$(VENV)/bin/pytest tests/process

cluster: setup-dev ## A real 3-node Kubernetes on this machine (root; the first time builds it, 7 minutes)
	@$(PYTHON) -m tests.cluster.lab up --images

cluster-down: setup-dev ## Take it down
	@$(PYTHON) -m tests.cluster.lab down

cluster-test: setup-dev ## The tests on the cluster (or on that of KUBECONFIG)
	@$(VENV)/bin/pytest -rs tests/cluster

chaos: setup-dev ## A campaign of N random faults on the cluster, drawn from SEED (about 20 s each)
	@$(PYTHON) -m tests.cluster.chaos -n $(or $(N),300) --seed $(or $(SEED),7) $(CHAOS)

bench: setup-dev ## Measure, against torchrun in the same run; prints tables of docs/benchmarks.md
	@$(PYTHON) benchmarks/membership.py
	@$(PYTHON) benchmarks/recovery.py
	@$(PYTHON) benchmarks/scale.py --agents 100 1000 --tls

clean: ## Remove what setup and tests have made
	rm -rf $(VENV) dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
