# Two commands do all on a fresh machine: `make demo` and `make test`. Each sets up what it needs.
# `make test` is the first tier of the tests, `make test-rest` the second, `make test-long` what takes half an
# hour by itself, `make test-all` all of them.
# `make demo-all` is the demo with every stack.
PYTHON ?= python3
# A local wheel folder given to pip is passed on to uv, which does not read pip's settings (and parts by commas).
empty :=
comma := ,
export UV_FIND_LINKS ?= $(subst $(empty) $(empty),$(comma),$(strip $(PIP_FIND_LINKS)))

# In four processes, also on two cores: tests often wait for others. Those of a stack stay in one, which has it loaded.
# The threads of OpenBLAS would wait for each other, as `harness recommend` has found. Those of OpenMP spin while
# they wait: four runs of llama.cpp at once on two CPUs took 80 s, and 21 s where they sleep.
PYTEST = OPENBLAS_NUM_THREADS=1 OMP_WAIT_POLICY=passive .venv/bin/python -m pytest -n 4 --dist loadgroup --durations 20
RESULTS = build/tests
INSTALL = .venv/bin/uv pip install --no-config --quiet --python .venv/bin/python
# How properties are tried beyond the first tier: all (thousands of examples, always the same) or random.
HYPOTHESIS_PROFILE ?= all

.PHONY: setup fleet fleet-demo demo demo-all test test-rest test-long test-all test-stack test-other test-gpu coverage flake lint docs lock clean

setup: .venv/.ready

# Exact versions with their hashes (`make lock`), and no settings of uv but those of variables (UV_INDEX_URL).
.venv/.ready: pyproject.toml requirements/dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "harness needs Python 3.10 or newer; try: make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	sed -n '/^uv==/,/[^\\]$$/p' requirements/dev.txt > .venv/uv.txt
	.venv/bin/python -m pip install --quiet --require-hashes --requirement .venv/uv.txt
	$(INSTALL) --compile-bytecode --require-hashes --requirements requirements/dev.txt
	$(INSTALL) --no-deps --no-build-isolation --editable .
	.venv/bin/python -m compileall -q harness runners
	@touch $@

# Ray, for `harness run --on`.
fleet: .venv/.fleet

.venv/.fleet: .venv/.ready requirements/fleet.txt
	$(INSTALL) --compile-bytecode --require-hashes --requirements requirements/fleet.txt
	@touch $@

# Three nodes on this machine, and the stack that computes nothing.
fleet-demo: .venv/.fleet
	.venv/bin/harness run fleet-demo --on local-cluster:3

demo: .venv/.ready
	.venv/bin/harness env create llamacpp
	.venv/bin/harness run configs/quickstart.yaml

demo-all: .venv/.ready
	.venv/bin/harness env create llamacpp hf bnb
	.venv/bin/harness run configs/quickstart-all.yaml

# Tests of a stack whose environment cannot be built are skipped, with the reason.
test: .venv/.ready
	-.venv/bin/harness env create llamacpp hf http
	$(PYTEST) --junitxml $(RESULTS)/test.xml

test-rest: .venv/.ready
	-.venv/bin/harness env create
	HYPOTHESIS_PROFILE=$(HYPOTHESIS_PROFILE) $(PYTEST) --junitxml $(RESULTS)/rest.xml \
	  -m "(slow or stack or browser or network or hypothesis) and not long"

# What takes many minutes of all CPUs, alone.
test-long: .venv/.ready
	-.venv/bin/harness env create llamacpp hf bnb gptqm
	.venv/bin/python -m pytest --durations 20 --junitxml $(RESULTS)/long.xml -m long

test-all: test test-rest test-long

# One stack's tests alone: make test-stack STACK=bnb
test-stack: .venv/.ready
	.venv/bin/harness env create llamacpp hf $(STACK)
	$(PYTEST) -m "stack(name='$(STACK)')"

# What is neither in the first tier nor of a stack.
test-other: .venv/.ready
	HYPOTHESIS_PROFILE=$(HYPOTHESIS_PROFILE) $(PYTEST) -m "(slow or browser or network or hypothesis) and not stack"

# What only a GPU can show, with the environments for it that there are.
test-gpu: .venv/.ready
	.venv/bin/python -m ci.gpu

# Branch coverage of both tiers, the processes that the tests start included.
coverage: .venv/.ready
	.venv/bin/python -m coverage erase
	-$(PYTEST) --cov --cov-branch --cov-report= -m ""
	.venv/bin/python -m coverage report --skip-empty

# Which tests fail now and then? make flake FLAKE="--runs 10 --tier test-all"
flake: .venv/.ready
	ci/flake.sh $(FLAKE)

lint: .venv/.ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

# The pages of docs/ as a site in build/site: no broken link, no page left out.
docs: .venv/.ready
	$(INSTALL) --require-hashes --requirements requirements/docs.txt
	.venv/bin/mkdocs build --strict --quiet

# The locks, of requirements/ and runners/locks/: new pins alone, or make lock LOCK=--upgrade, or LOCK="hf build".
lock: .venv/.ready
	.venv/bin/python -m ci.lock $(LOCK)

clean:
	rm -rf .venv build
