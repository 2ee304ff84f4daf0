# Every target sets up .venv itself; a second `make` finds it ready.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
DOCS = $(BIN)/python -m pip install --quiet -c constraints.txt --group docs
PARALLEL := -n logical --dist worksteal  # a process per core; tests run on one thread each

.PHONY: demo test test-slow test-unpinned test-browser test-slurm test-postgres audit lint
.PHONY: documents docs docs-serve constraints clean

demo: $(READY)           ## the main job on data that needs no download
	$(BIN)/cmcl demo

test: $(READY)           ## the tests, fast enough to be run all the time
	$(BIN)/python -m pytest $(PARALLEL)

test-slow: $(READY)      ## the tests that take longer
	$(BIN)/python -m pytest $(PARALLEL) -m slow

test-unpinned:           ## a new user's install: newest versions, an empty folder; TORCH=2.11.0 for the oldest torch
	PYTHON=$(PYTHON) TORCH=$(TORCH) .ci/unpinned

test-browser: $(READY)   ## the report in a real browser, the system's chromium (installed here on Debian, by root)
	command -v chromium || { apt-get update && apt-get install --yes chromium; }
	$(BIN)/python -m pip install --quiet -c constraints.txt --group browser
	$(BIN)/python -m pytest tests/browser -m browser

test-slurm: $(READY)     ## `cmcl reproduce --launcher slurm` on a SLURM of one node (installed here on Debian, by root)
	command -v slurmctld && command -v munged || { apt-get update && apt-get install --yes slurm-wlm munge; }
	$(BIN)/python -m pytest tests/cluster/test_slurm.py -m cluster -s

test-postgres: $(READY)  ## `cmcl tune` by two workers on PostgreSQL (installed here on Debian, by root)
	ls /usr/lib/postgresql/*/bin/pg_ctl || { apt-get update && apt-get install --yes postgresql; }
	$(BIN)/python -m pip install --quiet -c constraints.txt --group postgres
	$(BIN)/python -m pytest tests/cluster/test_postgres.py -m cluster -s

audit: $(READY)          ## known vulnerabilities of the exact versions; NOT CHECKED if the database cannot be reached
	-$(BIN)/python -m pip install --quiet -c constraints.txt --group audit
	$(BIN)/python .ci/audit.py

documents: $(READY)      ## tables and pictures in README and docs, from results/
	$(BIN)/python -m cmcl.report.documents README.md docs/*.md docs/*/*.md
	$(BIN)/python docs/make.py

docs: $(READY)           ## the documentation site, in site/; nothing in it needs the network
	$(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	$(BIN)/python docs/offline.py site

docs-serve: $(READY)     ## the site at http://127.0.0.1:8000, built again when a page changes
	$(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

lint: $(READY)           ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# One pip call: torch is pinned in the constraints, so nothing else can choose another build of it.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade -c constraints.txt pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch -e '.[report,fetch,export,tensorboard,tune,slurm]' --group dev --group frameworks
	touch $@

constraints:             ## write down the exact versions that are installed now
	$(BIN)/python -m pip freeze --all --exclude-editable | sed 's/+cpu$$//' | grep -v '^setuptools==' > constraints.txt
	touch $(READY)

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
