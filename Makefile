PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install -qq -c constraints.txt
CORE   := CMakeLists.txt $(wildcard csrc/*)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

# Of each fuzz test.
FUZZ_SECONDS ?= 60

# Python itself is not built with the sanitizer, so its library comes first, and Python's leaks are its own. It
# ends the process where memory runs out, so tests of that are left out; captured by pytest, a report would be lost.
SANITIZERS := -g -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all
SANITIZED  := LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH=build/sanitized/package

# Every peer of the benchmark wants an environment of its own, with Python 3.11.
BENCH_VENV   ?= .venv-bench
BENCH_PYTHON ?= python3.11
BENCH        := $(BENCH_VENV)/bin/python
# For instance --minutes 12 --batches 1 8.
BENCH_FLAGS  ?=
# AMX faults on some virtual machines that advertise it; leave out AVX512 where the processor has none.
LLAMA_FLAGS  ?= -DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX512=ON \
	-DGGML_AMX_TILE=OFF -DGGML_AMX_INT8=OFF -DGGML_AMX_BF16=OFF

.PHONY: demo test slow fuzz tsan sanitize lint format bench bench-env bench-publish bench-report clean

demo: $(VENV)/.demo  ## generate text with and without speculation and compare
	$(BIN)/draftproof generate --compare

test: $(VENV)/.dev  ## the default suite
	$(PYTEST)

slow: $(VENV)/.dev  ## the tests that take minutes
	$(PYTEST) -m slow

fuzz: $(VENV)/.dev  ## property tests on new random inputs, then a libFuzzer target for each operation of the core
	HYPOTHESIS_PROFILE=fuzz DRAFTPROOF_FUZZ_SECONDS=$(FUZZ_SECONDS) nice -n 15 $(PYTEST) -m "fuzz or not (slow or gpu or peers)"
	nice -n 15 $(BIN)/python tests/native/run_fuzz.py --seconds $(FUZZ_SECONDS)

tsan:  ## the threads of the core under ThreadSanitizer
	cmake -S tests/native -B build/tsan -DDRAFTPROOF_CHECK=tsan
	cmake --build build/tsan
	build/tsan/threads_test
	build/tsan/operations_test

sanitize: $(VENV)/.dev  ## the default suite on a core under AddressSanitizer and UndefinedBehaviorSanitizer (GCC)
	rm -rf build/sanitized/package
	CXX=g++ CXXFLAGS="$(SANITIZERS)" $(PIP) --no-deps --target build/sanitized/package -C build-dir=build/sanitized/cmake .
	$(SANITIZED) $(BIN)/python -c "import draftproof._core"
	$(SANITIZED) $(PYTEST) --capture=sys -k "not memory" tests

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/.dev  ## the benchmark's main cells in a few minutes, with the peers that .venv has
	$(BIN)/python -m benchmarks run $(BENCH_FLAGS)

bench-env: $(BENCH_VENV)/.bench  ## an environment with every peer (ten minutes: llama.cpp is compiled)

bench-publish: $(BENCH_VENV)/.bench  ## the whole benchmark into benchmarks/results, then its tables and plot
	$(BENCH) -m pip install -q --no-deps --force-reinstall .
	$(BENCH) -m benchmarks run --publish $(BENCH_FLAGS)
	$(BENCH) -m benchmarks report

bench-report: $(BENCH_VENV)/.bench  ## the tables and the plot again, from the committed results
	$(BENCH) -m benchmarks report

clean:
	rm -rf $(VENV) $(BENCH_VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache

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

$(BENCH_VENV)/.bench: benchmarks/vllm-requirements.txt
	$(BENCH_PYTHON) -m venv $(BENCH_VENV)
	CMAKE_ARGS="$(LLAMA_FLAGS)" $(BENCH) -m pip install -q --no-deps --no-binary llama-cpp-python -r $<
	@touch $@
