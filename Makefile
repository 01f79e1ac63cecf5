# The two commands for a newcomer are `make demo` and `make test`; the rest is for developers.
SHELL := /bin/bash
PYTHON ?= python3.11
BIN := .venv/bin
FIGURES := build/figures

# Public traces and step-time data, where they are at hand; the tests that need them say so.
ifneq ($(wildcard ../shared/traces),)
export TWINKEEL_DATA ?= $(abspath ../shared)
endif

.PHONY: demo live-demo test test-live check oracle bench-twin bench-gateway dst scenarios \
  scenarios-long scorecard soak soak-long format clean

demo: .venv/demo
	$(BIN)/twinkeel replay shipped:demo --policy fifo --policy stable \
	  --profile h100-sxm/qwen3-8b --replicas 4 \
	  --profile h100-sxm/qwen3-embedding-0.6b --replicas 1 --out build/demo

# Two replicas served by the twin, or with VLLM=1 by real vLLM on this CPU, and the controller.
live-demo: $(if $(VLLM),.venv/dev,.venv/live)
	$(BIN)/python -m $(if $(VLLM),tests.live.demo,controller.demo)

test: .venv/dev
	$(BIN)/pytest -m "not live" -n 2 --cov=policy --cov-report=term-missing:skip-covered

test-live: .venv/dev
	$(BIN)/pytest -m live tests/live

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/basedpyright

oracle: .venv/dev
	$(BIN)/python -m tests.differential.oracle

bench-twin: .venv/dev
	$(BIN)/python -m tests.bench.bench_twin

bench-gateway: .venv/dev
	$(BIN)/python -m tests.bench.bench_gateway

scorecard: .venv/dev
	$(BIN)/python -m tests.bench.scorecard

soak: .venv/dev
	$(BIN)/python -m tests.bench.soak

soak-long: .venv/dev
	$(BIN)/python -m tests.bench.soak --long

dst: .venv/dev
	$(BIN)/python -m tests.dst

scenarios: .venv/dev
	$(BIN)/python -m tests.bench.bench_scenarios

scenarios-long: .venv/dev
	$(BIN)/python -m tests.bench.bench_scenarios --long

format: .venv/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build .venv

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/demo: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install -q -c constraints.txt -e .
	touch $@

.venv/live: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install -q -c constraints.txt -e '.[live]'
	touch $@ .venv/demo

.venv/dev: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@ .venv/demo .venv/live
