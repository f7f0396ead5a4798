# Everything works from a fresh clone: the targets make .venv themselves, and install again only when
# pyproject.toml or constraints.txt changed.
#
#   make demo        one episode end to end, shown and proven     (ARGS="--version v2", ARGS=--json, ...)
#   make test        the whole suite                              (ARGS="tests/unit -k merge", ...)
#   make check       lint, format, types, layers
#   make bench       measure; bench-report and bench-compare use what it saved
#   make mutants     prove that the corpus can fail
#   make mutation-sweep   general mutants of four rooms for 30 minutes: a score and the survivors
#                         (ARGS="--seed 2 --sample 100 --minutes 10 --workers 2 --room wire")
#   make oracle-compare   the package and the oracle on 100,000 random cases  (ARGS="--seed 1 --count 4000")
#   make abort-matrix, make test-sglang
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 6
ARGS ?=
BIN := $(VENV)/bin
ENGINE := $(VENV)/.installed-engine
TEST := $(VENV)/.installed-test
MUTATION := $(VENV)/.installed-mutation
OUT := out
RESULTS := $(OUT)/bench.json

.PHONY: demo test check bench bench-report bench-compare mutants mutation-sweep oracle-compare \
    abort-matrix test-sglang clean
.DEFAULT_GOAL := test

demo: $(ENGINE)
	$(BIN)/miles-ref demo $(ARGS)

# Bytecode is written even where the environment says not to: else each worker, and each of the hundreds of processes
# that the tests start, compiles the same files again.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(TEST)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(ARGS)

check: $(TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(TEST)
	mkdir -p $(OUT)
	$(BIN)/python -m pytest bench -n 0 -p no:randomly --timeout 0 --benchmark-json $(RESULTS) $(ARGS)

bench-report: $(TEST)
	$(BIN)/python -m bench.report $(RESULTS) --out $(OUT)/bench $(ARGS)

# make bench-compare BASE=before.json NEW=out/bench.json ARGS="--threshold 1.25"
bench-compare: $(TEST)
	$(BIN)/python -m bench.compare $(BASE) $(or $(NEW),$(RESULTS)) $(ARGS)

mutants: $(TEST)
	$(BIN)/python -m tests.golden.mutants
	$(BIN)/python -m tests.golden.mutants.package

mutation-sweep: $(MUTATION)
	$(BIN)/python -m tests.golden.mutants.sweep --minutes 30 --out $(OUT)/mutation-sweep.json $(ARGS)

oracle-compare: $(TEST)
	$(BIN)/python -m tests.golden.oracle.compare --out $(OUT)/oracle-compare $(ARGS)

abort-matrix: $(TEST)
	mkdir -p $(OUT)
	$(BIN)/python -m tests.e2e.agents.matrix_report --out $(OUT)/abort-matrix.json $(ARGS)

# In an environment of its own: the protocol models of the sglang wheel.
test-sglang: $(ENGINE)
	PYTHON=$(PYTHON) bash tests/sglang/run.sh

clean:
	rm -rf $(VENV) $(OUT)

$(ENGINE): $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[engine]'
	touch $@

$(TEST): $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	touch $@ $(ENGINE)

$(MUTATION): $(TEST)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[mutation]'
	touch $@

# Where Debian's python3 has no venv module of its own, virtualenv does the same.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Python 3.11 or newer is needed: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m pip install --quiet virtualenv && $(PYTHON) -m virtualenv $(VENV); }
	touch $@
