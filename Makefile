# Handles for people: make setup, demo, serve, test, check. `.ci/run` uses the same ones.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
BIN := $(VENV)/bin
ifndef PYTHON
PYTHON := $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null && echo $$p && break; done)
endif
# Another torch build, for example: TORCH_SPEC='torch==2.14.1 torchvision==0.29.1' TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_SPEC ?=
TORCH_INDEX ?=
DISK_GB ?= 12
MEMORY_GB ?= 4

MODEL ?= tiny
DEPLOY ?= $(if $(filter tiny demo,$(MODEL)),$(MODEL),minimax_h3_disaggregated)
OVERRIDES ?=
LORA ?=
TASK ?=
PORT ?= 8000
ENCODER_PORT ?= 8001
TESTS ?=
# What `make test` runs at last and one by one: live pairs whose progress is watched, and ranks that are stopped and killed within limits.
# Everything else goes, a file at a time, to WORKERS processes.
ALONE := tests/end_to_end tests/shared_runtime/ranks
WORKERS ?= 2

# Two OpenMP threads on few cores are erratic, and sums change with their number: one makes results equal between processes.
export OMP_NUM_THREADS ?= 1

# Of `make meaning`: what is judged, and the Turbo adapters beside it. Each pair keeps about one core busy.
MEANT = $(if $(filter file,$(origin MODEL)),demo,$(MODEL))
TURBO = $(wildcard $(if $(filter demo,$(MEANT)),shared_runtime/demo,$(MEANT)/..)/turbo/*.safetensors)
CLIPS ?= 200
PAIRS ?= 2

# Of `make crash` and `make fuzz`; without a seed they draw one and say it.
MINUTES ?= 10
SEED ?=
DATABASE ?=
FUZZ_SECONDS ?= 600

.PHONY: help requirements setup demo serve test faults crash fuzz meaning check
help:
	@echo "make setup   make $(VENV) from constraints.txt"
	@echo "make demo    start both services on the small checkpoint that is in the repository, make one clip of each task into demo/, and a picture of them"
	@echo "make serve   run the pair until Ctrl-C: encoder on 8001, diffusion on 8000 (MODEL= DEPLOY= OVERRIDES= LORA= TASK= PORT= ENCODER_PORT=)"
	@echo "make test    run the tests but the slow ones, which .ci/run adds (TESTS=tests/shared_schema for a part)"
	@echo "make faults  kill and stop every process of a pair in every phase (.ci/run faults: a part of it)"
	@echo "make crash   200 jobs while processes are killed at random for MINUTES=10 (SEED= DATABASE=postgres)"
	@echo "make fuzz    random requests to both services for FUZZ_SECONDS=600 each (SEED=)"
	@echo "make meaning judge hundreds of clips of the demo checkpoint, without and with its Turbo adapters; goes on where it stopped (MODEL=DIR CLIPS=200 PAIRS=2)"
	@echo "make check   lint, formatting, types, import contracts, architecture"

requirements:
	@fail() { echo "setup: $$1" >&2; exit 1; }; \
	[ "$$(uname -s)" = Linux ] || fail "this runs on Linux or WSL2, not on $$(uname -s)"; \
	[ -n "$(PYTHON)" ] || fail "needs Python 3.11 or 3.12 with venv; name one: make setup PYTHON=/path/to/python3.11"; \
	version=$$("$(PYTHON)" -c 'import platform, sys, venv, ensurepip; print(platform.python_version()); sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null) \
		|| fail "$(PYTHON) is not Python 3.11 or 3.12 with venv (Debian: apt install python3-venv)"; \
	disk=$$(df -Pk . | awk 'NR == 2 {print int($$4 / 1048576)}'); \
	[ "$$disk" -ge $(DISK_GB) ] || fail "needs $(DISK_GB) GiB of free disk here, found $$disk (DISK_GB=0 skips this)"; \
	memory=$$(awk '/^MemTotal/ {print int($$2 / 1048576)}' /proc/meminfo); \
	[ "$$memory" -ge $(MEMORY_GB) ] || fail "needs $(MEMORY_GB) GiB of memory, found $$memory (MEMORY_GB=0 skips this)"; \
	echo "setup: $(PYTHON) $$version, $$disk GiB of disk, $$memory GiB of memory"

setup: requirements
	"$(PYTHON)" -m venv $(VENV)
	@pins=constraints.txt; \
	if [ -n "$(TORCH_SPEC)" ]; then \
		pins=$(VENV)/constraints.txt; \
		grep -vE '^(torch|torchvision|triton|nvidia-.*|cuda-.*)==' constraints.txt > $$pins; \
		echo "setup: torch build $(TORCH_SPEC)"; \
		$(BIN)/python -m pip install -qq $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH_SPEC); \
		$(BIN)/python -m pip freeze | grep -E '^(torch|torchvision)==' >> $$pins; \
	fi; \
	extras=dev,bench,nixl,otel,ray,postgres,s3; \
	if ! $(BIN)/python -m pip install -qq --dry-run --no-deps --only-binary :all: -c $$pins nixl nixl-cu12 nixl-cu13 >/dev/null 2>&1; then \
		extras=dev,bench,otel,ray,postgres,s3; \
		echo "setup: no NIXL wheel for this Python and machine: NixlConnector is not available here, SharedMemoryConnector is"; \
	fi; \
	echo "setup: installing with extras $$extras; about 3 GB to download and 7 GB on disk, so this takes minutes"; \
	$(BIN)/python -m pip install -qq -c $$pins -e ".[$$extras]"
	@echo "setup: done. Next: make demo"

demo:
	$(BIN)/python -m video_client.demo

serve:
	$(BIN)/python -m video_client.pair --model "$(MODEL)" --deploy-config "$(DEPLOY)" $(if $(OVERRIDES),--stage-overrides '$(OVERRIDES)') $(if $(LORA),--lora-path "$(LORA)") $(if $(TASK),--task-type "$(TASK)") --port $(PORT) --encoder-port $(ENCODER_PORT)

# The tests start Python hundreds of times: compiled files are kept, or each start compiles these packages anew.
test: export PYTHONDONTWRITEBYTECODE :=
test:
ifneq ($(strip $(TESTS)),)
	$(BIN)/python -m pytest $(TESTS)
else
	@said=$$(mktemp); trap 'rm -f "$$said"' EXIT; failed=0; \
	for part in 'tests $(ALONE:%=--ignore=%) -n $(WORKERS) --dist loadfile --max-worker-restart 0' '$(ALONE)'; do \
		status=0; $(BIN)/python -m pytest -m 'not slow' $$part | tee -a "$$said" || status=$$?; \
		[ "$$status" -le 1 ] || exit "$$status"; \
		[ "$$status" -eq 0 ] || failed=1; \
	done; \
	printf '\nmake test, both parts:\n'; grep -aE '^(FAILED|ERROR) |^=+ .* in [0-9.]+s.*=+$$' "$$said" || true; \
	exit "$$failed"
endif

faults:
	FAULT_MATRIX=whole $(BIN)/python -m pytest tests/faults

crash:
	$(BIN)/python -m tests.faults.crash --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(if $(DATABASE),--database $(DATABASE))

fuzz:
	$(BIN)/python -m tests.fuzz.run --seconds $(FUZZ_SECONDS) $(if $(SEED),--seed $(SEED))

meaning:
	@[ "$(MEANT)" != tiny ] || { echo "meaning: the tiny checkpoint makes noise" >&2; exit 2; }
	@failed=0; \
	judge() { $(BIN)/python -m tests.meaning.run --model "$(MEANT)" --clips $(CLIPS) --pairs $(PAIRS) "$$@" || { [ $$? -eq 1 ] && failed=1; }; }; \
	judge --out meaning; \
	for adapter in $(TURBO); do \
		printf '\n%s\n' "$$adapter"; \
		judge --out "meaning/$$(basename "$$adapter" .safetensors)" --lora "$$adapter" --without meaning/results.jsonl; \
	done; \
	exit $$failed

check:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/test_architecture.py
