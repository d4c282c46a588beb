# Two commands do all on a fresh machine: `make demo` and `make test`. Each sets up what it needs.
# `make demo-all` is the demo with every stack.
PYTHON ?= python3
# A local wheel folder given to pip is passed on to uv, which does not read pip's settings (and parts by commas).
empty :=
comma := ,
export UV_FIND_LINKS ?= $(subst $(empty) $(empty),$(comma),$(strip $(PIP_FIND_LINKS)))

.PHONY: setup demo demo-all test flake lint clean

setup: .venv/.ready

.venv/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "harness needs Python 3.10 or newer; try: make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet uv
	.venv/bin/uv pip install --quiet --compile-bytecode --python .venv/bin/python --editable . --group dev
	@touch $@

demo: .venv/.ready
	.venv/bin/harness env create llamacpp
	.venv/bin/harness run configs/quickstart.yaml

demo-all: .venv/.ready
	.venv/bin/harness env create llamacpp hf bnb
	.venv/bin/harness run configs/quickstart-all.yaml

test: .venv/.ready
	.venv/bin/harness env create
	.venv/bin/python -m pytest

# Which tests fail now and then? make flake FLAKE="--runs 10 --tier test-all"
flake: .venv/.ready
	.venv/bin/python ci/flake.py $(FLAKE)

lint: .venv/.ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

clean:
	rm -rf .venv
