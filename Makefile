# Everything installs into .venv in this clone. TORCH chooses the build: on Linux, PyPI's has CUDA and is large; for a CPU-only
# build see pytorch.org, install it into .venv first, and it is kept.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH  ?= torch==2.13.0
BIN    := .venv/bin

.PHONY: help setup demo test test-gpu lint types check demo-model demo-corpus clean

help:              ## List the targets
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: .venv/.ready ## Make .venv with everything in it

.venv/.ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $@

demo: setup        ## Index the bundled corpus, answer, and compare the methods
	$(BIN)/cacheblend demo

test: setup        ## Run all tests
	$(BIN)/python -m pytest

test-gpu: setup    ## Run the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

lint: setup        ## Check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup       ## Check types
	$(BIN)/mypy

check: lint types test ## What CI runs

demo-model: setup  ## Train the bundled model from scratch (hours on two cores; resumable)
	$(BIN)/python -m cacheblend_rag.demo.training.train

demo-corpus: setup ## Write the bundled corpus and questions anew
	$(BIN)/python -m cacheblend_rag.demo.make_corpus

clean:             ## Remove .venv and caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache
