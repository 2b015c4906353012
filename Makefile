# make demo   set up (first time only) and run the demonstration
# make test   set up and run the tests
# make check  set up and run linter, formatter, type checker and import contract
#
# The environment is .venv, pinned by constraints.txt. A CPU-only PyTorch, where the default would bring CUDA along:
#   make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
PIP_ARGS ?=
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt $(PIP_ARGS) --editable
READY := .venv/.ready
READY_DEV := .venv/.ready-dev
# The report is tested in a real browser. Where none is and none can be installed, those tests are left out, and it is said.
HAS_BROWSER := { command -v chromium && command -v chromedriver; } >/dev/null
GET_BROWSER := { [ "$$(id -u)" = 0 ] && apt-get install --quiet --yes --no-install-recommends chromium chromium-driver; } >/dev/null 2>&1

.PHONY: demo test check format clean

demo: $(READY)
	$(BIN)/oneround demo

test: $(READY_DEV)
	@$(HAS_BROWSER) || $(GET_BROWSER) || echo "no chromium and chromedriver here: the tests of the report in a browser are left out"
	@$(HAS_BROWSER) || export PYTEST_ADDOPTS="-m 'not browser'"; $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

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
