# Two commands on a fresh Debian 12: `make setup` and `make test`. (Without make: tools/setup.sh brings it.)
# Sources, models, text and the build of llama.cpp are kept in $(CRUMB_CACHE), this tree's own build in $(BUILD).

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
.NOTPARALLEL:

export CRUMB_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/crumb
BUILD ?= build
TYPE  ?= RelWithDebInfo
JOBS  ?= $(shell nproc)
MODEL ?= smollm2
ARCH  ?= 90a
FORMATS ?= .
CMAKE_FLAGS ?=
CTEST_FLAGS ?=
# Objects of this tree are found again by every build folder and every clone of it.
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1
ctest = ctest --test-dir $(BUILD) --output-on-failure $(CTEST_FLAGS)

.PHONY: help setup build test test-fast test-python test-vllm test-sglang engine wheel demo cuda clean

help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20
	@echo "  cache folder: $(CRUMB_CACHE)"

setup: ## install missing Debian packages, fetch and build the pinned llama.cpp (once)
	@tools/setup.sh
	@CRUMB_JOBS=$(JOBS) engines/llama/build.sh >/dev/null

build: ## build the library, the program and the tests into $(BUILD)
	@prefix=$$(engines/llama/build.sh --prefix) && \
	cmake -S . -B $(BUILD) -G Ninja -DCMAKE_BUILD_TYPE=$(TYPE) -DCMAKE_EXPORT_COMPILE_COMMANDS=ON \
	    -DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache \
	    -DCRUMB_LLAMA_PREFIX="$$prefix" $(CMAKE_FLAGS) --log-level=WARNING
	@cmake --build $(BUILD) -j $(JOBS)

test: setup build ## everything: fetch two small models and text, run all tests
	@tools/fetch.py model smollm2 >/dev/null
	@tools/fetch.py model gemma3 >/dev/null
	@tools/fetch.py text >/dev/null
	@$(ctest)
	@$(MAKE) test-python
	@$(MAKE) test-vllm

test-python: setup build ## the Python package: build the wheel, install it, run its tests
	@model=$$(tools/fetch.py model smollm2) && text=$$(tools/fetch.py text) && env=$$(tools/python.sh) && \
	$(MAKE) wheel && "$$env/bin/python" -m pip -q --disable-pip-version-check install --no-deps --force-reinstall $(BUILD)/wheel/*.whl && \
	"$$env/bin/python" -m pytest python/tests --crumb $(BUILD)/bin/crumb --model "$$model" --text "$$text/evaluation/prose.txt" \
	    --work $(CRUMB_CACHE)/python/work

test-vllm: ## the vLLM plug-in under a real vLLM on the CPU (1.4 GB of Python packages beside those of test-python)
	@$(MAKE) engine ENGINE=vllm

test-sglang: ## the SGLang plug-in under a real SGLang on the CPU (0.9 GB of Python packages beside those of test-vllm)
	@$(MAKE) engine ENGINE=sglang

engine: setup build
	@model=$$(tools/fetch.py model smollm2) && text=$$(tools/fetch.py text) && env=$$(tools/python.sh $(ENGINE)) && \
	$(MAKE) wheel && "$$env/bin/python" -m pip -q --disable-pip-version-check install --no-deps --force-reinstall $(BUILD)/wheel/*.whl && \
	"$$env/bin/python" -m pytest python/tests/test_$(ENGINE).py --crumb $(BUILD)/bin/crumb --model "$$model" \
	    --text "$$text/evaluation/prose.txt" --work $(CRUMB_CACHE)/python/work

wheel: setup ## the Python package as a wheel in $(BUILD)/wheel
	@env=$$(tools/python.sh) && rm -rf $(BUILD)/wheel && \
	CC=cc CXX=c++ CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache \
	    "$$env/bin/python" -m pip -q --disable-pip-version-check wheel --no-deps --no-build-isolation -w $(BUILD)/wheel \
	    --config-settings=build-dir=$(abspath $(BUILD)-python) ./python

test-fast: setup build ## the tests that need no model
	@$(ctest) -L fast -j $(JOBS)

demo: setup build ## chat about a document with a compressed cache; MODEL=smollm2|qwen
	@tools/fetch.py model $(MODEL) >/dev/null
	@tools/fetch.py text >/dev/null
	@CRUMB_BUILD=$(BUILD) tools/demo.sh $(MODEL)

cuda: ## compile the CUDA kernels (needs nvcc 13; ARCH=90a, FORMATS=regex) and pack their tests for a machine with a GPU
	@cmake -S . -B build-cuda -G Ninja -DCMAKE_BUILD_TYPE=$(TYPE) -DCRUMB_CUDA=ON -DCRUMB_LLAMA=OFF -DCRUMB_BENCH=ON \
	    -DCMAKE_CUDA_ARCHITECTURES="$(ARCH)" -DCRUMB_CUDA_FORMATS="$(FORMATS)" $(CMAKE_FLAGS) --log-level=WARNING
	@cmake --build build-cuda -j $(JOBS) --target cuda_device_test cuda_bench c_api_test
	@tools/gpu/pack.sh build-cuda

clean: ## remove this tree's build; the cache folder stays
	@rm -rf $(BUILD) $(BUILD)-python build-cuda
