# SPDX-License-Identifier: Apache-2.0
# Everything a person or CI runs. `make help` lists it. Set-up goes into .runtime (or TRITON_OMNI_HOME).

SHELL := /bin/bash
.DEFAULT_GOAL := help

# the first Python that the local server can use; set-up says what is wrong if there is none
PYTHON ?= $(shell for p in python3 python3.11 python3.12; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && echo $$p && exit; \
	done; echo python3)
PIP_ARGS ?=
export PIP_ARGS
# cuda,client,dev makes the engine environment for GPUs; empty: as it is (at first for CPUs). See docs/gpus.md
EXTRAS ?=

BOOTSTRAP := $(PYTHON) backends/supervisor/bootstrap.py
OMNI_HOME := $(shell $(BOOTSTRAP) backends.supervisor.home 2>/dev/null)
ENGINE := $(OMNI_HOME)/engine/bin
PYTEST := $(ENGINE)/python -m pytest
CLI := $(BOOTSTRAP) cli
SERVE_ARGS ?=
PERF_ARGS ?=
TESTS ?= tests
AVX2 := OPENBLAS_CORETYPE=Haswell ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2

# targets that start from the engine environment: say what to do where it is missing
HAS_ENGINE = @test -x $(ENGINE)/python || { echo '$@: no engine environment in $(OMNI_HOME); next: make setup'; exit 1; }

.PHONY: help setup serve demo test bytes test-all check doctor lint unit test-soak chaos test-gpu gpu-first-hour repository perf bench bench-smoke qwen-tts clean

help: ## show this list
	@echo "Triton-Omni: make TARGET"
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/' | expand -t 16
	@echo "Variables:"
	@echo "  PYTHON=$(PYTHON)  EXTRAS=cuda,client,dev (for GPUs)  PIP_ARGS='…' (for every pip call)"
	@echo "  SERVE_ARGS='--any-port …'  TRITON_OMNI_HOME=$(OMNI_HOME)"

setup: ## make environments, server and weights (about 5 minutes, 6 GB; later only what changed)
	@$(BOOTSTRAP) backends.supervisor.setup.__main__ $(if $(EXTRAS),--extras $(EXTRAS))

serve: setup ## run supervisor, server and OpenAI proxy until Ctrl-C
	@$(CLI) serve $(SERVE_ARGS)

demo: setup ## ask the embedded default for a spoken answer and an image; files in out/
	@$(CLI) demo

lint: ## style and types
	$(HAS_ENGINE)
	@$(ENGINE)/ruff check . && $(ENGINE)/ruff format --check .
	@rm -rf build/types && mkdir -p build/types && cp -rs $(CURDIR)/client build/types/triton_omni \
		&& cp -rs $(CURDIR)/backends build/types/triton_omni/
	@$(ENGINE)/pyright --pythonpath $(ENGINE)/python

unit: ## unit tests
	$(HAS_ENGINE)
	@$(PYTEST) -q $(if $(shell $(ENGINE)/python -c 'import xdist' 2>&1),,-n 2 --dist loadfile) tests/unit

check: ## style, types and unit tests side by side (under 3 minutes on two idle cores)
	@$(MAKE) --no-print-directory -j2 --output-sync=target lint unit
	@echo 'check: passed; next: make test'

doctor: ## state of set-up and of running servers, with memory and start-up seconds
	@$(CLI) doctor

test: setup lint ## set-up, style, types and all tests but chaos, soak and GPU (about 35 minutes)
	@$(MAKE) --no-print-directory bytes
	@$(PYTEST) -m "not chaos and not soak and not gpu" $(TESTS)

bytes: ## tests that promise equal bytes, with the kernels of a CPU without AVX-512 (part of test)
	@$(AVX2) $(PYTEST) -q -m "bytes_exact and not soak and not gpu" $(TESTS)

qwen-tts: setup ## put qwen-tts beside the engine environment, for the tests that compare with it (part of test-all)
	@$(ENGINE)/python -m pip install -q $(PIP_ARGS) --no-deps --upgrade --target $(OMNI_HOME)/qwen-tts \
		-r tests/reference/requirements-qwen-tts.txt

test-all: qwen-tts test chaos test-soak ## everything that needs no GPU (about 2 hours)
	@echo 'test-all: passed; with a GPU, next: make test-gpu'

test-soak: setup ## long runs: ten thousand random requests, an hour of soak (its numbers in out/soak.json)
	@$(PYTEST) -m soak --timeout 3600 $(TESTS)

chaos: setup ## about 25 minutes: kills ranks, workers, stubs and servers while clients stream; seeded
	@$(PYTEST) -m "not soak" -s tests/chaos

test-gpu: ## tests that need a CUDA device; makes the engine environment for it
	@compgen -G '/dev/nvidia[0-9]*' >/dev/null || { echo 'test-gpu: no NVIDIA GPU (/dev/nvidia0); next: make test'; exit 1; }
	@$(MAKE) --no-print-directory setup EXTRAS=cuda,client,dev
	@$(PYTEST) -m gpu $(TESTS)

gpu-first-hour: ## all that a first hour on a GPU machine should see; a report for docs/gpus.md in out/gpu-first-hour.md
	@compgen -G '/dev/nvidia[0-9]*' >/dev/null || { echo 'gpu-first-hour: no NVIDIA GPU (/dev/nvidia0); next: make test'; exit 1; }
	@$(MAKE) --no-print-directory setup EXTRAS=cuda,client,dev
	@$(ENGINE)/python -m perf.gpu_first_hour

repository: ## write the model repositories and the tables of docs/wire.md
	@$(CLI) repository --platform cpu --out model_repository
	@$(ENGINE)/python docs/wire_tables.py

perf: setup ## perf_analyzer on toy and chat beside their engines in one process; tables in out/perf
	@$(ENGINE)/python -m perf.analyze --out out/perf $(PERF_ARGS)

bench: setup ## about 20 minutes: ours beside one process, vLLM's server and diffusers; out/bench has tables and plots
	@$(ENGINE)/python -m perf.bench $(BENCH_ARGS)
	@echo 'bench: done; next: compare out/bench/bench.md with perf/README.md'

bench-smoke: setup ## two minutes: fails where the server or the proxy cost more than they may
	@$(ENGINE)/python -m perf.bench --smoke --out out/bench-smoke
	@echo 'bench-smoke: passed; next: make bench'

clean: ## remove outputs and caches, keep what set-up made (remove that folder by hand to start afresh)
	@rm -rf out build dist *.egg-info .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -not -path './.runtime/*' -prune -exec rm -rf {} +
	@echo 'clean: done; set-up is kept in $(OMNI_HOME)'
