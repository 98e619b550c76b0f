# `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?=
export PYTHON
PY := .venv/bin/python
PYTEST_ARGS ?=
CASES ?=

.PHONY: help setup lint format unit test test-parity e2e-vllm demo bench-hook bench-tokenizing bench-router-core bench-kvd bench-kvd-disk soak-kvd fuzz-kvd fuzz-map chaos-kvd sanitize lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## make .venv, install Infera in it, build the C core (nothing to do the second time)
	@deploy/dev/setup.sh

lint: ## ruff, mypy --strict, clang-format, and the repository's test of itself
	@deploy/dev/setup.sh
	@echo "lint: ruff"; $(PY) -m ruff check .; $(PY) -m ruff format --check --quiet .
	@echo "lint: mypy"; $(PY) -m mypy
	@echo "lint: clang-format"; $(PY:python=clang-format) --dry-run -Werror csrc/*.c csrc/*.h
	@echo "lint: repository"; $(PY) -m pytest -q tests/unit/test_repository.py

format: setup ## rewrite Python and C sources in the project's format
	@$(PY) -m ruff check --fix-only --quiet . || true
	@$(PY) -m ruff format .
	@$(PY:python=clang-format) -i csrc/*.c csrc/*.h

unit: setup ## the fast tests only
	@$(PY) -m pytest tests/unit $(PYTEST_ARGS)

test: lint ## set up what is missing, lint, and run every test (installs vLLM for CPU once)
	@echo "test: the engine's environment"; $(PY) -m infera engine-env install vllm
	@echo "test: the tiny model"; $(PY) -m infera model prepare tiny
	@echo "test: unit, integration, end to end, chaos"; $(PY) -m pytest -n 2 --dist loadgroup $(PYTEST_ARGS)

e2e-vllm: setup ## the vLLM plugin on real engines, with and without cache (CASES="--group NAME", or --list)
	@$(PY) -m tests.e2e.vllm_cases $(CASES)

test-parity: setup ## our token ids against vLLM's own, over hundreds of random requests (SEED repeats a run)
	@$(PY) -m tests.support.prompt_parity

bench-tokenizing: setup ## what a long prompt costs the others, and what a repeated prefix costs (QUICK=1: short)
	@$(PY) -m infera.tools.bench.tokenizing

demo: setup ## serve a real model with two engines, kvd and the router, and show what the cache saves
	@$(PY) -m infera demo

bench-hook: setup ## what the hooks cost a Python process that did not ask for them
	@$(PY) -m infera.tools.bench.hook_cost

bench-router-core: setup ## events applied, prompts matched, picks made (QUICK=1: under a minute; SEED, CYCLES)
	@$(PY) -m infera.tools.bench.router_core

bench-kvd: setup ## the memory tier against memcpy and bare sockets (QUICK=1: under a minute)
	@$(PY) -m infera.tools.bench.kvd

bench-kvd-disk: setup ## the disk tier's store against fio on the same path (QUICK=1: under a minute; BENCH_PATH)
	@$(PY) -m infera.tools.bench.kvd_disk

soak-kvd: setup ## ten million saves of fresh keys (CYCLES): memory stays flat, the books add up
	@$(PY) -m infera.tools.bench.kvd_soak

fuzz-kvd: setup ## fuzz the arena and the daemon's socket (FUZZ_SECONDS a target, default 60)
	@csrc/fuzz/run.sh

fuzz-map: setup ## fuzz the cache map and its event decoders (FUZZ_SECONDS a target, default 60)
	@FUZZ_TARGETS="fuzz_map fuzz_events" csrc/fuzz/run.sh

chaos-kvd: setup ## clients and daemon killed at random, every byte checked (CHAOS_SECONDS, default 300)
	@INFERA_TEST_STRESS_S=$${CHAOS_SECONDS:-300} $(PY) -m pytest -s -o timeout=0 tests/chaos/test_kvd_stress.py $(PYTEST_ARGS)

sanitize: ## the C core's self-test under ASan, UBSan and TSan, SECONDS (10) each
	@csrc/tests/sanitize.sh build/sanitize $(or $(SECONDS),10) $(or $(SEED),$(shell date +%s))

lock: setup ## make requirements/dev.lock anew from pyproject.toml (takes ten minutes)
	@$(PY) -m pip install --quiet --disable-pip-version-check --target build/pip-tools pip-tools
	@$(PY) deploy/dev/expand.py > build/dev.in
	@{ echo "# Exact versions of a developer's environment. Made by \`make lock\` from pyproject.toml; do not edit."; \
	   cd build && PYTHONPATH=pip-tools ../$(PY) -m piptools compile -q --allow-unsafe --generate-hashes --no-emit-index-url \
	   --no-emit-find-links --no-emit-trusted-host --no-header --no-annotate --strip-extras -o - dev.in; } > build/dev.lock
	@mv build/dev.lock requirements/dev.lock

clean: ## remove what was built here (.venv, build outputs); the cache folder stays
	@rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis csrc/infera_core/_native*
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
