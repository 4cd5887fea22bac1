# The commands of the house. `make` alone lists them. Everything runs in the CPU environment that `make setup` makes.
SHELL := bash
VENV := $(abspath $(or $(ROLLSPEC_VENV),.venv))
export PATH := $(VENV)/bin:$(PATH)
export ROLLSPEC_VENV := $(VENV)
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup test test-unit test-engine test-e2e test-modes test-slow lint format demo serve-demo bench gpu docs clean clean-all

help:  ## list the targets
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | \
		while IFS=$$'\t' read -r name text; do printf '  make %-12s %s\n' "$$name" "$$text"; done

setup:  ## make the CPU environment in .venv (once; a second run returns at once)
	@scripts/setup.sh

test: setup  ## everything: static checks, unit, engine and end-to-end tests
	@scripts/test.sh lint unit engine e2e

test-unit: setup  ## pure tests, seconds (ARGS="-k config" goes to pytest, here and below)
	@scripts/test.sh unit $(ARGS)

test-engine: setup  ## tests against a real vLLM engine on CPU, minutes
	@scripts/test.sh engine $(ARGS)

test-e2e: setup  ## whole training jobs on CPU, minutes
	@scripts/test.sh e2e $(ARGS)

test-modes: setup  ## jobs that `make test` leaves out and CI runs: trainer modes, trained heads; minutes
	@scripts/test.sh modes $(ARGS)

test-slow: setup  ## long sweeps that the other targets leave out, many minutes
	@scripts/test.sh slow $(ARGS)

lint: setup  ## ruff check, ruff format --check, mypy, import-linter, vLLM's signatures, stale results, shellcheck
	@scripts/test.sh lint

format: setup  ## apply ruff's fixes and format
	@ruff check --fix . && ruff format .

demo: setup  ## a GRPO job on CPU with and without rollspec, and the report
	@rollspec demo $(ARGS)

serve-demo: setup  ## vllm serve under shifting traffic: no speculation, a frozen drafter, one that keeps learning
	@python -m examples.production_traffic $(ARGS)

bench: setup  ## every benchmark (ARGS="..." goes to rollspec bench)
	@rollspec bench $(or $(ARGS),all)

# Not in the CPU environment: with the python3 that has CUDA's torch (and vLLM), whatever made it.
gpu:  ## what rollspec claims on a GPU, measured on this one (ARGS="--minutes 20"; without a GPU it says so)
	@python3 -m benchmarks.gpu $(ARGS)

docs: setup  ## the documentation as a site in build/docs (generated pages are written anew)
	@python -m scripts.generate >/dev/null
	@NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet
	@echo "documentation: $(CURDIR)/build/docs/index.html (with search: python -m http.server --directory build/docs)"

clean:  ## remove build outputs and caches of this repository
	@rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info
	@find . -path ./.git -prune -o -path './.venv*' -prune -o -type d -name __pycache__ -exec rm -rf {} +

clean-all: clean  ## clean, and remove .venv, runs/ and outputs/
	@rm -rf .venv runs outputs wandb .cache
