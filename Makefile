# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Everything is installed into .venv in this checkout; nothing needs root but the lab.

PYTHON ?= python3
ENGINE ?= llamacpp
SCENARIO ?= default power_cut secrets
# What real engines on the lab's hosts need beyond a small Debian; one root for all of the lab's tests.
export LAB_EXTRA_PKGS ?= libgomp1,libnuma1
VENV := .venv
BIN := $(VENV)/bin
export PYTHONDONTWRITEBYTECODE := 1

.PHONY: help demo demo-clean test slow-test explore real-test sanity units matrix lab-test lab-quick lab-ci lab-pytest molecule bench build clean
.PHONY: lint lint-python lint-ansible lint-docs lint-changelog lint-licences lint-galaxy lint-ee

help:
	@echo "make demo              a real two-rank llama.cpp replica on this machine's CPU"
	@echo "                       ENGINE=sim: four simulated GPU ranks; ENGINE=vllm: a real vLLM with a LoRA adapter (installs 2.8 GB, some minutes)"
	@echo "make demo-clean        remove it"
	@echo "make test              unit, module, contract and end-to-end tests on this machine (no root, about 3 minutes)"
	@echo "make slow-test         the rest of them: every case of the gate, the simulator and the engines' behaviour"
	@echo "make real-test         real vLLM and SGLang on the CPU, alone and over two hosts (root; installs 6.3 GB; 40 minutes)"
	@echo "make explore           unit tests with random examples that no run has seen"
	@echo "make sanity            ansible-test sanity on the committed tree"
	@echo "make units             ansible-test units on the committed tree: the unit tests as collections run theirs"
	@echo "make lint              ruff, mypy, ansible-lint, antsibull-docs, antsibull-changelog, reuse and galaxy-importer; lint-python, lint-ansible ... alone"
	@echo "make matrix            unit and end-to-end tests on every Python and ansible-core that can be had here (CELLS=\"3.13:2.22 3.9\" for some, --life or --smoke for less)"
	@echo "make lab-test          tests on several real hosts, all molecule scenarios among them (root, Debian packages)"
	@echo "make lab-quick         the same with three scenarios; SCENARIO=\"upgrade removal\" for others, make molecule for those alone"
	@echo "make lab-ci            two hosts: the simulator, llama.cpp and molecule's default scenario (root, about 3 minutes)"
	@echo "make bench             what runs cost, beside their goals (docs/performance.md); two of its figures need root"
	@echo "make build             the collection as a tarball"
	@echo "make clean             remove what make installed or built in this checkout"

$(VENV)/.demo: requirements/demo.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "python3 -m venv failed: on Debian and Ubuntu, apt install python3-venv"; exit 1; }
	@echo "Installing ansible-core and supervisor into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/demo.txt
	@touch $@

$(VENV)/.test: requirements/test.txt $(VENV)/.demo
	@echo "Installing the test tools into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/test.txt
	@touch $@

demo: $(VENV)/.demo
	@$(BIN)/python demo/demo.py deploy --engine $(ENGINE)

demo-clean: $(VENV)/.demo
	@$(BIN)/python demo/demo.py clean

test: $(VENV)/.test
	@$(BIN)/python -m pytest -q tests/unit tests/fake_nvml tests/module tests/contract tests/e2e -m "not slow and not lab and not real" -n 3

slow-test: $(VENV)/.test
	@$(BIN)/python -m pytest -q tests/unit tests/contract tests/e2e -m "slow and not lab and not real" -n 2

# One process: two engines that start side by side on few cores look as if they hung.
real-test: $(VENV)/.test
	@$(BIN)/python tests/cpu_engines.py vllm
	@$(BIN)/python tests/cpu_engines.py sglang
	@$(BIN)/python -m pytest -q -rs tests/contract tests/real -m real

# Properties with examples that no run has seen; what it finds becomes a test of its own.
explore: $(VENV)/.test
	@$(BIN)/python -m pytest -q tests/unit tests/module -m "not lab" -n 2 --hypothesis-profile=explore

sanity: $(VENV)/.demo
	@$(BIN)/python tests/run_ansible_test.py sanity

units: $(VENV)/.demo
	@$(BIN)/python tests/run_ansible_test.py units

matrix:
	@$(PYTHON) tests/matrix.py $(CELLS)

$(VENV)/.gates: requirements/gates.txt $(VENV)/.test
	@echo "Installing ansible-lint and others into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/gates.txt
	@touch $@

# They call each other and ansible by name.
LINT := PATH="$(CURDIR)/$(BIN):$$PATH" ANSIBLE_CONFIG="$(CURDIR)/ansible.cfg"

lint: lint-python lint-ansible lint-docs lint-changelog lint-licences lint-galaxy lint-ee

lint-python: $(VENV)/.test
	@$(BIN)/ruff check .
	@$(BIN)/mypy

lint-ansible: $(VENV)/.gates
	@$(LINT) ansible-lint --offline -q

lint-docs: $(VENV)/.gates
	@$(LINT) antsibull-docs lint-collection-docs --plugin-docs --validate-collection-refs all --skip-rstcheck .

lint-changelog: $(VENV)/.gates
	@$(LINT) antsibull-changelog lint

lint-licences: $(VENV)/.gates
	@$(LINT) reuse lint --lines

# What the index of collections does with a tarball; ansible-lint has run on the tree already.
lint-galaxy: $(VENV)/.gates
	@rm -rf .cache/galaxy && mkdir -p .cache/galaxy
	@$(LINT) ansible-galaxy collection build --force --output-path .cache/galaxy > .cache/galaxy/build.log
	@cd .cache/galaxy && $(LINT) GALAXY_IMPORTER_RUN_ANSIBLE_LINT=False GALAXY_IMPORTER_CHECK_REQUIRED_TAGS=True python -m galaxy_importer.main *.tar.gz \
	    > import.log 2>&1 || { cat import.log; exit 1; }
	@tail -n 1 .cache/galaxy/import.log

# What would be built; building it needs a container engine.
lint-ee: $(VENV)/.gates
	@$(LINT) ansible-builder create --file extensions/awx/execution-environment.yml --context .cache/ee --verbosity 1

$(VENV)/.lab: requirements/lab.txt $(VENV)/.test
	@echo "Installing molecule into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/lab.txt
	@touch $@

lab-test: lab-pytest
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/molecule test --all --no-command-borders --report

lab-quick: lab-pytest molecule

# The part that fits every run of continuous integration: a replica over two hosts, llama.cpp's RPC among them, and one scenario of molecule.
lab-ci: $(VENV)/.lab
	@$(BIN)/python -m pytest -q tests/lab/test_replica_on_hosts.py -m lab
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/molecule test --scenario-name default --no-command-borders

lab-pytest: $(VENV)/.lab
	@$(BIN)/python -m pytest -q tests/lab -m lab
	@$(BIN)/python -m pytest -q -rs tests/gpu

molecule: $(VENV)/.lab
	@for scenario in $(SCENARIO); do PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/molecule test --scenario-name $$scenario --no-command-borders || exit 1; done

bench: $(VENV)/.test
	@$(BIN)/python tests/bench/run.py

build: $(VENV)/.demo
	@$(BIN)/ansible-galaxy collection build --force

clean:
	rm -rf $(VENV) .engines .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis tests/fake_nvml/build
