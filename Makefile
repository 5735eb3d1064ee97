# Every target works alone from a fresh clone: each needs the virtual environment, and `make` builds it once.
#
#   make demo               the real SGLang server on the CPU, a wrong draft and a right one
#   make test | test-all    without | with the slow tests
#   make lint type bench    ruff, mypy, the benchmark
#   make PYTHON=python3.12  another interpreter to build the environment with

PYTHON ?= python3
unexport PYTHON # demo/serve.sh reads a variable of this name and must not leave the virtual environment

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete
REQUIREMENTS := demo/sglang_cpu/requirements.txt
TORCHVISION_FIX := demo/sglang_cpu/shim/sitecustomize.py

.PHONY: setup demo test test-all lint type bench clean

setup: $(STAMP)

# SGLang comes without its dependencies, which are CUDA packages; the requirements list what a CPU needs instead.
# torchvision likewise; the fix lets it be imported (demo/sglang_cpu/README.md).
$(STAMP): pyproject.toml $(REQUIREMENTS) $(TORCHVISION_FIX)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -r $(REQUIREMENTS)
	$(BIN)/pip install --no-deps sglang==0.5.23 torchvision==0.28.0
	site=$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))") && \
	cp $(TORCHVISION_FIX) "$$site/torchvision_on_cpu.py" && \
	echo "import torchvision_on_cpu" > "$$site/torchvision_on_cpu.pth"
	$(BIN)/pip install -e '.[dev]'
	touch $@

demo: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" demo/run.sh

test: setup
	$(BIN)/pytest -m 'not slow'

test-all: setup
	$(BIN)/pytest

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check

type: setup
	$(BIN)/mypy

bench: setup
	$(BIN)/python benchmarks/run.py

# Keeps the virtual environment: it is expensive, and `make setup` renews it when its inputs change.
clean:
	rm -rf build dist demo/work .hypothesis .mypy_cache .pytest_cache .ruff_cache src/*.egg-info
	find benchmarks demo src tests -name __pycache__ -type d -prune -exec rm -rf {} +
