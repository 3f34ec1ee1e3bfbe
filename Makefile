# One command per wish. `make demo` and `make test` set up everything they need.

# The interpreter that `make` starts from. On a GPU machine that already has
# torch: make gpu PYTHON=python3
PYTHON ?= python3

VENV := .venv
VENV_PYTHON := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed-from-pyproject

# GPU targets run under $(PYTHON) where that can import torch (a GPU machine,
# often without a network), and otherwise under the virtual environment.
HAS_TORCH = $(shell $(PYTHON) -c 'import importlib.util as u; print(u.find_spec("torch") and "yes" or "")' 2>/dev/null)
GPU_PYTHON ?= $(if $(HAS_TORCH),$(PYTHON),$(VENV_PYTHON))

.DEFAULT_GOAL := help
.PHONY: help demo test check lint types unit gpu gpu2 check-memory bench clean

help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 15

demo: $(INSTALLED) ## Train on real photographs through three input pipelines; about a minute
	$(VENV_PYTHON) -m gpuprefetch demo $(ARGS)

test: check ## The same as check

check: lint types unit ## What CI runs: ruff, mypy --strict, the CPU tests

lint: $(INSTALLED)
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .

types: $(INSTALLED)
	$(VENV_PYTHON) -m mypy --strict gpuprefetch

# A file stays in one process: some share what is dear to start. benchmark: no timing
# is done in here, and it warns when tests run side by side.
unit: $(INSTALLED)
	$(VENV_PYTHON) -m pytest -n 2 --dist loadfile -p no:benchmark $(ARGS)

gpu: ## GPU tests and benchmarks; writes tests/gpu/LAST_RUN.json
	@test "$(GPU_PYTHON)" != "$(VENV_PYTHON)" || $(MAKE) --no-print-directory $(INSTALLED)
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(GPU_PYTHON) tests/gpu/run.py $(ARGS)

gpu2: ## Tests and benchmarks on two GPUs; writes tests/gpu/LAST_RUN_2GPU.json
	@test "$(GPU_PYTHON)" != "$(VENV_PYTHON)" || $(MAKE) --no-print-directory $(INSTALLED)
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(GPU_PYTHON) -m tests.gpu2.run $(ARGS)

check-memory: ## The fused kernel's GPU tests under compute-sanitizer; about 2 minutes
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(GPU_PYTHON) tests/gpu/memory_checker.py $(ARGS)

bench: ## All benchmark suites on a GPU, at most 8 minutes; renews tables and pictures
	@test "$(GPU_PYTHON)" != "$(VENV_PYTHON)" || $(MAKE) --no-print-directory $(INSTALLED)
	export PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}"; status=0; \
	$(GPU_PYTHON) -m benchmarks $(ARGS) || status=$$?; \
	$(GPU_PYTHON) -m benchmarks.tables --plots && exit $$status

clean: ## Remove everything that was built, the virtual environment included
	rm -rf $(VENV) build dist *.egg-info demo-out bench-out \
	    .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Rebuilt when pyproject.toml changes; touched last, so a broken install is retried.
$(INSTALLED): pyproject.toml
	@echo "Setting up $(VENV): torch and the tools, about 6 GB; takes 2 minutes or more ..."
	test -x $(VENV_PYTHON) || $(PYTHON) -m venv $(VENV)
	$(VENV_PYTHON) -m pip install -q -e '.[dev]'
	touch $@
