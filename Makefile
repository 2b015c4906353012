# make demo     set up (first time only) and run the demonstration
# make check    set up and run linter, formatter, type checker and import contract
# make quick    set up and run the tests that start no processes and train next to nothing
# make test     set up and run the tests; those in a browser only where chromium and chromedriver are installed
# make release  the tests, and those that take long: many kills
#
# The environment is .venv, pinned by constraints.txt. A CPU-only PyTorch, where the default would bring CUDA along:
#   make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
PIP_ARGS ?=
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt $(PIP_ARGS) --editable
READY := .venv/.ready
READY_DEV := .venv/.ready-dev
HAS_BROWSER := { command -v chromium && command -v chromedriver; } >/dev/null
PYTEST := $(BIN)/python -m pytest
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo quick test release check format clean

demo: $(READY)
	$(BIN)/oneround demo

quick: $(READY_DEV)
	$(PYTEST) $(PARALLEL) -m "not processes and not browser and not slow and not release"

test: $(READY_DEV)
	@if $(HAS_BROWSER); then $(PYTEST) $(PARALLEL) -m "not release"; else \
	  echo "no chromium and chromedriver here: the tests of the report in a browser are left out (README, Development)"; \
	  $(PYTEST) $(PARALLEL) -m "not release and not browser"; fi

release: test
	$(PYTEST) -m release

check: $(READY_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY_DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "oneround needs Python 3.11 or newer; this is " + sys.version.split()[0] + " (make PYTHON=/path/to/python3.11)")'
	@echo "setting up .venv (once; a few minutes, most of it PyTorch)"
	$(PYTHON) -m venv .venv
	$(INSTALL) '.[onnx,flower]'
	touch $(READY)

$(READY_DEV): $(READY)
	$(INSTALL) '.[dev]'
	touch $(READY_DEV)

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build
