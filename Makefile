# Everything starts from a fresh clone with Python >= 3.11 and make; `make` alone prints the targets.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# Where the environment forbids caches of bytecode, every process would compile our modules again.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
PYTHON := $(BIN)/python
# What setup found out about this machine (JAVA_HOME) holds for whatever runs Spark.
RUN := set -a; source .cache/environment; set +a; exec
PYTEST := $(RUN) $(PYTHON) -m pytest
# A pytest expression or path may be given: make test ARGS="-k slot"
ARGS ?=
# The tests use S3 servers and Azurite; elsewhere WALDELTA_STORES chooses the stores whose jars setup fetches.
test test-all nightly share unit pg spark e2e soak mutations test-profile: export WALDELTA_STORES := s3,azure
# What mypy checks, strictly; .pre-commit-config.yaml names the same.
TYPED := include spark_jobs plugins dags

.PHONY: help
help: ## print the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  \033[1m%-11s\033[0m %s\n", $$1, $$2}'

.PHONY: setup
setup: ## create .venv, install, check Java, fetch Delta's jars, and those of WALDELTA_STORES=s3,azure (once)
	@for python in python3.11 python3.12 python3.13 python3 $(BIN)/python; do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then exec $$python tools/bootstrap.py; fi; \
	done; echo "Python 3.11 or newer is needed and none was found on PATH" >&2; exit 1

##@ The main job
STORE ?=
ifneq ($(STORE),)
demo: export WALDELTA_STORES := $(STORE)
endif
# Before setup fetches the jars of another store.
ifneq ($(and $(filter demo,$(MAKECMDGOALS)),$(filter-out s3,$(STORE))),)
$(error STORE=$(STORE): the demo has a server of s3 only)
endif
.PHONY: demo
demo: setup ## a year of real flights from PostgreSQL through Airflow and Spark into Delta; STORE=s3: the lake is in a local S3 server
	@$(RUN) $(PYTHON) -m demo.run_demo $(if $(STORE),--store $(STORE)) $(ARGS)

.PHONY: up
up: setup ## start the embedded stack and leave it running: Airflow's UI on the demo
	@$(RUN) $(PYTHON) -m demo.stack up $(ARGS)

.PHONY: down
down: ## stop it
	@$(PYTHON) -m demo.stack down $(ARGS)

.PHONY: status
status: ## say what of it is running
	@$(PYTHON) -m demo.stack status $(ARGS)

.PHONY: psql
psql: setup ## psql on the demo's source, while it is up; ARGS holds psql's options
	@exec $(PYTHON) -m demo.stack psql $(ARGS)

# Tests wait for servers, so that three processes keep two cores busy. E2e files first, because they
# take longest; a file's tests share what is expensive to make, and the process that is done first
# takes half of what another one has left.
PROCESSES := 3
PARALLEL = -n $(PROCESSES) --dist worksteal --maxfail 40
TESTS := tests/e2e tests/integration tests/unit
ORDINARY := -m "not nightly and not soak"
ORDER := $(if $(SEED),-p randomly -p no:cacheprovider --randomly-seed=$(SEED))

##@ Checks
.PHONY: lint
lint: setup ## style, format, types, spelling, prose and links
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy $(TYPED)
	@$(BIN)/codespell
	@$(PYTHON) tools/names.py
	@$(PYTHON) tools/prose.py
	@NO_COLOR=1 $(BIN)/zensical build --strict

.PHONY: docs
docs: setup ## the documentation as a site at http://localhost:8000, with search; needs no network
	@$(BIN)/zensical serve $(ARGS)

.PHONY: fmt
fmt: setup ## format, and mend what ruff can mend
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

.PHONY: type
type: setup ## types alone
	@$(BIN)/mypy $(TYPED)

.PHONY: test
test: setup ## the tests that a change is likely to break; SEED=1 shuffles them
ifeq ($(ARGS),)
	@$(PYTEST) $(PARALLEL) $(ORDER) $(ORDINARY) $(TESTS)
else
	@$(PYTEST) $(ORDER) $(ARGS)
endif

.PHONY: test-all
test-all: setup ## all tests but those of make soak, on Spark; before a capability counts as done, and each night
	@export WALDELTA_TESTS_ON_SPARK=1; $(PYTEST) $(PARALLEL) $(ORDER) -m "not soak" $(TESTS) $(ARGS)

.PHONY: nightly
nightly: setup ## test-all, mutations, a sixth of the soak, the matrix of versions; names at its end what failed
	@$(RUN) $(PYTHON) -m tests.nightly $(ARGS)

MINUTES ?= 15
.PHONY: share
share: setup ## a share of what make test leaves out, chosen by the number of commits, within MINUTES=15; CI runs it
	@$(RUN) $(PYTHON) -m tests.share test-all --minutes $(MINUTES) $(ARGS)

