# make demo | test | test-all | fuzz | lint | types | docs | notebooks | bench | bench-all | clean | help: each sets up
# what it needs in .venv, and does so again when pyproject.toml or constraints.txt change. PYTHON chooses the interpreter of a
# new .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install -qq --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-all fuzz lint types docs notebooks bench bench-all clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    fine-tune a small BERT on private text in five ways; about 50 s after set-up"
	@echo "make test    the fast tests, in minutes (ARGS='-k plan' passes arguments to pytest)"
	@echo "make test-all    every test that needs no GPU, including the slow ones"
	@echo "make fuzz    random models, kills, damaged files, hostile names: about 20 minutes; writes docs/reliability.md"
	@echo "make docs    build the documentation into site/; a broken link or an undocumented name is an error"
	@echo "make notebooks   execute docs/notebooks and store their outputs, in about a minute (ARGS=FILE for one of them)"
	@echo "make lint    ruff: lint and format"
	@echo "make types   mypy over package and tests"
	@echo "make bench   time a private step beside a non-private one; a few minutes"
	@echo "make bench-all   every benchmark that the device allows, with tables and pictures; DATA= and MODEL= add abstracts"
	@echo "make clean   remove .venv, caches and built files"
	@echo "PYTHON=python3.12 chooses the interpreter of a new .venv (3.11 or later)"

demo: $(VENV)/.train
	@$(BIN)/dpoptim train $(ARGS)

# One thread per process: xdist already keeps the cores busy.
MARKS := not gpu and not slow
test: $(VENV)/.dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal -m "$(MARKS)" $(ARGS)

test-all: MARKS := not gpu
test-all: test

# The last part needs Chromium: apt-get install chromium.
fuzz: $(VENV)/.dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --json results/reliability.json --write docs/reliability.md $(ARGS)

docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean

notebooks: $(VENV)/.dev
	@$(BIN)/python -m tests.notebooks $(ARGS)

lint: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(VENV)/.dev
	@$(BIN)/mypy

bench: $(VENV)/.dev
	@$(BIN)/python benchmarks/small.py $(ARGS)

bench-all: $(VENV)/.dev
	@$(BIN)/python benchmarks/steps.py --json benchmarks/results/steps.json --write benchmarks/steps.md
	@$(BIN)/python benchmarks/picture.py benchmarks/results/steps.json -o docs/images/speed.png
	@$(BIN)/python benchmarks/trainer.py --profile --json benchmarks/results/trainer.json --write benchmarks/trainer.md
	@$(BIN)/python benchmarks/noise.py --write benchmarks/noise.md
	@$(BIN)/python benchmarks/growth.py --json benchmarks/results/growth.json --plot docs/images/growth.png
	@$(BIN)/python benchmarks/small.py --separate --json benchmarks/results/small.json --write benchmarks/small.md
	@test -z "$(DATA)" || $(BIN)/python benchmarks/abstracts.py --data "$(DATA)" --model "$(MODEL)" \
		--json benchmarks/results/abstracts.json --write benchmarks/abstracts.md

clean:
	@rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build site
	@find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@command -v $(PYTHON) > /dev/null || \
		{ echo "make: '$(PYTHON)' was not found; choose an interpreter with PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make: dpoptim needs Python 3.11 or later and '$(PYTHON)' is" \
			"$$($(PYTHON) -V 2>&1); choose another with PYTHON=python3.11" >&2; exit 1; }
	@echo "Making $(VENV) with $$($(PYTHON) -V) ..."
	@$(PYTHON) -m venv --clear $(VENV)

# torch comes first and alone: with its version settled, nothing after it can pull in another build.
$(VENV)/.runtime: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing torch (the large one) ..."
	@$(INSTALL) "$$(grep '^torch==' constraints.txt)"
	@echo "Installing dpoptim and what it runs on ..."
	@$(INSTALL) --editable .
	@touch $@

$(VENV)/.train: $(VENV)/.runtime
	@echo "Installing transformers ..."
	@$(INSTALL) --editable '.[train]'
	@touch $@

# Groups are read with tomllib, so that a pip without --group works too.
GROUP = $(BIN)/python -c 'import sys, tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"][sys.argv[1]], sep="\n")'

$(VENV)/.dev: $(VENV)/.runtime
	@echo "Installing the tools that check it ..."
	@$(GROUP) dev > $(VENV)/dev-requirements.txt
	@$(INSTALL) --requirement $(VENV)/dev-requirements.txt
	@touch $@

# The site is built from the sources without importing them: torch is not needed.
$(VENV)/.docs: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing MkDocs ..."
	@$(GROUP) docs > $(VENV)/docs-requirements.txt
	@$(INSTALL) --requirement $(VENV)/docs-requirements.txt
	@touch $@
