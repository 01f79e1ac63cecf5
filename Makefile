# The two commands for a newcomer are `make demo` and `make test`; the rest is for developers.
SHELL := /bin/bash
PYTHON ?= python3.11
BIN := .venv/bin
FIGURES := build/figures

# Public traces and step-time data, where they are at hand; the tests that need them say so.
ifneq ($(wildcard ../shared/traces),)
export TWINKEEL_DATA ?= $(abspath ../shared)
endif

.PHONY: demo live-demo ui test test-live test-ui check oracle bench-twin bench-gateway dst scenarios \
  scenarios-long scorecard soak soak-long drills answers notebooks fidelity forecast-bench loop-demo gpu-steps gpu-check tiny-model format clean

demo: .venv/demo
	$(BIN)/twinkeel replay shipped:demo --policy fifo --policy stable \
	  --profile h100-sxm/qwen3-8b --replicas 4 \
	  --profile h100-sxm/qwen3-embedding-0.6b --replicas 1 --out build/demo

# Two replicas served by the twin, or with VLLM=1 by real vLLM on this CPU, and the controller.
live-demo: $(if $(VLLM),.venv/dev,.venv/live)
	$(BIN)/python -m $(if $(VLLM),tests.live.demo,controller.demo)

# The app in a browser; UI='--admin URL' and so on for its options.
ui: .venv/ui
	$(BIN)/twinkeel ui $(UI)

test: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not live and not ui" -n 2 --cov=policy --cov-report=term-missing:skip-covered

test-live: .venv/dev
	$(BIN)/pytest -m live tests/live

# The app in a real browser, and its figures: about twenty minutes on two cores. Debian's chromium, or
# the one of TWINKEEL_CHROMIUM; TESTS are some of its files.
test-ui: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -m ui $(or $(TESTS:%=tests/ui/browser/test_%.py),tests/ui/browser)

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/basedpyright

# A real vLLM for the CPU and a tiny model, trained on the standard library's text for two minutes:
# made once, kept in the user's cache.
tiny-model: .venv/dev
	$(BIN)/python -m tests.live.vllm_env.ensure trained

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

# About half an hour on two cores: the twin against real vLLM here, and against recorded runs.
fidelity: .venv/dev
	$(BIN)/python -m tests.bench.fidelity
	$(BIN)/python -m tests.bench.fidelity.charts

# How well loads are forecast, and what that is worth in GPU-hours: about twenty minutes.
forecast-bench: .venv/dev
	$(BIN)/python -m tests.bench.forecast

# Record, recalibrate, tune, validate, deploy, compare, on live traffic; then the figures of each link,
# which take more than an hour. `LINKS=demo` is the loop alone: about a quarter of an hour.
loop-demo: .venv/dev
	$(BIN)/python -m tests.bench.loop $(LINKS)

# Step times of a Qwen3-8B-shaped model with PyTorch; without a GPU a tiny shape, and says so.
gpu-steps: .venv/gpu
	$(BIN)/python -m tests.bench.gpu_steps

# Seven drills on demo fleets, each three times, beside the twin's predictions: about eleven minutes.
drills: .venv/dev
	$(BIN)/python -m tests.bench.drills

# How far answers can be trusted, chains and limits, by parts (PARTS="kept leases"): about 25
# minutes, the last parts with real vLLM.
answers: .venv/dev
	$(BIN)/python -m tests.bench.answers $(PARTS)

# One notebook for each claim, run from scratch with full settings (NAMES are some of them); the
# tests run them with fast ones.
notebooks: .venv/dev
	$(BIN)/python -m tests.notebooks $(NAMES)

# The six dimensions of placement for every card here; without a GPU it says so.
gpu-check: .venv/live
	$(BIN)/twinkeel gpu show

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

.venv/ui: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install -q -c constraints.txt -e '.[ui]'
	touch $@ .venv/demo

.venv/gpu: .venv/dev
	$(BIN)/pip install -q -c constraints.txt -e '.[gpu]'
	touch $@

.venv/dev: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@ .venv/demo .venv/live .venv/ui
