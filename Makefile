# One environment, built once: `make demo`, `make test` and `make check` share .venv.
# It is rebuilt when pyproject.toml or constraints.txt change; `make clean` removes it.

# The first interpreter that exists, starts and is new enough.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { command -v $$p; break; }; done)
PIP_FLAGS ?=
VENV := .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin
# The examples of the documentation and of docstrings are run by `make check`.
PYTEST := -n 2 --dist worksteal tests --ignore tests/test_docs.py
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Threads of one test would only fight with those of its neighbour.
test test-all check bench bench-llm reach mutants: export OMP_NUM_THREADS = 1
# Without it, every process of the tests compiles the package and the tests anew: 8 s each.
unexport PYTHONDONTWRITEBYTECODE
check docs: export NO_MKDOCS_2_WARNING = 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check format docs bench bench-llm reach mutants clean

help:
	@echo "make demo    train a small network on real digits, quantize it, run it on integer kernels"
	@echo "make test    the quick tests: 10,000 in 2.5 minutes"
	@echo "make test-all  the quick tests, then those that take more than 0.05 s and the slow ones: trained models, notebooks, scaling"
	@echo "make check   format, lint, types, examples in documentation and docstrings"
	@echo "make format  let ruff format and fix what it can"
	@echo "make docs    the documentation site, in build/docs"
	@echo "make bench-llm   methods for language models beside other tools, resumed (under an hour)"
	@echo "make bench   speed and scaling tables (minutes)"
	@echo "make reach   what works on architectures of transformers, diffusers and timm (half an hour)"
	@echo "make mutants plant faults for 20 minutes and list those that no test sees"
	@echo "make clean   remove .venv, caches and generated files"

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer was not found. Install it, or name it: make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet $(PIP_FLAGS) -c constraints.txt torch
	$(PIP) install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[all,demo,dev,docs,engines,openvino,trainers]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python examples/quickstart.py

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST) -m "not slow and not costly"

test-all: test
	$(BIN)/python -m pytest $(PYTEST) -m "slow or costly"

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/complexipy --failed --plain
	$(BIN)/mypy --strict bitwright/core bitwright/errors.py bitwright/__init__.py
	$(BIN)/mypy bitwright
	$(BIN)/python -m pytest tests/test_docs.py bitwright
	$(BIN)/mkdocs build --strict --quiet

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP)
	$(BIN)/mkdocs build --strict
	@echo "Read it: $(BIN)/python -m http.server -d build/docs"

bench-llm: $(STAMP)
	$(BIN)/python benchmarks/llm_methods.py --check --markdown benchmarks/results/llm_methods.md

bench: $(STAMP)
	$(BIN)/python benchmarks/torch_speed.py
	$(BIN)/python benchmarks/onnx_speed.py
	$(BIN)/python benchmarks/recurrent_speed.py
	$(BIN)/python benchmarks/recurrent_speed_onnx.py
	$(BIN)/python benchmarks/ptq_speed.py
	$(BIN)/python benchmarks/health_cost.py
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/preparation.py

# Resumes where it stopped; not part of the tests. timm needs a torchvision that fits torch, and is left out without.
reach: $(STAMP)
	$(PIP) install --quiet $(PIP_FLAGS) -c constraints.txt -c constraints-reach.txt -e '.[all,dev,reach]'
	$(BIN)/python benchmarks/reach.py --markdown

# MUTANTS="--minutes 5 --seed 1" for another sample.
mutants: $(STAMP)
	$(PIP) install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[mutants]'
	$(BIN)/python tools/mutants.py $(MUTANTS)

clean:
	rm -rf $(VENV) build dist quickstart-output *.egg-info .pytest_cache .mypy_cache .ruff_cache .complexipy_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
