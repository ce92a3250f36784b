# Everything needed is set up under .venv/ by the first target that needs it: only Python 3.10 or newer, make and git must be there.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

PYTHON ?= python3
ARGS ?=
BACKEND ?=

ENV := $(PYTHON) tests/env/make_env.py
CORE := .venv/core/bin/python
VERL := .venv/verl/bin/python
BENCH := .venv/bench/bin/python
UV := .venv/uv/bin/uv
CORE_TESTS := tests/unit tests/packaging

# In CI a skipped test is a failed one: what a person's machine may lack, CI's must have.
IN_CI := $(filter-out 0 false,$(CI))
STRICT := $(if $(IN_CI),-p no_skip)
# The versions that must be found by test-pythons, else it fails.
OTEL_ROLLOUT_REQUIRE_PYTHONS ?=

# Each test run adds its counts; the last one shows all of them.
export OTEL_ROLLOUT_TEST_TOTALS := $(CURDIR)/.venv/test-totals
PYTEST := -m pytest -p totals $(STRICT)

.PHONY: help setup core-env verl-env bench-env demo bench test lint test-core test-pythons test-verl lock wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: core-env verl-env ## make the environments of the tests and of the demo

core-env:
	@$(ENV) core >/dev/null

verl-env:
	@$(ENV) verl >/dev/null

bench-env:
	@$(ENV) bench >/dev/null

demo: verl-env ## trace real verl rollouts on this machine; ARGS="--trainer v0" BACKEND=otlp
	@$(VERL) examples/verl_demo/run.py $(if $(BACKEND),--backend $(BACKEND)) $(ARGS)

bench: bench-env ## measure what tracing costs, beside what verl offers itself
	@$(BENCH) tests/benchmark/run.py $(ARGS)

test: ## run all tests, on every Python found
	@rm -f $(OTEL_ROLLOUT_TEST_TOTALS)
	@$(MAKE) lint
	@$(MAKE) test-core
	@$(MAKE) test-pythons
	@$(MAKE) test-verl

lint: core-env ## ruff and mypy
	@echo "==> lint and types"
	@$(CORE) -m ruff check
	@$(CORE) -m ruff format --check
	@$(CORE) -m mypy

test-core: core-env ## unit and packaging tests, without verl
	@echo "==> core tests"
	@OTEL_ROLLOUT_TEST_RUN=core $(CORE) $(PYTEST) $(CORE_TESTS) $(ARGS)

test-pythons: ## the core tests on the other Pythons found; on 3.10 with the oldest dependencies allowed
	@found="$$($(ENV) pythons)"; own="$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')"; \
	for version in $(OTEL_ROLLOUT_REQUIRE_PYTHONS); do \
	  case " $$found $$own " in *" $$version "*) ;; *) echo "error: Python $$version was not found, and it is required here" >&2; exit 1;; esac; \
	done; \
	for version in 3.10 3.11 3.12 3.13; do \
	  case " $$found $$own " in *" $$version "*) ;; *) echo "==> core tests on Python $$version: LEFT OUT, it was not found";; esac; \
	done; \
	for version in $$found; do \
	  lowest=; label="core, Python $$version"; \
	  if [ "$$version" = 3.10 ]; then lowest=--lowest; label="$$label, oldest dependencies"; fi; \
	  echo "==> $$label"; \
	  python="$$($(ENV) core --python $$version $$lowest)"; \
	  OTEL_ROLLOUT_TEST_RUN="$$label" "$$python" $(PYTEST) $(CORE_TESTS) $(ARGS); \
	done

test-verl: verl-env ## every other test: real verl, Ray, examples, README
	@echo "==> tests with the real verl"
	@OTEL_ROLLOUT_TEST_RUN=verl $(VERL) $(PYTEST) tests $(CORE_TESTS:%=--ignore=%) $(ARGS)

lock: ## resolve the pinned versions anew
	@$(ENV) lock

wheel: core-env ## build the sdist and the wheel into dist/
	@$(UV) build --quiet --python $(CORE) --build-constraints tests/env/constraints.txt --out-dir dist && ls dist

clean: ## remove what make made, the environments too
	rm -rf .venv dist build .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
