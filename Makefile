# Every target is one tool. `make` alone lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help

# PYTHON runs the tools. Give PYTHON=python3 on a machine that has everything installed
# (gpu-test, bench); otherwise a virtual environment with pinned packages is made in .venv.
# The first Python that runs and has a supported version (a shim of pyenv may do neither).
IS_SUPPORTED := import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))
BASE_PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	$$p -c "$(IS_SUPPORTED)" 2>/dev/null && echo $$p && break; done)
VENV := .venv
ifeq ($(origin PYTHON), undefined)
PYTHON := $(VENV)/bin/python
SERVE_READY := $(VENV)/.installed
TEST_READY := $(VENV)/.installed-test
endif

HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?=
IN ?=
OUT ?=
ARGS ?=
WORKERS ?= 2
MODEL_FLAG = $(if $(MODEL),--model-path "$(MODEL)")

.PHONY: help setup serve batch bench bench-gpu test gpu-test gpu-sanitize test-e2e check fmt fmt-check lint types imports clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  \1\t/' | expand -t 14

$(VENV)/bin/python:
	@"$(BASE_PYTHON)" -c "$(IS_SUPPORTED)" 2>/dev/null || { \
		echo "Deltaloom needs Python 3.11 or 3.12; none was found. Set BASE_PYTHON=/path/to/python." >&2; exit 2; }
	"$(BASE_PYTHON)" -m venv $(VENV)

INSTALL = @echo "installing pinned packages into $(VENV): minutes on a first run" >&2; \
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) -e '.[test]'
	@touch $@ $(VENV)/.installed

setup: $(TEST_READY) ## make .venv with everything that serving and testing need

serve: $(SERVE_READY) ## serve the embedded model, or MODEL=/path; PORT=8000 HOST=127.0.0.1
	$(PYTHON) -m server.cli serve --host $(HOST) --port $(PORT) $(MODEL_FLAG) $(ARGS)

batch: $(SERVE_READY) ## run an OpenAI batch file: IN=in.jsonl OUT=out.jsonl [MODEL=/path]
	@[ -n "$(IN)" ] && [ -n "$(OUT)" ] || { \
		echo "usage: make batch IN=requests.jsonl OUT=results.jsonl" >&2; exit 2; }
	$(PYTHON) -m server.cli batch -i "$(IN)" -o "$(OUT)" $(MODEL_FLAG) $(ARGS)

bench: $(SERVE_READY) ## measure speed and write bench/results/*.json
	$(PYTHON) -m server.cli bench $(MODEL_FLAG) $(ARGS)

# Workers share the cores: each keeps to one thread, and compiles in its own process.
test: export OMP_NUM_THREADS := 1
test: export TORCHINDUCTOR_COMPILE_THREADS := 1
test: $(TEST_READY) ## the tests that need no GPU; WORKERS=2 processes, 0 for none but this
	$(PYTHON) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

# Real geometries fill the GPU: those files run by themselves. Exit code 5: ARGS selected no test.
GPU_ALONE := tests/engine/test_cuda.py tests/engine/test_cuda_geometries.py \
	tests/engine/test_cuda_memory_plan.py

gpu-test: $(TEST_READY) ## the tests that need a CUDA GPU; ARGS="-n 12" with pytest-xdist
	$(PYTHON) -m pytest -m gpu tests/engine tests/graphs tests/spec tests/contract \
		$(addprefix --ignore ,$(GPU_ALONE)) $(ARGS) || [ $$? -eq 5 ]
	$(PYTHON) -m pytest -m gpu $(GPU_ALONE)

gpu-sanitize: $(TEST_READY) ## compute-sanitizer over small cases of the kernels; needs a CUDA GPU
	for tool in memcheck racecheck; do \
		PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --target-processes all \
		--error-exitcode 9 $(PYTHON) -m pytest -m "gpu and sanitize" tests/graphs/kernels $(ARGS) \
		|| exit 1; done

bench-gpu: $(SERVE_READY) ## kernels and steps on this GPU, beside their floors
	$(PYTHON) -m bench.kernels --results bench/results/gpu-kernels.json $(ARGS)
	$(PYTHON) -m bench.step --results bench/results/gpu-steps.json

test-e2e: $(TEST_READY) ## fresh clone, real servers, real client; takes minutes
	$(PYTHON) -m pytest -m e2e $(ARGS)

fmt: $(TEST_READY) ## format the code
	$(PYTHON) -m ruff format .

fmt-check: $(TEST_READY) ## is the code formatted?
	$(PYTHON) -m ruff format --check .

lint: $(TEST_READY) ## ruff
	$(PYTHON) -m ruff check .

types: $(TEST_READY) ## mypy --strict on the four packages
	$(PYTHON) -m mypy

imports: $(TEST_READY) ## data flows one way
	$(dir $(PYTHON))lint-imports

check: fmt-check lint types imports test ## everything that CI runs

clean: ## remove .venv, caches and build output
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
