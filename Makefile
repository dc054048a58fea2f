# Two commands do everything: `make demo` and `make test`. `make help` lists the rest.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: help setup demo test check unit process cluster cluster-down cluster-test chaos bench clean

help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make .venv with elastic-run, dlrover-run and dlrover in it

$(STAMP): pyproject.toml constraints.txt
	@bash scripts/setup.sh $(VENV)
	@touch $@

demo: setup ## Train a small GPT on three local nodes, and break them on purpose
	@$(PYTHON) examples/demo.py

test: setup ## Everything that CI runs: checks and all tests
	@$(MAKE) --no-print-directory check
	@$(PYTHON) -m tests.cluster.lab prepare
	@bash scripts/test.sh $(VENV)

check: setup ## Seconds: format, lint, types, import contracts
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports --no-cache

unit: setup ## The tests that start no process
	@$(VENV)/bin/pytest tests/unit tests/stateful

process: setup ## The tests with real masters, agents and workers
	@$(VENV)/bin/pytest tests/process

cluster: setup ## A real 3-node Kubernetes on this machine (root; the first time builds it, 7 minutes)
	@$(PYTHON) -m tests.cluster.lab up --images

cluster-down: setup ## Take it down
	@$(PYTHON) -m tests.cluster.lab down

cluster-test: setup ## The tests on the cluster (or on that of KUBECONFIG)
	@$(VENV)/bin/pytest -rs tests/cluster

chaos: setup ## A campaign of N random faults on the cluster, drawn from SEED (about 20 s each)
	@$(PYTHON) -m tests.cluster.chaos -n $(or $(N),300) --seed $(or $(SEED),7) $(CHAOS)

bench: setup ## Measure, against torchrun in the same run; prints tables of docs/benchmarks.md
	@$(PYTHON) benchmarks/membership.py
	@$(PYTHON) benchmarks/recovery.py
	@$(PYTHON) benchmarks/scale.py --agents 100 1000 --tls

clean: ## Remove what setup and tests have made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
