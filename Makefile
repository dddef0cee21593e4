# Everything runs in .venv, which is made on first use. `make help` lists the targets.
PYTHON ?= python3
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq -c constraints.txt
STAMP := $(VENV)/stamp
CLIENTS := .venv-clients/bin
NEWEST := .venv-newest/bin
# where pip finds torch for a CPU; the one of PyPI may come with several GB of GPU libraries
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# pairs of an interpreter and a release of torch, each in an environment of its own; pip finds torch where it is set up to
MATRIX ?= python3.12:2.11.0 python3.13:2.12.1 python3.12:2.13.0
# another release of a package for all of these, as numpy==1.26.4; then without JAX, which needs NumPy 2
MATRIX_WITH ?=
# what another torch or Python would break: registration of ops, derivatives, compiled and exported graphs, transforms,
# private names of torch, plans, copies, the bridge to JAX, imports and the package
MATRIX_TESTS := $(addprefix tests/,\
	arguments/test_custom_ops*.py clients/test_dispersion.py clients/test_electrostatics.py \
	clients/test_import_paths.py derivatives/test_custom_ops*.py derivatives/test_kernel_functions.py \
	derivatives/test_pair.py derivatives/test_response.py derivatives/test_training.py jax/test_bridge*.py \
	jax/test_torch_bridge*.py package/test_optional_imports.py package/test_package.py \
	package/test_torch_internals.py resources/test_cache.py resources/test_copies.py resources/test_openmp.py \
	dynamics/test_compiled_and_recorded.py resources/test_state.py routes/test_all_calls_compiled.py \
	routes/test_custom_ops*.py routes/test_default_device.py \
	routes/test_ewald_compiled.py routes/test_launch.py routes/test_library_ops.py routes/test_repeated_sums*.py \
	values/test_neighbors.py values/test_verlet.py)
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test test-later test-slow test-long test-all test-newest test-matrix lint format docs bench stand-in clients mutations clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## */  \1|/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-12s%s\n", $$1, $$2 }'

# torch first and pinned: left to the resolver, pip may fetch several GB of GPU builds before it decides.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	@test -x $(BIN)/python || { echo "making $(VENV) (a few minutes, once)"; $(PYTHON) -m venv $(VENV); }
	@$(PIP) "$$(grep '^torch==' constraints.txt)" "$$(grep '^hatchling==' constraints.txt)"
	@$(PIP) --no-build-isolation -e '.[ase,test,docs,bench,demo]'
	@touch $@

demo: $(STAMP)  ## train charges with long-range electrostatics, run dynamics, draw a picture
	@$(BIN)/python examples/01_train_charges.py

test: $(STAMP)  ## the tests of every day: each property of each call (tests marked gpu run where there is a GPU)
	$(PYTEST) -m "not slow and not later"

test-later: $(STAMP)  ## tests that take seconds and see what a quicker one sees, elsewhere; CI runs them after `test`
	$(PYTEST) -m "later and not slow"

test-slow: $(STAMP)  ## tests of minutes: soaks, races, ranks, checks of memory, inductor everywhere
	HYPOTHESIS_PROFILE=long $(PYTEST) -m slow

test-long: $(STAMP)  ## long runs of hypothesis
	HYPOTHESIS_PROFILE=long $(PYTEST) -m "hypothesis and not slow"

test-all: test test-later test-slow test-long  ## all tests, in these four parts

test-newest:  ## the tests with the newest torch, Warp, NumPy and JAX there are (JAX: Python 3.12), in .venv-newest
	@test -x $(NEWEST)/python || $(PYTHON) -m venv .venv-newest
	@$(NEWEST)/python -m pip install -qq --upgrade --index-url $(TORCH_INDEX) torch
	@$(NEWEST)/python -m pip install -qq --upgrade warp-lang numpy scipy jax "$$(grep '^hatchling==' constraints.txt)"
	@grep -viE '^(torch|warp-lang|numpy|scipy|jax|jaxlib)==' constraints.txt > .venv-newest/constraints.txt
	@$(NEWEST)/python -m pip install -qq --no-build-isolation -c .venv-newest/constraints.txt -e '.[ase,test]'
	@$(NEWEST)/python -c 'import jax, numpy, torch, warp; \
		print(*(f"{module.__name__} {module.__version__}" for module in (torch, warp, numpy, jax)))'
	$(NEWEST)/python -m pytest -q -n $(WORKERS) --dist worksteal -m "not slow"

test-matrix:  ## a part of the tests with other releases of torch and Python, in .venv-matrix-* (MATRIX="python3.12:2.11.0")
	@for pair in $(MATRIX); do \
		python=$${pair%%:*} torch=$${pair##*:}; environment=.venv-matrix-$$(basename $$python)-$$torch; \
		$$python -c "" 2> /dev/null || { echo "$$pair: left out, there is no $$python"; continue; }; \
		test -x $$environment/bin/python || $$python -m venv $$environment || exit 1; \
		pip="$$environment/bin/python -m pip --disable-pip-version-check install -qq"; \
		grep -viE '^(torch|sympy|networkx|setuptools)==' constraints.txt > $$environment/constraints.txt; \
		$$pip torch==$$torch "$$(grep '^hatchling==' constraints.txt)" || exit 1; \
		$$pip --no-build-isolation -c $$environment/constraints.txt -e '.[ase,test]' || exit 1; \
		$(if $(MATRIX_WITH),$$pip --no-deps $(MATRIX_WITH) || exit 1; \
		$$environment/bin/python -m pip uninstall -qqy jax jaxlib;) \
		$$environment/bin/python -c 'import sys, numpy, torch; \
			print("Python", sys.version.split()[0], "torch", torch.__version__, "numpy", numpy.__version__)'; \
		$$environment/bin/python -m pytest -q -n $(WORKERS) --dist worksteal -m "not slow" $(MATRIX_TESTS) || exit 1; \
	done

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(STAMP)  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(STAMP)  ## the HTML documentation, without warnings, in docs/_build/html
	$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build/html

bench: $(STAMP)  ## all benchmarks at small sizes, with tables and pictures in benchmarks/results
	$(BIN)/python benchmarks/run.py

stand-in: $(STAMP)  ## a wheel without files for what requires nvalchemi-toolkit-ops (RELEASE=0.5.0)
	@$(BIN)/python -m nvalchemiops stand-in $(if $(RELEASE),--release $(RELEASE))

# Their requirements on each other and on GPU packages do not fit together, so they come without, but for what is run.
clients:  ## install real clients into .venv-clients and run their code on this package (two of them: Python 3.12)
	@test -x $(CLIENTS)/python || $(PYTHON) -m venv .venv-clients
	@$(CLIENTS)/python -m pip install -qq "$$(grep '^torch==' constraints.txt)"
	@$(CLIENTS)/python -m pip install -qq -c constraints.txt -e .
	@$(CLIENTS)/python -m pip install -qq --no-deps --ignore-requires-python -r tests/clients/clients.txt
	@$(CLIENTS)/python -m pip install -qq -r tests/clients/requirements.txt
	$(CLIENTS)/python tests/clients/run.py

mutations: $(STAMP)  ## whether tests notice the mistakes of tests/mutations.txt, one at a time (half an hour)
	@$(BIN)/python -m tests.mutations

clean:  ## remove what the targets above made, except environments and Warp's kernel cache
	rm -rf demo.png build dist docs/_build docs/gallery.md benchmarks/results examples/output .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find nvalchemiops tests benchmarks examples docs -type d -name __pycache__ -prune -exec rm -rf {} +
