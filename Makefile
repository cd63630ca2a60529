# The doorway. Every target works on a fresh machine with python3 (>= 3.11), make and a package
# index: the first call builds .venv, later ones reuse it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The package as it is when installed: the request path compiled, where there is a C compiler.
COMPILED := $(CURDIR)/build/compiled
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start many processes: each is quick only where bytecode is kept.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test check accept bench bench-peers 2p2d test-engine test-engine-nixl compiled lock clean
help: ## what can be typed here
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(READY): pyproject.toml requirements-dev.lock setup.py $(wildcard src/calinix/*/*.pyx)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --require-hashes -r requirements-dev.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

demo: $(READY) ## mock pods, the gateway and some load, live in the terminal
	$(BIN)/calinix demo

test: $(READY) $(COMPILED)/.ready ## every test, and once more what is compiled when installed
	$(BIN)/pytest -n 2 --dist worksteal
	@if ls $(COMPILED)/calinix/_hot*.so > /dev/null 2>&1; then \
	  PYTHONPATH=$(COMPILED) $(BIN)/pytest -q -n 2 --dist worksteal tests/core tests/wire tests/gateway; \
	else echo "no C compiler: the compiled form was not tested"; fi

check: $(READY) ## lint, format, types, house rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_house.py

accept: $(COMPILED)/.ready ## every acceptance figure that can be taken unattended
	PYTHONPATH=$(COMPILED) $(BIN)/python benchmarks/accept.py

compiled: $(COMPILED)/.ready ## the package as it is when installed, its request path compiled

$(COMPILED)/.ready: $(READY) $(shell find src -name '*.py' -o -name '*.pyx')
	$(BIN)/python setup.py -q build --build-base build/work --build-lib $(COMPILED)
	touch $@

# A bar that does not hold ends nothing: it stands in the page.
BENCH := build/bench
bench: $(COMPILED)/.ready ## routing alone, and CPU per request beside nginx and vllm-router, as a page (SIZE=--quick: minutes)
	mkdir -p $(BENCH)
	-PYTHONPATH=$(COMPILED) $(BIN)/python -m calinix bench $(SIZE) --json $(BENCH)/seed.json
	-PYTHONPATH=$(COMPILED) $(BIN)/python benchmarks/bench_proxy.py $(SIZE) --json $(BENCH)/proxy.json
	$(BIN)/python docs/render_benchmarks.py --results $(BENCH) --out $(BENCH)/benchmarks.md

bench-peers: $(COMPILED)/.ready ## all of it beside nginx and three routers, both modes: 25 minutes on a quiet machine
	PYTHONPATH=$(COMPILED) $(BIN)/python benchmarks/bench_peers.py --json

2p2d: $(READY) ## round robin and power of two with and without the controller, on sockets and simulated
	$(BIN)/python benchmarks/live_2p2d.py

test-engine: $(READY) ## real vLLM pods on the CPU, in a venv of their own: does the gateway know what they hold
	$(BIN)/python benchmarks/real_engines.py --build

test-engine-nixl: $(READY) ## a real prefill and decode pair over NIXL; slow and erratic on a CPU
	$(BIN)/python benchmarks/real_engines.py --build --nixl --minutes 20

lock: ## renew requirements-dev.lock (needs pip-tools)
	pip-compile --quiet --upgrade --extra dev --allow-unsafe --generate-hashes --strip-extras \
	  --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-header \
	  -o requirements-dev.lock pyproject.toml

clean: ## remove what was built
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src -name '*.so' -delete -o -name _native.c -delete -o -name _bytes_path.c -delete
