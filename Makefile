# `make demo` trains a small model, `make test` runs the tests; both set up .venv first. `make test`
# leaves out what is slow: whole launches, and more sizes of laws that it holds at one.
# `make test-all` runs everything that .ci/run asks for.
# `make nightly` (an estimated hour on two idle cores) runs what is too long for `make test`:
# runs that are ended at random steps, again and again; the commands of README as they stand, from a
# fresh clone; the package installed from a clone and from a wheel; kernels compiled for Hopper.

PYTHON ?= $(shell command -v python3.12 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all test-kernels test-launches nightly test-gpu lint format clean

demo: $(VENV)/.ready
	@OMP_NUM_THREADS=1 $(BIN)/python examples/pretraining/launch.py --standalone --nproc_per_node=2 \
		examples/pretrain_hybrid.py

test: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not gpu and not nightly and not slow"

test-all: test-kernels
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

test-kernels: $(VENV)/.ready
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest -n auto tests/kernels

nightly: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m nightly

# A clone's own scripts run README's launches: make test-launches MEGATRON_LM=folder
test-launches: $(VENV)/.ready
	MEGATRON_LM=$(abspath $(MEGATRON_LM)) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs tests/launches

test-gpu:
	python3 -m pytest -m gpu

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pyright

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12) and "Python 3.12 or newer is needed, this is " + sys.version)'
	@echo "Setting up $(VENV): pip fetches torch, megatron-core and the rest, some GB and minutes ..."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --progress-bar on --constraint constraints.txt --editable ".[dev]"
	@touch $@
	@echo "$(VENV) is ready."

clean:
	rm -rf $(VENV) build dist *.egg-info
