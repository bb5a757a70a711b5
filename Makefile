# make demo     set up, then run the main job on a small trained model
# make test     set up, then lint and the tests; the last line is pytest's summary
# make thorough the same, with all that random tests try and tests that are more of the same
# make wheel    build wheels for the Pythons of this machine, in dist/
# make docs     build the documentation site, with warnings as errors
# make report   write the tables and charts of README and docs from docs/benchmarks/results.csv
# make prose    list the longest and hardest sentences of docs and docstrings (a report, no gate)
# make sanitize the C++ core's unit tests and fuzzer under AddressSanitizer and UBSan
#
# PYTHON=python3.12        another Python (3.10 to 3.13)
# SYSTEM=1 | 0             use, or do not use, the torch of that Python (by itself: on a GPU machine whose torch has CUDA)
# TORCH_INDEX_URL=…        where to take torch from
# WORKERS=4                processes that run tests (one for each core, 2 to 8)
# FUZZ_SECONDS=10          how long the fuzzer runs

PYTHON  ?= python3
SYSTEM  ?= auto
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -ge 2 ] || n=2; [ $$n -le 8 ] || n=8; echo $$n)
FUZZ_SECONDS ?= 10
COMPAT  ?= 5.4.0 5.23.0

BIN     := .venv/bin
SETUP   := $(or $(PYTHON),python3) scripts/setup_env.py --system $(SYSTEM)
SOURCES := pyproject.toml scripts/setup_env.py $(shell find csrc -type f -not -path 'csrc/tests/*')
PACKAGED := $(shell find mirage_hf mirage_hf_command patterns kernel_zoo tests/assets/tiny_llama -type f -not -path '*/__pycache__/*')
CXX     ?= g++
SANITIZED := build/sanitize
CPP     := $(shell find csrc -name '*.cpp' -o -name '*.h')
# with torch from the system there may be none in .venv/bin
CMAKE   = $(or $(wildcard $(BIN)/cmake),$(shell command -v cmake),$(BIN)/python -m cmake)
PYTEST  := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

# what `make formats` runs with the libraries, and the suite need not run without them
RUN_WITH_FORMATS := --ignore-glob=tests/formats/test_[!k]* --ignore=tests/trace/test_coded_experts.py \
  --ignore-glob=tests/decode/test_coded_*

MAKEFLAGS += --no-print-directory
# every process would compile torch and transformers anew
export PYTHONDONTWRITEBYTECODE :=
.PHONY: demo test thorough lint unit docs formats report prose sanitize tidy wheel compat $(COMPAT:%=compat-%) setup clean

demo: .venv/run.stamp
	@$(BIN)/mirage-hf demo

# everything runs even if an early part fails; parts of one process each side by side, the longest first
test: .venv/dev.stamp
	@failed=0; \
	$(MAKE) -j2 --output-sync=target -k formats $(COMPAT:%=compat-%) sanitize lint docs || failed=1; \
	if [ -e .compat/formats/.ready ]; then $(MAKE) unit LEFT_OUT="$(RUN_WITH_FORMATS)" || failed=1; \
	else $(MAKE) unit || failed=1; fi; \
	exit $$failed

thorough: export MIRAGE_HF_THOROUGH := 1
thorough: test tidy

unit: .venv/dev.stamp
	@$(PYTEST) -n $(WORKERS) --dist loadfile $(LEFT_OUT)

lint: .venv/dev.stamp
	@failed=0; \
	lint() { if [ -x $(BIN)/$$1 ]; then $(BIN)/"$$@" || failed=1; else echo "lint: $$1 is not installed here, skipped"; fi; }; \
	lint ruff check --output-format concise .; \
	lint mypy; \
	lint lint-imports --no-logo; \
	lint clang-format --dry-run --Werror $(CPP); \
	exit $$failed

