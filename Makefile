# make demo   the whole way on generated data, with a few training steps
# make test   the tests
# make test-exhaustive  every case of what make test takes samples of
# make test-versions  the same with the oldest and newest packages, in VERSIONS (.versions)
# make wheel  the wheel and the sdist, built, installed in a fresh environment and used, in WHEEL (.wheel)
# make docs   the site, in build/site: README.md and docs/ with Sphinx; a warning fails it
# make lint   ruff and mypy
# make peers  packs in other training frameworks, each in an environment of its own in PEERS (.peers)
# Each sets up what it needs in .venv on a machine with Python 3.11 and pip, and reuses it.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# Two OpenMP pools that spin while they wait slow each other down many times over.
export OMP_WAIT_POLICY := PASSIVE
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1
# Modules are compiled once, not by each of the processes that the tests start.
export PYTHONDONTWRITEBYTECODE :=

# The folder of the environments, which other checkouts may share.
export PEERS ?= .peers
TRAINERS := $(basename $(notdir $(wildcard tests/peers/*.txt)))

.PHONY: demo test test-exhaustive test-versions wheel docs lint format peers clean

demo: $(VENV)/.demo
	$(BIN)/offline-packing demo

test: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test-exhaustive: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m exhaustive -n 3 --dist worksteal

test-versions: $(VENV)/.test
	tests/versions/run.sh

wheel: $(VENV)/.demo
	tests/wheel/run.sh

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx --quiet --fail-on-warning -c docs . build/site
	@echo build/site/index.html

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

peers: $(VENV)/.test
	tests/peers/run.sh $(TRAINERS)

peers-%: $(VENV)/.test
	tests/peers/run.sh $*

clean:
	rm -rf $(VENV) .peers .versions .wheel demo_output build *.egg-info

$(VENV)/.demo $(VENV)/.test $(VENV)/.docs: $(VENV)/.%: setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$*]'
	touch $@
