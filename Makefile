# Needs Python >= 3.11, pip and make; everything is installed into .venv and nothing else is touched.
# All paths are relative, so the checkout may lie anywhere. A smaller torch without CUDA:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make install

PYTHON ?= python3
TORCH ?= torch==2.13.0

PY := .venv/bin/python
INSTALLED := .venv/.installed
# Distributions beside hpc-mp, whose [dev] has what builds them: cyclecloud-lint and hpc-mp-lab.
PLUGINS := cyclecloud/lint slurm/lab
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The tests start Python hundreds of times, and each time it would compile the same files again where this is set.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install test pytest lint demo prove gpu bench reference docs wheel clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

install: $(INSTALLED)  ## install into .venv (some minutes the first time)

# Five workers for two cores: two have the tests that wait for the labs' Slurm (tests/conftest.py), others wait for time limits.
test: install  ## lint, types, import arrows and all tests but the long proofs; ROOM=launch: of one room and of those that import it
	@$(MAKE) --no-print-directory --jobs=2 lint pytest

pytest: install
	folders=$$(test -z "$(ROOM)" || $(PY) tests/support/neighbours.py "$(ROOM)") && \
	  $(PY) -m pytest -ra --reruns 1 --rerun-show-tracebacks -n 5 --dist loadfile --no-loadscope-reorder $$folders

lint: install  ## style, types, docstrings and import arrows
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) tests/support/prose.py
	$(PY) -c "from importlinter.cli import lint_imports_command; lint_imports_command()" --no-logo

demo: install  ## train a small model on emulated nodes
	$(PY) demo/run.py

prove: install  ## the long proofs that have not passed on these files; MINUTES=90: as many as fit, MINUTES=0: only list them
	$(PY) tests/support/proofs.py $(if $(MINUTES),--minutes $(MINUTES))

# Exactness tests with the engine on the GPU, ranks that share it over gloo; TEST_DEVICE is read in tests/support/layouts.py.
GPU_TESTS := tests/gpu $(patsubst %,tests/train/test_exact_%.py,layouts controls)
gpu: install  ## on a machine with a GPU: exactness on it, then speed beside other trainers; in 8 minutes
	TEST_DEVICE=cuda $(PY) -m pytest -q -ra -n 6 -m "gpu or not prove" $(GPU_TESTS)
	$(PY) benchmarks/single_gpu.py --minutes 4 --json single_gpu.json

bench: install  ## measure
	$(PY) benchmarks/startup.py
	$(PY) benchmarks/throughput.py

reference: install  ## write docs/reference anew, from the code
	$(PY) docs/reference.py

docs: reference  ## the documentation as a site, in site/
	$(PY) -m mkdocs build --strict

wheel: install  ## build dist/*.whl and dist/*.tar.gz, of hpc-mp, cyclecloud-lint and hpc-mp-lab
	for folder in . $(PLUGINS); do $(PY) -m build --no-isolation --outdir dist $$folder || exit 1; done

clean:  ## remove .venv and everything that was built
	rm -rf .venv build dist site .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Debian's Python may come without ensurepip: then pip is put into the environment from outside.
$(INSTALLED): pyproject.toml $(PLUGINS:=/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "hpc-mp needs Python 3.11 or newer and $(PYTHON) is older: name another with make PYTHON=python3.x")'
	@rm -f $@
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv >/dev/null 2>&1 || { \
	  $(PYTHON) -m venv --clear --without-pip .venv && $(PYTHON) -m pip --python $(PY) install --quiet pip; }
	@echo "Installing hpc-mp and $(TORCH) into .venv"
	@{ $(PY) -m pip install "$(TORCH)" -e '.[dev]' && \
	  $(PY) -m pip install --no-deps --no-index --no-build-isolation $(PLUGINS:%=-e %) && \
	  touch $@; } 2>&1 | $(PY) -c "$$PROGRESS"
	@test -e $@ || { tail -n 20 .venv/install.log; exit 1; }

# pip's output goes to a log; shown are one moving line on a terminal, in a pipe the large downloads and that it installs.
define PROGRESS
import re, sys
live = sys.stdout.isatty()
with open(".venv/install.log", "w") as log:
    for line in sys.stdin:
        log.write(line)
        short = re.sub(r"-(cp|py)\d\S*", "", line.strip())[:78]
        if live:
            print("\r\033[K" + short, end="", flush=True)
        elif short.endswith("MB)") or short.startswith("Installing"):
            print(short, flush=True)
print("\r\033[K" if live else "", end="")
endef
export PROGRESS
