# Two commands on a clean machine (Python >= 3.11, pip, make): `make train` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2

.PHONY: train test test-full lint clean

# torch first and pinned: anything looser may pull gigabytes of CUDA packages.
$(VENV)/.core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/.test: $(VENV)/.core
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test]'
	touch $@

train: $(VENV)/.core
	$(BIN)/paceline train $(ARGS)

test: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow" -n $(WORKERS) --dist worksteal $(ARGS)

$(VENV)/.full: $(VENV)/.test
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test,models,reasoning,data,math]'
	touch $@

test-full: $(VENV)/.full
	PYTHON=$(PYTHON) sh scripts/vllm_env.sh
	$(BIN)/pytest -m slow $(ARGS)
	$(BIN)/pytest -m "not slow" tests/tasks $(ARGS)

lint: $(VENV)/.test
	$(BIN)/pip install --quiet ruff
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests

clean:
	rm -rf $(VENV) .venv-vllm build dist src/*.egg-info
