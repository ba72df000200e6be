# `make demo` trains a small model, `make test` runs the tests; both set up .venv first. `make test`
# leaves out what is slow: whole launches, laws over many ranks, and more sizes of laws.
# `make test-all` adds the slow tests and the kernels in Triton's interpreter. `make test-shapes` runs
# laws of equal bits as on another machine, where sums are taken in other orders. .ci/run asks for
# both.
# `make nightly` (hours on two cores) runs the rest: every combination of the parameters of a law;
# runs that are ended at random steps, again and again; the commands of the pages as they are, from
# a fresh clone; the package installed from a clone and a wheel; kernels compiled for Hopper; as
# on another machine, the laws of mixers, layers, weights and resumed runs.
#
# `make test-versions` runs other versions of torch, megatron-core, Python and transformers, one at
# a time, each in an environment of its own (some GB, removed after its row), and fills the table of
# docs/versions.md. ROWS="torch==2.7.0 megatron-core@main" runs a choice; CLONES=folder has
# Megatron-LM's branches as mlm-main and mlm-dev; SCRATCH=folder takes the environments.
#
# Another torch than the pinned one: `make test TORCH=2.15.0 VENV=.venv-2.15`, or any other target.

TORCH ?=
VENV ?= .venv
BIN := $(VENV)/bin
# A shim of pyenv may be there for a version that is not, so each is tried.
PYTHON ?= $(or $(shell for python in python3.12 python3.13 python3.14 python3 \
	$${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.*/bin/python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$python && break; \
	done),python3)

.PHONY: demo test test-shapes test-all test-kernels test-launches test-versions test-frameworks nightly test-gpu docs lint format clean

demo: $(VENV)/.ready
	@$(BIN)/python examples/pretrain_hybrid.py --nproc-per-node 2

test: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not gpu and not nightly and not slow"

# Laws over ranks and of generation: most of those by which products of two shapes have the same
# bits. `make nightly` runs the other folders so, and the files of these two that compare no bits:
# numbers within a tolerance, counts and messages.
SHAPES = distributed inference
WITHOUT_BITS = $(addprefix distributed/test_,agreement.py attention.py calls.py loader_layout.py \
	machines.py mtp.py parameter_marks.py rotary_lengths.py streams.py trees.py upstream_mamba.py)

# Compiled code in a cache of its own: torch would take, and fail to build, what another capability made.
test-shapes: $(VENV)/.ready
	BITS_BY_SHAPE=1 ATEN_CPU_CAPABILITY=default TORCHINDUCTOR_CACHE_DIR=$(abspath $(VENV))/inductor-default \
		OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not gpu and not nightly and not slow" \
		$(addprefix tests/,$(SHAPES)) $(addprefix --ignore=tests/,$(WITHOUT_BITS))

# In one run, whose files are imported once. A third worker has the cores while launches wait.
test-all: test-kernels
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not gpu and not nightly"

test-kernels: $(VENV)/.ready
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest -n auto tests/kernels \
		tests/hostile/test_offsets.py

# The random searches of hypothesis, of which the other targets try a third (tests/searches.py).
SEARCHES = $(shell grep -l "^from tests.searches" tests/*/*.py)

nightly: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m nightly
	ALL_EXAMPLES=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu" $(SEARCHES)
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest -n auto -m nightly tests/kernels
	$(MAKE) test-shapes SHAPES="gdn gdn2 hf kda layer mamba2 ops precision $(WITHOUT_BITS)" WITHOUT_BITS=

# A clone's own scripts run launches, one of them by torchrun, and fill the table of docs/support.md, and its source is read
# for what its layers ask of ours: make test-launches MEGATRON_LM=folder
test-launches: $(VENV)/.ready
	MEGATRON_LM=$(abspath $(MEGATRON_LM)) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs tests/launches \
		tests/unit/test_megatron_contracts.py tests/layer/test_newer_config.py

test-versions: $(VENV)/.ready
	$(BIN)/python tests/versions.py $(ROWS) $(if $(CLONES),--clones $(CLONES)) \
		$(if $(SCRATCH),--scratch $(SCRATCH))

# An environment of its own for each framework, whose transformers may be an older one. NAME.txt has
# what is installed, NAME.no_deps.txt what is installed without what it asks for, NAME_laws.py and
# NAME_*_laws.py the tests.
FRAMEWORKS = $(filter-out %.no_deps,$(basename $(notdir $(wildcard tests/frameworks/environments/*.txt))))
test-frameworks: $(FRAMEWORKS:%=test-with-%)

test-with-%: .venv-frameworks/%/.ready
	OMP_NUM_THREADS=1 $(<D)/bin/python -m pytest -p tests.frameworks.behind_te_on_cpu -s \
		tests/frameworks/$*_laws.py $(wildcard tests/frameworks/$*_*_laws.py)

.PRECIOUS: .venv-frameworks/%/.ready
.venv-frameworks/%/.ready: tests/frameworks/environments/%.txt pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet -e ".[fla]" pytest -r $<
	$(if $(wildcard $(<:.txt=.no_deps.txt)),$(@D)/bin/pip install --quiet --no-deps -r $(<:.txt=.no_deps.txt))
	touch $@

test-gpu:
	python3 -m pytest -m gpu

docs: $(VENV)/.ready
	$(BIN)/python -W ignore -m sphinx --fail-on-warning --keep-going --quiet docs docs/_build
	@echo "docs/_build/index.html is the documentation."

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pyright --pythonpath $(BIN)/python

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12) and "Python 3.12 or newer is needed, this is " + sys.version + ". Install one, or say where it is: make PYTHON=/path/to/python3.12")'
	@echo "Setting up $(VENV): pip fetches torch, megatron-core and the rest, some GB and minutes ..."
	$(PYTHON) -m venv $(VENV)
	grep -vE "$(if $(TORCH),^(torch==|triton==|nvidia-|cuda-),^$$)" constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --progress-bar on --constraint $(VENV)/constraints.txt \
		--editable ".[dev]" $(if $(TORCH),torch==$(TORCH))
	@touch $@
	@echo "$(VENV) is ready."

clean:
	rm -rf $(VENV) build dist *.egg-info
