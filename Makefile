# `make demo` and `make test` do all set-up by themselves; they need Python >= 3.11 and nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUN_DIR ?= runs/demo
PEERS ?= .venv-peers

.PHONY: demo tiny test test-slow lint sweep bench bench-peers clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "Headrace needs Python 3.11 or newer; this is %d.%d. Name another: make PYTHON=python3.12 ..." % v[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[beam,jax,dev]'
	touch $@

demo: $(VENV)/.installed  ## SmolLM2-135M learns to add, through the whole system
	$(BIN)/headrace run examples/demo.toml --run-dir $(RUN_DIR)

tiny: $(VENV)/.installed  ## a 0.3 M-parameter model from scratch, for people in a hurry
	$(BIN)/headrace run examples/tiny.toml --run-dir runs/tiny

PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed  ## all but the tests of whole runs and of the 135M model
	$(PYTEST) -m 'not sweep and not slow'

test-slow: $(VENV)/.installed  ## those: whole runs as processes that learn and are killed
	$(PYTEST) -m 'slow and not sweep'

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

sweep: $(VENV)/.installed  ## long exhaustive runs, with results written down in docs/
	$(BIN)/python -m pytest -m sweep

bench: $(VENV)/.installed
	$(BIN)/headrace bench loop

# One environment each: they want different versions of the same libraries. 7 GB, of which 5 are torch
# (its wheel does not start without CUDA's libraries); llama.cpp is compiled, minutes on two cores.
bench-peers: $(foreach peer,transformers llamacpp tunix,$(PEERS)/$(peer)/.installed)  ## what bench engine compares with

$(PEERS)/%/.installed: benchmarks/peers/%.txt
	$(PYTHON) -m venv $(PEERS)/$*
	CMAKE_ARGS="-DGGML_NATIVE=ON" $(PEERS)/$*/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis *.egg-info
