# `make demo` and `make test` are all a newcomer needs: each sets up .venv by itself.
PYTHON ?= python3
ARGS ?=
WORKERS ?= 3
FRAMEWORKS ?= yes

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all soak lint docs bench dist clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo 'PYTHON=python3.12 chooses the interpreter of .venv, ARGS="..." is added to the demo, to pytest, to soak or to bench.'

setup: $(READY) ## install everything into .venv

demo: $(READY) ## train a small GPT with AdamW and with dmuon on four processes, and compare
	$(BIN)/python examples/compare.py $(ARGS)

test: $(READY) ## run the tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=10 $(ARGS)

soak: $(READY) ## compare thousands of random training loops with one process (--seeds FIRST:LAST)
	$(BIN)/python tests/soak.py $(ARGS)

test-all: ARGS += --all
test-all: test ## run the tests in all combinations

lint: $(READY) ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY) ## build the documentation into site/ (site/index.html); fails on a broken link or an unknown name
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

bench: $(READY) ## time whole iterations and step() of several optimizers, on four processes
	$(BIN)/python benchmarks/step.py $(ARGS)

dist: $(READY) ## build the wheel into dist/ and check it; uploads nothing
	$(BIN)/python tools/release.py

clean: ## remove .venv, caches and build results (never runs/, which holds your checkpoints)
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml requirements-dev.txt requirements-frameworks.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -r requirements-dev.txt
	test $(FRAMEWORKS) = no || $(BIN)/python -m pip install --no-deps -r requirements-frameworks.txt
	@touch $@
