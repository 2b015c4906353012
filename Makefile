# make demo   set up (first time only) and run the demonstration
# make test   set up and run the tests
# make check  set up and run linter, formatter, type checker and import contract
#
# The environment is .venv, pinned by constraints.txt. A CPU-only PyTorch, where the default would bring CUDA along:
#   make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
PIP_ARGS ?=
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test check format clean

demo: $(READY)
	$(BIN)/oneround demo

test: $(READY)
	$(BIN)/python -m pytest -n 2

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "oneround needs Python 3.11 or newer; this is " + sys.version.split()[0] + " (make PYTHON=/path/to/python3.11)")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(PIP_ARGS) --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build
