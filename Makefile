# Two commands do everything: `make demo` and `make test`. `make help` lists the rest.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
VENV := .venv
PYTHON := $(VENV)/bin/python
# What has been installed. The developer's is the larger one: where it is there, it is kept up.
USER_STAMP := $(VENV)/.installed-user
DEV_STAMP := $(VENV)/.installed

.PHONY: help setup setup-dev dist demo test check unit local coverage matrix matrix-torch lower-bounds browser process cluster cluster-down cluster-test \
	chaos bench docs docs-serve docs-reference clean

help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(if $(wildcard $(DEV_STAMP)),$(DEV_STAMP),$(USER_STAMP)) ## Make .venv with elastic-run and dlrover in it

setup-dev: $(DEV_STAMP) ## The same, with what tests and checks need

$(USER_STAMP): pyproject.toml constraints.txt
	@bash scripts/setup.sh $(VENV) user
	@touch $@

$(DEV_STAMP): pyproject.toml constraints.txt scripts/setup.sh scripts/rare_gc.py scripts/late_torch.py
	@bash scripts/setup.sh $(VENV) dev
	@touch $@

dist: ## Build the wheel and the source archive into dist/ (seconds; torch is not needed)
	@bash scripts/setup.sh $(VENV) build
	@$(PYTHON) -m uv build --out-dir dist

demo: setup ## Train a small GPT on three local nodes, and break them on purpose
	@$(PYTHON) examples/demo.py

test: setup-dev ## Everything that CI runs: checks and all tests
	@bash scripts/test.sh $(VENV)

check: setup-dev ## Seconds: format, lint, types, import contracts, docs
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports --no-cache
	@$(PYTHON) scripts/structure.py --check
	@$(MAKE) --no-print-directory docs

docs: setup-dev ## Build the site of docs/ into .site/; a dead link or a page outside the menu is an error
	@$(PYTHON) scripts/reference.py --check
	@# Not --quiet: it has --strict count no warnings.
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build 2>&1 | { grep -v '^INFO' || true; }

docs-serve: setup-dev ## Show the site at http://127.0.0.1:8000, built again at each change
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs serve --dev-addr 127.0.0.1:8000

docs-reference: setup-dev ## Write docs/reference/ anew from the code
	@$(PYTHON) scripts/reference.py --write

unit: setup-dev ## The tests that start no process
	@$(VENV)/bin/pytest tests/unit tests/stateful

coverage: setup-dev ## Which lines the tests run (of TESTS="...", else of the unit tests)
	@$(VENV)/bin/pytest -q --cov --cov-report=term:skip-covered $(or $(TESTS),tests/unit tests/stateful)

matrix: setup-dev ## Unit tests with each Python, some tests with each torch (PYTHON_VERSIONS, TORCH_VERSIONS)
	@bash scripts/matrix.sh constraints $(PYTHON_VERSIONS)
	@bash scripts/matrix.sh torch $(TORCH_VERSIONS)

matrix-torch: setup-dev ## The tests that depend on torch, with each torch (TORCH_VERSIONS="2.6 2.15" for two)
	@bash scripts/matrix.sh torch $(TORCH_VERSIONS)

lower-bounds: setup-dev ## The unit tests with the oldest libraries that pyproject.toml allows
	@bash scripts/matrix.sh lowest

local: setup-dev ## The tests that start one process, or use this machine's file system
	@bash scripts/prometheus.sh
	@$(VENV)/bin/pytest tests/local

browser: setup-dev ## The tests with a real browser (the first time installs Chromium)
	@bash scripts/browser.sh
	@$(VENV)/bin/pytest tests/browser

process: setup-dev ## The tests with real masters, agents and workers
	@bash scripts/prometheus.sh
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

gpu: setup-dev ## Measure a kill of a worker by phase, on this machine's GPUs (exit code 3 without one; GPU="--device cpu")
	@$(PYTHON) -P benchmarks/gpu.py $(GPU)

clean: ## Remove what setup and tests have made
	rm -rf $(VENV) .matrix dist .site .mypy_cache .ruff_cache .pytest_cache .hypothesis
