# The first target that you make sets up .venv by requirements.lock. Needs python3 (3.11 to 3.14, with venv), make and git.
#
#   make demo           archive this machine's own Python files through Dagster, and fetch some back
#                       (FOLDER=DIR or BUCKET=NAME instead; INVENTORY=Parquet by an inventory report)
#   make ui             open the Dagster UI on the demo (PORT=3000)
#   make network        keep the demo's Jackal network running, for the demo and your own buckets; Ctrl-C ends it
#                       (FUND=jkl1… gives this address coins, and ends if it already runs)
#   make setup          set up .venv, and the compiled Merkle root if cargo is installed
#   make test           most behaviours, in minutes (ARGS as for pytest)
#   make test-changed   the same, and the thorough tests of what changed since .ci/tested, as CI does
#   make test-all       everything, also faults, fuzz inputs, daemons and the documents' commands; writes .ci/tested
#   make lint types     ruff, mypy and, if cargo is installed, rustfmt and clippy
#   make test-sqlalchemy-2.0   the ledger's tests with the newest SQLAlchemy 2.0
#   make test-dagster-versions  the tests of our code for Dagster with the oldest and the newest version that the package allows
#   make test-jackal    from an empty ledger to proofs, on the network of JACKAL_LCD or a loopback one
#   make reliability    try every fault, and write docs/explanation/reliability.md
#   make soak           the same, with more than 1,000 kills
#   make bench          measure against peers, and write docs/reference/benchmarks.md (CASE=NAME: one case; CASE=ledger-size:
#                       the ledger with 2 and 20 million rows, which needs 25 GB of disk)
#   make bench-quick    the same at a tenth of the size; keeps nothing
#   make bench-scaling  measure costs at three sizes, and 100 workers on one ledger (CASE=NAME)
#   make docs           write the generated pages
#   make site           build the documentation as a site, by zensical, in .caf/site
#   make screenshots    take the pictures of the UI again (needs chromium and chromium-driver)
#   make wheel          build the wheels into dist/, and test them in an empty environment (PYTHON=… names its Python)
#   make image          build the image of deploy/compose by docker, podman or buildah (EXTRAS=celery or k8s adds packages)
#   make lock           resolve the dependencies again

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NATIVE := $(VENV)/.native
CARGO_TARGET := $(CURDIR)/.caf/cargo
CARGO_ONCE := CARGO_NET_RETRY=0 CARGO_HTTP_TIMEOUT=10
UV_VERSION := 0.13.8
# Let pytest keep the rewritten test modules: rewriting is half of a collection's CPU time.
export PYTHONDONTWRITEBYTECODE :=
# As in caf_pipeline/entry.py, also for test processes and Dagster's processes.
export OPENBLAS_NUM_THREADS ?= 1
export PYDANTIC_DISABLE_PLUGINS ?= __all__

# The first interpreter that is new enough and has venv. pyenv's shims fail, and are skipped. The system's Python comes first:
# distributions compile it with profile-guided optimization, pyenv does not, and the tests take a twelfth longer.
FIND_PYTHON := for python in $(PYTHON) /usr/bin/python3 python3 python3.14 python3.13 python3.12 python3.11; do \
	  "$$python" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null \
	  && { "$$python" -c 'import sys; print(sys.executable)'; exit 0; }; done; exit 1

.PHONY: help setup lint-native demo ui network test test-changed test-all test-sqlalchemy-2.0 test-dagster-versions test-jackal reliability soak lint types bench bench-quick bench-scaling docs site screenshots wheel image lock clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(NATIVE)

