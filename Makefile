# Everyday commands. `make` lists them. The first command that needs .venv creates it.

# Variables:  PYTHON=/path/to/python   MODEL=folder-or-id   ARGS="…"   TORCH=cpu|cuda   JOBS=n
PYTHON ?=
MODEL  ?=
ARGS   ?=
TORCH  ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
# Test processes. Only one if a GPU is tested too, since processes would share it.
JOBS   ?= $(if $(filter cuda,$(TORCH)),0,3)
# Seconds of fuzzing in `make clients`.
FUZZ   ?= 60

BIN   := .venv/bin
READY := .venv/ready
TESTS := .venv/ready-for-tests
PIP   := $(BIN)/python -m pip --disable-pip-version-check
TORCH_VERSION := $(shell sed -n 's/^torch==//p' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help serve test quick coverage gpu attack soak clients ray lint format bench clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

serve: $(READY) ## serve MODEL (the bundled one) with its chat page at http://127.0.0.1:8000; more flags in ARGS
	@exec $(BIN)/quire serve $(MODEL) $(ARGS)

test: $(TESTS) ## run the tests; a selection in ARGS, such as ARGS="tests/core -k fuzz"
	@OMP_NUM_THREADS=1 PYTHONHASHSEED=0 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

# The fastest tests: no processes, no interpreted kernels, no fuzzing.
QUICK := tests/core tests/text tests/structured tests/models tests/benchmarks/test_workloads.py tests/benchmarks/serving/test_metrics.py \
  $(wildcard tests/engine/test_flags.py tests/engine/processing/test_output_collector.py tests/engine/test_engine_loop.py tests/server/parsing) \
  tests/server/test_environment.py tests/test_layering.py tests/test_words.py

quick: $(TESTS) ## run the quick tests: a few seconds, for use while editing
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m 'not slow and not heavy and not hypothesis' -k 'not fuzz and not test_decoder' $(QUICK) $(ARGS)

coverage: $(TESTS) ## run the tests and report coverage: engine/core 100 %, all 92 %; pages in htmlcov
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --cov --cov-report= $(ARGS)
	@$(BIN)/coverage html -q; $(BIN)/coverage report --skip-empty --fail-under=92
	@$(BIN)/coverage report --include='engine/core/*' --fail-under=100

gpu: $(TESTS) ## check every kernel and model family on this machine's GPU; a selection in ARGS, such as ARGS="attention products"
	@$(BIN)/python -m tests.gpu $(ARGS)

attack: $(TESTS) ## run attacks against a server on loopback; a selection in ARGS, such as ARGS="slow"
	@$(BIN)/python -m tests.attack $(ARGS)

soak: $(TESTS) ## load a server with 64 clients for twenty minutes, with a fault each minute; report failures and leaks
	@$(BIN)/python -m tests.attack.soak $(ARGS)

clients: .clients/ready ## run third-party clients and agents against a live server, write docs/clients.md, then fuzz the API for FUZZ seconds
	@OMP_NUM_THREADS=1 .clients/bin/python -m pytest -m slow -W default -o asyncio_mode=auto \
	  -o asyncio_default_fixture_loop_scope=function -o asyncio_default_test_loop_scope=session tests/clients $(ARGS)
	@PATH=$(CURDIR)/.clients/bin:$$PATH python -m tests.clients.fuzz_api --seconds $(FUZZ)

ray: $(TESTS) ## test with a Ray cluster of two nodes on this machine: ranks on both, replicas that are added and removed
	@$(PIP) install -q -c constraints.txt -e '.[ray]'
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow -W ignore tests/ray $(ARGS)

lint: $(TESTS) ## check style and types
	@$(BIN)/ruff check -q . && $(BIN)/ruff format -q --check . && $(BIN)/mypy --no-error-summary

format: $(TESTS) ## format the code
	@$(BIN)/ruff check -q --fix-only . && $(BIN)/ruff format .

bench: $(READY) ## measure offline throughput of MODEL; more flags in ARGS
	@$(BIN)/quire bench throughput --model $(or $(MODEL),configs/demo) $(ARGS)

clean: ## remove .venv and every cache
	rm -rf .coverage* htmlcov .venv .clients tests/clients/*/node_modules build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Shows the time and the size of .venv, with downloads, every few seconds, since pip says nothing for minutes.
# On a terminal each line replaces the last one.
PROGRESS = begin=$$(date +%s); if [ -t 1 ]; then wait=2 end='\r'; else wait=10 end='\n'; fi; \
  (while sleep $$wait; kill -0 $$$$ 2>/dev/null; do \
    printf "       %d s, %d MB$$end" $$(($$(date +%s) - begin)) $$(du -sm .venv 2>/dev/null | cut -f 1); \
  done) & trap "kill $$! 2>/dev/null" EXIT

# Compiled to bytecode at once; the other modules, four of five, when they are first used.
STARTED = engine.engine, engine.replicas.process_main, server.app, server.cli.serve, uvicorn, uvloop

# The stamp is written last, so an interrupted set-up starts again. Without an NVIDIA GPU, torch comes from its index of CPU
# builds, a tenth of the size. If that index cannot be reached, the default build is installed, which works on CPUs too.
$(READY): pyproject.toml constraints.txt
	@set -e; \
	python=$$(for candidate in $(or $(PYTHON),python3 python3.12 python3.11 python3.13 python); do \
	  $$candidate -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$candidate && break; \
	done || true); \
	if [ -z "$$python" ]; then \
	  echo "Quire needs Python 3.11 or newer with its venv module (Debian, Ubuntu: apt install python3-venv)." >&2; \
	  echo "None of these is one: $(or $(PYTHON),python3 python3.12 python3.11 python3.13 python). Name yours: make PYTHON=/path/to/python3.12 …" >&2; \
	  exit 1; \
	fi; \
	echo "Setting up .venv with $$($$python --version) and torch $(TORCH_VERSION) for $(TORCH). This takes a few minutes, once."; \
	$(PROGRESS); echo "  1/3  .venv"; \
	[ -x $(BIN)/python ] && $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || $$python -m venv --clear .venv; \
	export TMPDIR=$(CURDIR)/.venv/tmp; mkdir -p $$TMPDIR; \
	echo "  2/3  torch"; \
	if [ $(TORCH) = cpu ] && $(PIP) install -q --no-compile --retries 1 --timeout 10 --index-url https://download.pytorch.org/whl/cpu torch==$(TORCH_VERSION); then :; \
	else [ $(TORCH) != cpu ] || echo "The CPU build of torch is not available. Installing the default build, which is larger and also runs on CPUs."; \
	  $(PIP) install -q --no-compile torch==$(TORCH_VERSION); fi; \
	echo "  3/3  Quire and the other packages that serving needs"; \
	$(PIP) install -q --no-compile -c constraints.txt -e .; \
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -c 'import $(STARTED)' || :; \
	rm -rf $$TMPDIR; touch $@

$(TESTS): $(READY)
	@echo "Installing what the tests need, once."
	@$(PIP) install -q -c constraints.txt -e '.[test]'
	@touch $@

# The clients install pytest plugins that must not affect the project's own tests, so they have a separate environment that
# also sees the packages of .venv. It has its own copy of packages whose versions differ from constraints.txt.
.clients/ready: $(TESTS) tests/clients/requirements.txt $(wildcard tests/clients/*/package.json)
	@set -e; \
	$(BIN)/python -m venv --clear .clients; \
	site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	echo "import site; site.addsitedir('$$($(BIN)/python -c "$$site")')" > "$$(.clients/bin/python -c "$$site")/venv.pth"; \
	.clients/bin/python -m pip --disable-pip-version-check install -q -r tests/clients/requirements.txt; \
	$(BIN)/python -m venv .clients/litellm; .clients/litellm/bin/python -m pip --disable-pip-version-check install -q 'litellm[proxy]>=1.80'; \
	if command -v npm >/dev/null; then for folder in ai_sdk agents_js; do \
	  (cd tests/clients/$$folder && npm install --no-package-lock --no-audit --no-fund); done; fi; \
	touch $(CURDIR)/$@