# reads every file for minutes, so it is part of `make thorough` only
tidy: .venv/dev.stamp
	@if [ ! -x $(BIN)/clang-tidy ]; then echo "tidy: clang-tidy is not installed here, skipped"; exit 0; fi; \
	$(CMAKE) -S csrc -B build/tidy -DMIRAGE_TESTS=ON > /dev/null && \
	ls csrc/core/*.cpp csrc/core/*/*.cpp | xargs -n 1 -P $(WORKERS) $(BIN)/clang-tidy -p build/tidy --quiet && \
	echo "tidy: clean"

docs: .venv/dev.stamp
	@$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs && echo "docs: build/docs/index.html"

report: .venv/dev.stamp
	@$(BIN)/python -m scripts.report

prose: .venv/dev.stamp
	@$(BIN)/python -m scripts.prose

# without Python; a compiler that lacks the sanitizers' libraries is said, and is no failure
sanitize: .venv/dev.stamp
	@mkdir -p $(SANITIZED); \
	echo 'int main() {}' > $(SANITIZED)/probe.cpp; \
	if ! $(CXX) -fsanitize=address,undefined $(SANITIZED)/probe.cpp -o $(SANITIZED)/probe 2>/dev/null || ! $(SANITIZED)/probe; then \
	  echo "sanitize: $(CXX) has no AddressSanitizer here, skipped"; exit 0; \
	fi; \
	$(CMAKE) -S csrc -B $(SANITIZED) -DCMAKE_CXX_COMPILER=$(CXX) -DMIRAGE_TESTS=ON -DMIRAGE_WERROR=ON \
	  -DMIRAGE_SANITIZE=address,undefined > $(SANITIZED)/cmake.log \
	  || { cat $(SANITIZED)/cmake.log; exit 1; }; \
	$(CMAKE) --build $(SANITIZED) -j $(WORKERS) > $(SANITIZED)/build.log 2>&1 || { cat $(SANITIZED)/build.log; exit 1; }; \
	$(SANITIZED)/tests/core_tests && \
	(cd $(SANITIZED) && tests/fuzz_program ../../csrc/tests/corpus $(FUZZ_SECONDS)) && \
	echo "sanitize: clean"

# the models' tests again, with the oldest and the latest transformers
compat: $(COMPAT:%=compat-%)

$(COMPAT:%=compat-%): compat-%: .compat/%.stamp
	@if [ -e .compat/$*/.ready ]; then \
	  echo "transformers $*:"; \
	  PYTHONPATH=.compat/$* $(PYTEST) -m "models and not slow"; \
	fi

# quantized models, with the libraries that make their containers. MKL adds up as with AVX2: its sums with AVX-512 are
# closer to float64, and beside them the numeric check refuses float32 kernels of NVFP4
formats: .compat/formats.stamp
	@if [ -e .compat/formats/.ready ]; then \
	  echo "libraries of formats:"; \
	  MKL_CBWR=AVX2 PYTHONPATH=.compat/formats $(PYTEST) tests/formats --ignore tests/formats/test_kernels.py \
	    tests/trace/test_coded_experts.py \
	    tests/decode/test_coded_*.py 'tests/docs/test_pages.py::test_python_of_a_page_runs_from_top_to_bottom[quantized.md]'; \
	fi

setup: .venv/dev.stamp

# also for Pythons that are not on PATH: make wheel PYTHONS="/opt/py313/bin/python …"
wheel: .venv/wheel.stamp

.venv/wheel.stamp: $(SOURCES) scripts/build_wheels.py README.md $(PACKAGED) | .venv/run.stamp
	@$(BIN)/python scripts/build_wheels.py $(BIN)/python $(PYTHONS)
	@touch $@

.venv/run.stamp: $(SOURCES)
	@$(SETUP) run
	@touch $@

.venv/dev.stamp: $(SOURCES) .ci/constraints.txt
	@$(SETUP) dev
	@touch $@ .venv/run.stamp

.compat/formats.stamp: scripts/setup_env.py .ci/constraints.txt | .venv/dev.stamp
	@$(SETUP) formats
	@mkdir -p .compat && touch $@

.compat/%.stamp: | .venv/dev.stamp
	@$(SETUP) compat $*
	@mkdir -p .compat && touch $@

clean:
	rm -rf .venv .compat build dist