$(READY): pyproject.toml requirements.lock
	@python=$$($(FIND_PYTHON)) || { \
	  echo "make: no python3 of 3.11 to 3.14 with venv was found; install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }; \
	"$$python" -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "uv==$(UV_VERSION)"
	$(BIN)/uv pip sync --quiet --compile-bytecode --python $(BIN)/python --require-hashes requirements.lock
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	@touch $@

# The compiled Merkle root. Everything works without it, slower: a failed build does not fail make, and the next `make setup`
# tries again. CARGO_ONCE makes cargo try crates.io once, for 10 s a connection.
$(NATIVE): $(READY) $(wildcard native/*.toml native/*.lock native/src/*)
	@$(BIN)/uv pip uninstall --quiet --python $(BIN)/python caf-pipeline-native 2>/dev/null || true
	@rm -rf $(VENV)/native
	@if ! command -v cargo >/dev/null; then \
	  echo "caf-pipeline-native is not built, since there is no cargo: Merkle roots are taken in Python"; \
	elif { CARGO_TARGET_DIR=$(CARGO_TARGET) $(CARGO_ONCE) $(BIN)/uv build --quiet --wheel --out-dir $(VENV)/native ./native \
	  && $(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps $(VENV)/native/*.whl; } >$(VENV)/native.log 2>&1; then touch $@; \
	else echo "caf-pipeline-native could not be built ($(VENV)/native.log says why): Merkle roots are taken in Python"; fi

demo: $(READY)
	@$(BIN)/python demo/run.py $(if $(FOLDER),--folder "$(FOLDER)") $(if $(BUCKET),--bucket "$(BUCKET)") $(if $(INVENTORY),--inventory "$(INVENTORY)")

ui: $(READY)
	@exec $(BIN)/python demo/ui.py $(if $(BUCKET),--bucket "$(BUCKET)") $(if $(PORT),--port "$(PORT)")

network: $(READY)
	@$(BIN)/python demo/network.py $(if $(FUND),"$(FUND)")

# support/scheduling.py sets the number of processes, and runs the longest files first. A file stays in one process, because
# its tests share a network.
ALL_TESTS := $(BIN)/pytest --numprocesses auto --dist loadfile --no-loadscope-reorder --durations 30

test: $(READY)
	$(ALL_TESTS) -m "not thorough" --hypothesis-profile few $(ARGS)

# The last commit whose whole tests passed, and what was skipped there. Commit the file after `make test-all`.
TESTED := .ci/tested

test-all: $(READY)
	$(ALL_TESTS) $(if $(ARGS),$(ARGS),--record=$(TESTED))

test-changed: $(READY)
	$(ALL_TESTS) --changed-since=$(TESTED) --hypothesis-profile few $(ARGS)

# A project with Dagster's storage on Postgres may have to stay at SQLAlchemy 2.0: with 2.1 dagster-postgres uses psycopg 3 for a
# plain postgresql:// URL.
SQLALCHEMY_2_0 := $(CURDIR)/.caf/sqlalchemy-2.0

test-sqlalchemy-2.0: $(READY)
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --target $(SQLALCHEMY_2_0) --upgrade --no-deps "sqlalchemy~=2.0.0"
	PYTHONPATH=$(SQLALCHEMY_2_0) $(BIN)/python -c "import sqlalchemy; assert sqlalchemy.__version__ < '2.1'; print('SQLAlchemy', sqlalchemy.__version__)"
	PYTHONPATH=$(SQLALCHEMY_2_0) $(BIN)/pytest caf_pipeline_tests/ledger --numprocesses auto --dist loadfile $(ARGS)

# The packages of Dagster and the client of Kubernetes, which dagster-k8s depends on closely: the other ones are those of the lock. A version that .venv has is not tested again. Dagster's older
# versions warn of deprecations of their own.
DAGSTER_VERSIONS := $(CURDIR)/.caf/dagster
DAGSTER_OLDEST := $(shell sed -n 's/.*"dagster>=\([0-9.]*\),.*/dagster==\1/p' pyproject.toml)
DAGSTER_TESTS := caf_pipeline_tests/defs caf_pipeline_tests/automation caf_pipeline_tests/dagster_host caf_pipeline_tests/test_component.py

test-dagster-versions: $(READY)
	@mkdir -p $(DAGSTER_VERSIONS); set -e; for version in $(DAGSTER_OLDEST) dagster; do \
	  folder=$(DAGSTER_VERSIONS)/$$version; \
	  echo "$$version" | $(BIN)/uv pip compile --quiet --no-header --no-annotate --all-extras --python $(BIN)/python pyproject.toml - | grep -E '^(dagster|kubernetes)' >$$folder.txt; \
	  if grep -qxF "$$(grep -o '^dagster==[^ ]*' requirements.lock)" $$folder.txt; then echo "$$version is that of requirements.lock"; continue; fi; \
	  $(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --upgrade --target $$folder --requirement $$folder.txt; \
	  PYTHONPATH=$$folder $(BIN)/python -c "import dagster; print('Dagster', dagster.__version__)"; \
	  PYTHONPATH=$$folder $(BIN)/pytest -W default -m 'not thorough' --hypothesis-profile few $(DAGSTER_TESTS) --numprocesses auto --dist loadfile $(ARGS); \
	done

test-jackal: $(READY)
	$(BIN)/pytest caf_pipeline_tests/store/test_jackal_network.py $(ARGS)

# The tests of the fault matrix, and their counts. FAULTS_GO_ON=1 skips tests that passed before an interruption.
FAULT_LOG := .caf/fault-log
FAULT_TESTS = $(BIN)/pytest $(or $(TESTS),caf_pipeline_tests) --numprocesses auto --dist load --faults --fault-log=$(FAULT_LOG) $(if $(FAULTS_GO_ON),--go-on)

reliability: $(READY)
	$(FAULT_TESTS) $(ARGS)
	@$(BIN)/python -m caf_pipeline_tests.faults.report $(FAULT_LOG) docs/explanation/reliability.md

soak: $(READY)
	$(FAULT_TESTS) --soak --verbose $(ARGS)
	@$(BIN)/python -m caf_pipeline_tests.faults.report --soak $(FAULT_LOG) docs/explanation/reliability.md

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(ZENSICAL) --strict
	@if cargo fmt --version >/dev/null 2>&1 && cargo clippy --version >/dev/null 2>&1 \
	  && $(CARGO_ONCE) cargo fetch --quiet --locked --manifest-path native/Cargo.toml; then $(MAKE) --no-print-directory lint-native; \
	else echo "native/ is not checked: that needs cargo with rustfmt and clippy, and crates.io"; fi

lint-native:
	cd native && cargo fmt --check && cargo clippy --quiet --locked --target-dir $(CARGO_TARGET) -- --deny warnings

types: $(READY)
	$(BIN)/mypy

# versitygw is the S3 server of the measurements if Go can install it, else moto's, which is slow.
TOOLS := .caf/tools
$(TOOLS)/versitygw:
	@if command -v go >/dev/null; then GOBIN="$(CURDIR)/$(TOOLS)" go install github.com/versity/versitygw/cmd/versitygw@v1.8.0; fi

bench: setup $(TOOLS)/versitygw
	$(BIN)/python -m benchmarks --keep $(CASE)

bench-scaling: setup $(TOOLS)/versitygw
	$(BIN)/python -m benchmarks.slopes --keep $(CASE)
	$(BIN)/python -m benchmarks.workers --keep
	$(BIN)/python -m benchmarks.scaling

bench-quick: setup $(TOOLS)/versitygw
	$(BIN)/python -m benchmarks --scale quick --pairs 2 $(CASE)

docs: $(READY)
	$(BIN)/python -m caf_pipeline.cli.reference docs/reference/cli.md
	$(BIN)/python docs/schema_page.py docs/reference/schema.md

ZENSICAL := $(BIN)/zensical build --clean

# Mermaid draws the diagrams. If npm is missing, the site loads mermaid from elsewhere.
MERMAID := docs/assets/mermaid.min.js
$(MERMAID):
	@mkdir -p $(@D)
	@if command -v npm >/dev/null; then cd $(@D) && npm pack --silent mermaid@11.17.2 >/dev/null \
	  && tar --extract --gzip --strip-components=2 --file mermaid-11.17.2.tgz package/dist/mermaid.min.js && rm mermaid-11.17.2.tgz; fi

site: $(READY) $(MERMAID)
	$(ZENSICAL) --strict
	@echo "the site is in .caf/site: open .caf/site/index.html"

screenshots: $(READY)
	CAF_SCREENSHOTS=$(CURDIR)/docs/images $(BIN)/pytest caf_pipeline_tests/defs/test_pages.py

# The extra `logs` is for `caf logs search`. Without the extra `host`, all commands must work on SQLite.
wheel: setup
	@rm -rf dist
	$(BIN)/uv build --quiet --wheel --out-dir dist
	@if [ -f $(NATIVE) ]; then cp $(VENV)/native/*.whl dist; fi
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT \
	&& $(BIN)/uv venv --quiet --python "$(or $(PYTHON),$(BIN)/python)" "$$folder" \
	&& $(BIN)/uv pip install --quiet --python "$$folder/bin/python" --constraint requirements.lock \
	  "$$(echo dist/caf_pipeline-*.whl)[logs]" $$(ls dist/caf_pipeline_native-*.whl 2>/dev/null) \
	&& CAF_UNDER_TEST="$$folder/bin/caf" $(BIN)/pytest -k "as_it_is_installed or installed_package" caf_pipeline_tests/cli/test_installed.py
	@ls dist/*.whl

# `info` fails if the program is missing, and for docker if its daemon is. buildah alone cannot run the image.
image:
	@for builder in docker podman buildah; do \
	  if "$$builder" info >/dev/null 2>&1; then \
	    exec "$$builder" build --build-arg EXTRAS=$(EXTRAS) --tag caf-pipeline --file deploy/compose/Dockerfile .; fi; done; \
	echo "make: the image needs docker with its daemon, podman, or buildah" >&2; exit 1

lock: $(READY)
	$(BIN)/uv pip compile pyproject.toml --all-extras --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-emit-find-links --upgrade --quiet --output-file requirements.lock

clean:
	rm -rf $(VENV)
