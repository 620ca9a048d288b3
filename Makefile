PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install -qq -c constraints.txt
CORE   := CMakeLists.txt $(wildcard csrc/*)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

.PHONY: demo test slow fuzz lint format clean

demo: $(VENV)/.demo  ## generate text with and without speculation and compare
	$(BIN)/draftproof generate --compare

test: $(VENV)/.dev  ## the default suite
	$(PYTEST)

slow: $(VENV)/.dev  ## the tests that take minutes
	$(PYTEST) -m slow

fuzz: $(VENV)/.dev  ## property tests on new random inputs
	HYPOTHESIS_PROFILE=fuzz $(PYTEST) -m "fuzz or not (slow or gpu or peers)"

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) build dist .cmake .ninja_deps .ninja_log .skbuild-info.json CMakeCache.txt CMakeFiles CMakeInit.txt \
		build.ninja cmake_install.cmake libnanobind-static.a src/draftproof/_core* .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Editable in both, so that an edit or a pull needs no new install.
$(VENV)/.demo: pyproject.toml constraints.txt $(CORE) | $(BIN)/python
	@echo "installing draftproof with its command line and transformers into $(VENV) (a minute or two)"
	$(PIP) --editable ".[cli,transformers]"
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt $(CORE) | $(BIN)/python
	@echo "installing draftproof with its test tools into $(VENV) (a minute or two)"
	$(PIP) --editable ".[dev]"
	@touch $@ $(VENV)/.demo
