# make demo     set up, then run the main job on a small trained model
# make test     set up, then lint and every test; the last line is pytest's summary
#
# PYTHON=python3.12        another Python (3.10 to 3.13)
# SYSTEM=1 | 0             use, or do not use, the torch of that Python (by itself: on a GPU machine whose torch has CUDA)
# TORCH_INDEX_URL=…        where to take torch from
# WORKERS=2                processes that run tests

PYTHON  ?= python3
SYSTEM  ?= auto
WORKERS ?= 2
COMPAT  ?= 5.4.0 5.23.0

BIN     := .venv/bin
SETUP   := $(PYTHON) scripts/setup_env.py --system $(SYSTEM)
SOURCES := pyproject.toml scripts/setup_env.py $(shell find csrc -type f)
PYTEST  := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

MAKEFLAGS += --no-print-directory
.PHONY: demo test lint unit compat setup clean

demo: .venv/run.stamp
	@$(BIN)/mirage-hf demo

# everything runs even if an early part fails; the whole suite comes last
test: .venv/dev.stamp
	@failed=0; \
	$(MAKE) lint || failed=1; \
	$(MAKE) compat || failed=1; \
	$(MAKE) unit || failed=1; \
	exit $$failed

unit: .venv/dev.stamp
	@$(PYTEST)

lint: .venv/dev.stamp
	@failed=0; \
	lint() { if [ -x $(BIN)/$$1 ]; then $(BIN)/"$$@" || failed=1; else echo "lint: $$1 is not installed here, skipped"; fi; }; \
	lint ruff check --output-format concise .; \
	lint mypy; \
	lint lint-imports --no-logo; \
	exit $$failed

# the models' tests again, with the oldest and the latest transformers
compat: $(COMPAT:%=.compat/%.stamp)
	@failed=0; \
	for version in $(COMPAT); do \
	  if [ -e .compat/$$version/.ready ]; then \
	    echo "transformers $$version:"; \
	    PYTHONPATH=.compat/$$version $(PYTEST) -m "not slow" tests/hf || failed=1; \
	  fi; \
	done; \
	exit $$failed

setup: .venv/dev.stamp

.venv/run.stamp: $(SOURCES)
	@$(SETUP) run
	@touch $@

.venv/dev.stamp: $(SOURCES) .ci/constraints.txt
	@$(SETUP) dev
	@touch $@ .venv/run.stamp

.compat/%.stamp: | .venv/dev.stamp
	@$(SETUP) compat $*
	@mkdir -p .compat && touch $@

clean:
	rm -rf .venv .compat build