.PHONY: test-profile
test-profile: setup ## write what the last runs of the tests took to tests/profile.md, and the sizes of the tiers
	@$(RUN) $(PYTHON) -m tests.tiers

.PHONY: mutations
mutations: setup ## whether tests catch the defects of tests/mutations: ARGS="--only 3,7", or --unit
	@$(RUN) $(PYTHON) -m tests.mutations $(ARGS)

# They wait for nothing, and each process imports everything anew.
.PHONY: unit
unit: PROCESSES := 2
unit: setup ## tests without PostgreSQL, Spark or Airflow's processes
	@$(PYTEST) $(PARALLEL) $(ORDER) $(ORDINARY) tests/unit $(ARGS)

.PHONY: pg
pg: setup ## tests on the embedded PostgreSQL
	@$(PYTEST) -m pg $(ARGS)

.PHONY: spark
spark: setup ## tests with a Spark session
	@$(PYTEST) -m spark $(ARGS)

.PHONY: e2e
e2e: setup ## tests on the whole stack: real scheduler, real Spark Connect server
	@$(PYTEST) tests/e2e $(ARGS)

ROUNDS ?= 50
SCENARIOS ?= 320
.PHONY: soak
soak: setup ## every fault at every step, four random kills a round, and the random tests: ROUNDS=50 of each, SCENARIOS=320 of publications
	@failed=0; run() { ( $(RUN) $(PYTHON) -m "$$@" ) || failed=1; }; \
	  run tests.soak.fault_matrix; \
	  run tests.soak.random_kills --kills $$((2 * $(ROUNDS))); \
	  run tests.soak.random_kills --connect --kills $$((2 * $(ROUNDS))); \
	  run tests.soak.random_kills --s3 --kills $$((2 * $(ROUNDS))); \
	  run tests.soak.mend_kills --kills $$((4 * $(ROUNDS))); \
	  run tests.soak.mend_kills --s3 --kills $$((2 * $(ROUNDS))); \
	  run tests.soak.page docs/explanation/guarantees.md; exit $$failed
	@export WALDELTA_ROUNDS=$(ROUNDS) WALDELTA_SCENARIOS=$(SCENARIOS); failed=0; \
	  ( $(PYTEST) tests/integration/oracle/test_native_subscriber.py tests/integration/oracle/test_random_workload.py tests/integration/repair/test_repair.py \
	  tests/integration/setup/test_preflight_random.py tests/integration/row_filter/test_row_filter_engine.py tests/integration/apply/test_copies.py tests/unit/changes tests/unit/pgoutput $(ARGS) ) || failed=1; \
	  ( $(PYTEST) -m soak tests/integration tests/e2e ) || failed=1; exit $$failed

.PHONY: bench
bench: setup ## how fast it is, beside what the parts allow: ARGS="--list", "--only NAME", "--all", "--scale 0.05"
	@$(RUN) $(PYTHON) -m benchmarks $(ARGS)

.PHONY: bench-pages
bench-pages: setup ## CPU and size of Airflow's pages: 200 pipelines, and one with 10,000 runs
	@$(PYTHON) -m benchmarks.pages $(ARGS)

.PHONY: bench-check
bench-check: setup ## what of the last make bench failed or is worse than the stored reference; ARGS=--partial after a part of the workloads, --accept stores the last
	@$(PYTHON) -m benchmarks.check $(ARGS)

##@ Odds and ends
.PHONY: schema
schema: setup ## write the pipeline file's JSON Schema for editors
	@$(PYTHON) -c 'import json, waldelta.config.pipeline_file as f; print(json.dumps(f.json_schema(), indent=2))' > include/pipelines/pipeline.schema.json
	@echo include/pipelines/pipeline.schema.json

.PHONY: reference
reference: setup ## write the generated parts of docs/reference from the code; ARGS=--check only compares
	@$(PYTHON) tools/reference.py $(ARGS)

.PHONY: release
release: setup ## build sdist and wheel into dist/, check them and their dependencies' licences; signs and uploads nothing
	@rm -rf dist
	@$(PYTHON) -m build --no-isolation
	@$(BIN)/twine check --strict dist/*
	@$(BIN)/check-wheel-contents dist/*.whl
	@$(PYTHON) tools/licences.py
	@echo "Next: try the wheel in another environment (docs/how-to/run-in-airflow.md). A version with .dev is no release:"
	@echo "write its heading in CHANGELOG.md, commit, git tag vX.Y.Z, make release again, then sign and upload dist/ yourself."

.PHONY: clean
clean: ## stop the stack, delete its data and what the tools leave behind; .venv and .cache stay
	@if [ -x $(PYTHON) ]; then $(PYTHON) -m demo.stack down; fi
	@rm -rf dist .waldelta .pytest_cache .mypy_cache .ruff_cache spark-warehouse metastore_db derby.log
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

.PHONY: distclean
distclean: clean ## and delete .venv and .cache too
	@rm -rf .venv .cache
