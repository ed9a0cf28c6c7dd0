# Two commands matter: `make demo` and `make test`. Both set themselves up in .venv on a machine with Python >= 3.11 and nothing else.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest

# Tests and the demo start many processes of the same sources: without kept bytecode each would compile them again.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev demo test test-all test-disturbed lint format proto docs bench bench-engine bench-quality bench-serving bench-store bench-resume bench-saving bench-coordinator storm clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("kvferry needs Python >= 3.11, but $(PYTHON) is " + sys.version.split()[0] + ": run make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip

$(VENV)/.runtime: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@ $(VENV)/.runtime

$(VENV)/.bench: pyproject.toml | $(BIN)/python
	@$(BIN)/python -m pip install --disable-pip-version-check --editable '.[bench]' && touch $@ \
		|| echo "llama.cpp was not built here: the bench takes a llama-bench on the PATH, or runs alone"

setup: $(VENV)/.runtime ## make the venv with what kvferry needs to run

setup-dev: $(VENV)/.dev ## the same with the developer's tools

demo: $(VENV)/.runtime ## a three-node cluster, a node killed in mid-answer, the verdict
	$(BIN)/kvferry drill demo

# The model and the compiled kernels are got ready first: neither should count against the time limit of a test.
READY = $(BIN)/kvferry models fetch smollm2-135m && \
	$(BIN)/python -m kvferry.engine.kernels.compile_cache

# Two at a time, but for those that use all cores themselves or watch the clock. The second half runs even if the first failed.
test: $(VENV)/.dev ## every test that takes seconds; under 15 minutes on 2 cores
	$(READY)
	@failed=0; set -x; \
	$(PYTEST) -n 2 --dist loadfile -m 'not slow and not bench and not alone' || failed=1; \
	$(PYTEST) -m 'alone and not slow and not bench' $$(grep -rl --include='test_*.py' 'mark\.alone' tests) || failed=1; \
	exit $$failed

test-all: $(VENV)/.dev ## the slow ones as well
	$(READY)
	$(PYTEST) -m 'not bench'

test-disturbed: $(VENV)/.dev ## the first half on a machine in other hands (tests/disturbed): finds tests that depend on its speed
	$(READY)
	PYTHONPATH=$(CURDIR)/tests/disturbed $(PYTEST) -n 3 --dist loadfile -m 'not slow and not bench and not alone'

lint: $(VENV)/.dev ## format, lint, types, import contracts, the wire contract
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p kvferry
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/buf breaking --against tests/proto/released/*.binpb
	$(BIN)/python -m kvferry.proto.generate --check
	$(BIN)/python -m kvferry.proto.reference --check

format: $(VENV)/.dev ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(VENV)/.dev ## generate the stubs and their reference anew
	$(BIN)/python -m kvferry.proto.generate
	$(BIN)/python -m kvferry.proto.reference

docs: $(VENV)/.dev ## the documentation site, in site/
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: bench-engine bench-quality bench-serving bench-store bench-resume bench-saving bench-coordinator ## every benchmark: ratios against a peer in the same run

bench-engine: $(VENV)/.runtime $(VENV)/.bench ## prefill and decode beside llama.cpp
	$(BIN)/kvferry models fetch smollm2-135m
	$(BIN)/python -m kvferry.bench.engine

bench-quality: $(VENV)/.runtime ## perplexity and best tokens of every kind of weights and K/V rows, against recorded answers
	$(BIN)/kvferry models fetch smollm2-135m
	$(BIN)/python -m kvferry.bench.quality

bench-serving: $(VENV)/.runtime ## time between tokens beside a long prompt, and how late the event loop wakes
	$(BIN)/kvferry models fetch smollm2-135m
	$(BIN)/python -m kvferry.bench.serving
	$(BIN)/python -m kvferry.bench.loop_lag

bench-store: $(VENV)/.runtime ## saving and restoring beside dd, what verification costs
	$(BIN)/python -m kvferry.bench.store

bench-resume: $(VENV)/.runtime ## the first token of a session on another node, restored or computed again
	$(BIN)/kvferry models fetch smollm2-135m
	$(BIN)/python -m kvferry.bench.resume

bench-saving: $(VENV)/.runtime ## what a growing chat writes, and what saving makes its turns wait
	$(BIN)/kvferry models fetch smollm2-135m
	$(BIN)/python -m kvferry.bench.saving

bench-coordinator: $(VENV)/.runtime ## routing beside other rules, what coordinator and gateway add to a stream, the LCP index
	$(BIN)/kvferry models fetch smollm2-135m
	$(BIN)/python -m kvferry.bench.routing
	$(BIN)/python -m kvferry.bench.routing_real
	$(BIN)/python -m kvferry.bench.coordinator
	$(BIN)/python -m kvferry.bench.gateway
	$(BIN)/python -m kvferry.bench.lcp_index

storm: $(VENV)/.runtime ## 10,000 simulated clusters in the worst weather
	$(BIN)/kvferry storm --seeds 10000 --processes 2

clean: ## remove what set-up made in this folder
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
