# What there is to run. A clean machine with Python >= 3.11, pip and make is enough.
#
#   make train       trains the built-in policy; ARGS="run.steps=5" or any other recipe and overrides
#   make test        the core suite: everything not marked slow, in under 5 minutes
#   make test-slow   what is marked ci: the slow tests that every change must pass, with every optional package,
#                    chromium, and vLLM in an environment of its own
#   make test-all    all other slow tests; PART=1, ... PART=2 are shares of under 40 minutes
#   make soak        disturbs runs by random seed for SECONDS and says how many; SEED=n is the first case
#   make test-gpu    what is marked gpu; PART=1, ... PART=4 are shares of under eight minutes.
#                    PYTEST="python -m pytest" runs it in an environment that exists and installs nothing.
#   make lint        ruff, its formatter and mypy over all code
#   make docs        the documentation as a site in site/; a link that leads nowhere fails
#   make format      lets ruff rewrite what it can
#   make clean       removes environments and build outputs
#
# PYTHON names the interpreter, WORKERS the processes of the tests, PARTS the number of shares; ARGS goes to the
# command itself. `.ci/run` is lint, docs, test, test-slow and 90 seconds of soak.

PYTHON ?= python3
WORKERS ?= 2
# Tests start many processes: what is imported is compiled once, also where the user wants no files of it.
TESTING = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest
SECONDS ?= 600
SEED ?= 0
VENV := .venv
BIN := $(VENV)/bin
PYTEST ?= $(BIN)/python -m pytest
# The files of a share of tests: $(call share,KIND,PARTS).
share = $$($(PYTHON) scripts/shares.py $(1) $(if $(PART),--part $(PART) --parts $(or $(PARTS),$(2))))
CODE := src tests scripts $(wildcard bench benchmarks examples)

.PHONY: train test test-slow test-all peers soak test-gpu lint docs format clean

# torch first and pinned: anything looser may pull gigabytes of CUDA packages.
$(VENV)/.core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/.test: $(VENV)/.core
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	touch $@

$(VENV)/.full: $(VENV)/.test
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test,models,reasoning,data,math,cluster,browser,serve,test-serve]'
	touch $@

$(VENV)/.lint: $(VENV)/.test
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[lint]'
	touch $@

$(VENV)/.docs: $(VENV)/.core
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

train: $(VENV)/.core
	$(BIN)/paceline train $(ARGS)

test: $(VENV)/.test
	$(TESTING) -m "not slow" -n $(WORKERS) --dist worksteal $(ARGS)

# What slow tests need beside Python packages: a browser and vLLM.
peers:
	sh scripts/browser.sh
	PYTHON=$(PYTHON) sh scripts/vllm_env.sh

test-slow: $(VENV)/.full peers
	$(TESTING) -m "slow and ci" -n $(WORKERS) --dist worksteal $(ARGS)

test-all: $(VENV)/.full peers
	$(TESTING) -m "slow and not ci" -n $(WORKERS) --dist worksteal $(ARGS) $(call share,slow,2)

soak: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak --seconds $(SECONDS) --seed $(SEED) --workers $(WORKERS)

# An environment is made only where PYTEST is the default.
test-gpu: $(if $(filter file,$(origin PYTEST)),$(VENV)/.test)
	PYTHONPATH=src$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PYTEST) -m gpu $(ARGS) $(call share,gpu,4)

lint: $(VENV)/.lint
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy $(CODE)

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

format: $(VENV)/.lint
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

clean:
	rm -rf $(VENV) .venv-vllm build dist site src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
