# What a person runs and what CI runs are the same targets.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.laurel-installed

.PHONY: help setup demo test check format bench clean
help:
	@echo "make demo    set up, then train, prove and use a small reward model (offline, minutes)"
	@echo "make test    set up, then run the tests"
	@echo "make check   format, lint and types"
	@echo "make bench   the benchmarks that need no peer (see benchmarks/README.md)"
	@echo "make setup   only make the virtual environment $(VENV)"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Laurel needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,lora]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/laurel demo

test: $(STAMP)
	$(BIN)/python -m pytest

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	$(BIN)/python benchmarks/exactness.py
	$(BIN)/python benchmarks/rm_scoring.py

clean:
	rm -rf $(VENV) demo logs results build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
