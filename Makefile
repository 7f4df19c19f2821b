# `make demo` and `make test` do all set-up by themselves; they need Python >= 3.11 and nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUN_DIR ?= runs/demo

.PHONY: demo tiny test lint sweep bench clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "Headrace needs Python 3.11 or newer; this is %d.%d. Name another: make PYTHON=python3.12 ..." % v[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[beam,jax,dev]'
	touch $@

demo: $(VENV)/.installed  ## SmolLM2-135M learns to add, through the whole system
	$(BIN)/headrace run examples/demo.toml --run-dir $(RUN_DIR)

tiny: $(VENV)/.installed  ## a 0.3 M-parameter model from scratch, for people in a hurry
	$(BIN)/headrace run examples/tiny.toml --run-dir runs/tiny

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not sweep'

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

sweep: $(VENV)/.installed  ## long exhaustive runs, with results written down in docs/
	$(BIN)/python -m pytest -m sweep

bench: $(VENV)/.installed
	$(BIN)/headrace bench loop

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis *.egg-info
