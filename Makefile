# make setup     a virtual environment in .venv with the locked dependencies and this project
# make demo      gateway, four simulated workers and a replay; ARGS="--exit --json FILE" to end after the table
# make compile   what every request passes, compiled to machine code in place (needs a C compiler); make pure  takes it away again
# make test      the fast tests;  make test-e2e  those that need Prometheus, node or Chromium, or that take long
# make test-engine   those that need real vLLM engines, installed on first use into ~/.cache/warmroute (2 GB)
# make lint      ruff and mypy;   make bench     the benchmarks (over an hour; some need redis-server);   make lock  new pins from pyproject.toml

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: setup compile pure demo test test-compiled test-e2e test-engine lint bench lock clean

setup: $(VENV)/.ready

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "warmroute needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); $(PYTHON) -m virtualenv -q $(VENV); } || \
		{ echo "no virtual environment could be made; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }

# the locked dependencies first (a stamp of their own: they take the longest), then the project itself without any
$(VENV)/.locked: requirements.lock | $(BIN)/python
	$(BIN)/python -m pip install -q --require-hashes -r requirements.lock
	@touch $@

$(VENV)/.ready: $(VENV)/.locked pyproject.toml
	$(BIN)/python -m pip install -q --no-deps --config-settings editable_mode=compat -e .
	@touch $@

compile: setup
	WARMROUTE_COMPILE=1 $(BIN)/python setup.py -q build_ext --inplace -j 2
	@cd / && $(abspath $(BIN))/warmroute --version >/dev/null

pure:
	rm -rf build warmroute_*.so gateway/*.so routing/*.so routing/policies/*.so

demo: setup
	@$(BIN)/python -m loadgen.demo $(ARGS)

test: setup
	@command -v redis-server >/dev/null || \
		echo "redis-server is not installed: the tests of what gateways share are skipped; on Debian and Ubuntu: apt-get install redis-server"
	$(BIN)/python -m pytest -n auto -m "not e2e and not slow and not engine" $(ARGS)

# the same tests of what `make compile` compiles (not of rendering and configuration, which stay as they are)
test-compiled: compile
	$(BIN)/python -m pytest -n auto -m "not e2e and not slow and not engine and not replaces" tests/gateway tests/routing \
		$(addprefix --ignore=tests/gateway/test_,config.py doctor.py message_loop.py redis_acl.py rendering.py token_mode.py) $(ARGS)
	$(BIN)/python -m pytest -n auto -m slow tests/gateway/test_processes.py $(ARGS)

test-e2e: setup
	$(BIN)/python -m pytest -n auto -m "slow and not e2e" $(ARGS)
	$(BIN)/python -m pytest -m e2e $(ARGS)

test-engine: setup
	settings=$$($(BIN)/python -m tests.engine.prepare) && env $$settings $(BIN)/python -m pytest -m engine -s $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python benchmarks/index.py
	$(BIN)/python benchmarks/turn_tokens.py
	$(BIN)/python benchmarks/events.py
	$(BIN)/python benchmarks/overhead.py
	results=$$(mktemp -d) && trap 'rm -rf "$$results"' EXIT && \
		$(BIN)/python benchmarks/index.py --backend redis --json "$$results/index.json" && \
		$(BIN)/python benchmarks/scale.py "$$results/index.json"
	$(BIN)/python benchmarks/gateways.py
	$(BIN)/python -m benchmarks.outage
	$(BIN)/python -m benchmarks.soak
# The simulator and what is built on it. On two cores a cell of all policies with two seeds takes 20 to 60 s, so these six about 2 minutes;
# all cells with five seeds take hours (without --quick and --only). The published results take 75 s, more with more seeds, and
# the grid of the sweep 3.
	$(BIN)/python benchmarks/policies.py --quick --only agentic
	$(BIN)/python benchmarks/published.py --seeds 1
	results=$$(mktemp -d) && trap 'rm -rf "$$results"' EXIT && \
		$(BIN)/loadgen sweep deploy/sweeps/agentic.yaml -o "$$results/grid.jsonl" && \
		$(BIN)/python benchmarks/adaptive.py deploy/sweeps/agentic.yaml "$$results/grid.jsonl"
# Not here: benchmarks/reality.py takes two vLLM engines (make test-engine has them), benchmarks/oracle.py the extra `oracle`,
# benchmarks/simengine.py a trace in Mooncake's format.

lock: setup
	$(BIN)/python -m pip install -q uv
	$(BIN)/uv pip compile pyproject.toml --extra dev --universal --generate-hashes --no-emit-index-url --no-emit-find-links \
		--no-header --upgrade -q -o requirements.lock

clean: pure
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
