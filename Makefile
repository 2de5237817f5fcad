# Each setup step leaves a stamp in the environment and runs again only when what it depends on has changed.

PYTHON ?= python3
VENV ?= .venv
# Pinned, because a plain `torch` is the newest. A CPU build of it is taken where an index has one (scripts/install_torch.py).
# May name a build, and hold options of pip, too.
TORCH ?= torch==2.13.0
SUITE ?= per-commit
PROMPT ?= What is the capital of France?

DEMO := .demo
DEMO_MODEL := $(DEMO)/SmolLM2-135M-Instruct-FP8
STAMPS := $(VENV)/.stamps
# Absolute for the kernels' Makefile; quoted where used, since the path of the checkout may hold spaces.
BIN := $(abspath $(VENV))/bin
PIP = "$(BIN)/python" -m pip --disable-pip-version-check
# On a terminal pip shows its progress; elsewhere only errors, as its warnings concern its own configuration.
INSTALL = $(PIP) install $$([ -t 1 ] || echo -qq)

KERNEL_SOURCES := $(shell find sgl-kernel-cpu/ -type d \( -name build -o -name dist -o -name tests -o -name benchmark \
  -o -name '.*' -o -name '__pycache__' -o -name '*.egg-info' \) -prune -o -type f \( -name '*.cpp' -o -name '*.h' -o -name '*.inc' \
  -o -name '*.cmake' -o -name CMakeLists.txt -o -name pyproject.toml -o -name '*.py' -o -name '*.pyi' \) -print)
CXX_FILES = $(shell git ls-files -- 'sgl-kernel-cpu/*.cpp' 'sgl-kernel-cpu/*.h' 'sgl-kernel-cpu/*.inc')

KERNEL_MAKE = $(MAKE) --no-print-directory -C sgl-kernel-cpu PYTHON="$(BIN)/python"
say = @printf '\033[1m==>\033[0m %s\n' '$(1)'
online = { echo "error: could not install $(1); pip's message is above. The first run needs a Python package index (see: pip config list)" >&2; exit 1; }

export PROMPT
.DEFAULT_GOAL := help
# Two pips in one environment get in each other's way; the kernels' build is parallel by itself.
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo serve demo-model test test-cpp test-python lint format bench bench-load env kernels clean distclean FORCE

help: ## show this help
	@echo 'make TARGET [PYTHON=python3] [VENV=.venv] [TORCH=torch==2.13.0]'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' Makefile

demo: demo-model ## build everything, get the demo model and answer a question with it (PROMPT=...)
	@"$(BIN)/srt" generate --model $(DEMO_MODEL) --prompt "$$PROMPT"

serve: demo-model ## build everything, get the demo model and serve it at http://127.0.0.1:30000 (SERVE_ARGS=...)
	@"$(BIN)/srt" serve --model $(DEMO_MODEL) $(SERVE_ARGS)

demo-model: $(DEMO)/.stamp ## only write the demo model to .demo/
	@:

test: test-cpp test-python ## build everything and run all tests (SUITE=per-commit or full)

test-cpp: kernels ## only the C++ tests of the kernels
	@$(KERNEL_MAKE) test-cpp

test-python: env kernels demo-model ## only the registered Python tests
	@"$(BIN)/python" scripts/run_suite.py --suite $(SUITE)

lint: $(STAMPS)/dev ## check style, types and spelling
	@"$(BIN)/ruff" check --quiet .
	@"$(BIN)/ruff" format --check --quiet .
	@"$(BIN)/mypy"
	@"$(BIN)/clang-format" --dry-run -Werror $(CXX_FILES)
	@"$(BIN)/codespell" $$(git ls-files)
	@"$(BIN)/python" scripts/run_suite.py --list >/dev/null

format: $(STAMPS)/dev ## format the sources
	@"$(BIN)/ruff" check --quiet --fix-only .
	@"$(BIN)/ruff" format --quiet .
	@"$(BIN)/clang-format" -i $(CXX_FILES)

bench: kernels ## time the kernels
	@$(KERNEL_MAKE) bench

bench-load: env kernels ## time and memory of loading a model of 1.5 GB
	@"$(BIN)/python" scripts/bench_load.py

env: $(STAMPS)/srt ## only the Python environment
	@:

kernels: $(STAMPS)/kernels ## only build and install the kernels
	@:

$(STAMPS)/python:
	@sh scripts/check_host.sh python "$(PYTHON)"
	@sh scripts/check_host.sh compiler
	$(call say,creating the environment $(VENV))
	@"$(PYTHON)" -m venv "$(VENV)"
	@mkdir -p $(STAMPS) && touch $@

# Rewritten only when the request has changed, so that another TORCH reinstalls and the same one does not.
$(STAMPS)/torch.request: FORCE | $(STAMPS)/python
	@printf '%s\n' '$(TORCH)' | cmp -s - $@ || printf '%s\n' '$(TORCH)' > $@

$(STAMPS)/torch: $(STAMPS)/torch.request
	$(call say,installing $(TORCH))
	@"$(BIN)/python" scripts/install_torch.py '$(TORCH)' || $(call online,$(TORCH))
	@touch $@

$(STAMPS)/kernels: $(STAMPS)/torch $(KERNEL_SOURCES)
	@sh scripts/check_host.sh compiler
	$(call say,building the kernels)
	@$(KERNEL_MAKE)
	@touch $@

$(STAMPS)/srt: $(STAMPS)/torch pyproject.toml srt/version.py
	$(call say,installing srt and what it needs)
	@$(INSTALL) -e '.[demo,serve,test]' || $(call online,the requirements of srt)
	@touch $@

$(STAMPS)/dev: $(STAMPS)/srt
	$(call say,installing the development tools)
	@$(INSTALL) -e '.[dev]' || $(call online,the development tools)
	@touch $@

$(DEMO)/.stamp: scripts/make_demo_model.py | $(STAMPS)/srt $(STAMPS)/kernels
	$(call say,writing the demo model to $(DEMO))
	@"$(BIN)/python" scripts/make_demo_model.py --out $(DEMO) $$([ -t 2 ] || echo --quiet)
	@touch $@

clean: ## remove build results, keep the environment and the demo model
	@$(KERNEL_MAKE) clean
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .cache $(STAMPS)/kernels

distclean: clean ## also remove the environment and the demo model
	@rm -rf "$(VENV)" $(DEMO)
