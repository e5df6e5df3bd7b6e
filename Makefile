# Everything sets itself up: `make run` or `make test` in a fresh clone is enough.
#   make run DEMO_FLAGS="--seconds 60"       other length, other knobs: see `pacecar demo --help`
#   make run PYTHON=python3.12               another interpreter
#   make run PIP_FLAGS="--index-url ..."     another index, for example one with CPU-only builds of torch
#   make compatibility TORCH="2.15.0"        one torch version instead of all
#   make compatibility PYTHON="3.12"         on another Python: its version, its name on PATH or its path

# Where the environment forbids it, each of the thousand processes of `make test` would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
PIP_FLAGS ?=
DEMO_FLAGS ?=
BENCH_FLAGS ?=
PYTEST_FLAGS ?=
SEEN_FLAGS ?=
MUTATION_FLAGS ?=
ARCH ?=
BUILDER ?=
BUILD_FLAGS ?=
IMAGE ?= pacecar:$(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
TORCH ?=
PARTS ?=
# What `make compatibility` is asked to run on; the environment here is still made with the usual python.
RUN_ON := $(if $(filter command,$(origin PYTHON)),$(PYTHON))
CARRY_PYTHON ?= 3.12

VENV := .venv
BIN := $(VENV)/bin
PIP_IS := $(BIN)/python -m pip --disable-pip-version-check --quiet
PIP := $(PIP_IS) install $(PIP_FLAGS) -c constraints.txt
# Debian has ensurepip in a package of its own (python3-venv); without it the pip that is there brings the new one its pip.
MAKE_VENV = $(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { rm -rf $(VENV); $(PYTHON) -m venv --without-pip $(VENV) && \
	$(PYTHON) -m pip --python $(BIN)/python --disable-pip-version-check install --quiet pip; }
# A stamp is touched when all of its installation is done, so what Ctrl-C interrupted is done again.
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev

# What images with torch for GPUs do not hold of what pacecar needs.
CARRY := msgspec isal backports.zstd
CARRIED := build/gpu-carry
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

NVITOP := .tools/nvitop
HTA := .tools/attribution/hta
TRACELENS := .tools/attribution/tracelens
TRACEML := .tools/traceml
ADAPTERS := .tools/adapters
SITE := .tools/site

# Files run side by side, the tests of one file in order in one process, so that they share what a fixture of the module
# started.  What measures time is marked `alone`: nothing runs beside it, and no answer waits for it but test-all's.
FAST := not slow and not distributed and not full and not alone and not soak
DECISIVE := not full and not alone and not soak
TOGETHER := not alone and not soak
ALONE := alone and not soak
PARALLEL := --numprocesses=auto --dist=loadfile
# The fast ones wait for nothing, and each process first imports all tests: one a core.
PARALLEL_FAST := --numprocesses=logical --dist=loadfile
# mypy and what compiles the tests (pytest keeps that) have a processor each.
CHECKED := $(MAKE) --no-print-directory --jobs=2 --output-sync=target lint collected
# pytest exits with 5 when it finds no test, as one of two runs may where PYTEST_FLAGS names some.
MAY_BE_NONE = $(if $(strip $(PYTEST_FLAGS)),|| [ $$? -eq 5 ])

.PHONY: help run test test-all check mutations collected lint fmt bench bench-daemon bench-attribution bench-overhead bench-tuning bench-policies bench-causal bench-counterfactual bench-run bench-scaling soak-daemon soak-storm soak-faults soak-windows gpu gpu-dry gpu-carry deb image dashboards site seen tools adapters compatibility clean

help: ## Say what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

run: $(RUN_STAMP) ## Train a small language model with pacecar attached, and show what tuning was worth
	@exec $(BIN)/python -m pacecar demo $(DEMO_FLAGS)

test: $(DEV_STAMP) tools ## All checks, and the tests that decide whether a change is right; says what it left to test-all
	@$(CHECKED)
	@exec $(BIN)/python -m pytest $(PARALLEL) -m "$(DECISIVE)" $(PYTEST_FLAGS)

test-all: lint tools $(ADAPTERS)/.installed $(SITE)/.installed ## Everything but the soak tests: real libraries, long statistics, timing
	@failed=0; \
	$(BIN)/python -m pytest $(PARALLEL) -m "$(TOGETHER)" $(PYTEST_FLAGS) $(MAY_BE_NONE) || failed=1; \
	$(BIN)/python -m pytest -m "$(ALONE)" $(PYTEST_FLAGS) $(MAY_BE_NONE) || failed=1; \
	exit $$failed

check: $(DEV_STAMP) ## The checks and the fast tests
	@$(CHECKED)
	@exec $(BIN)/python -m pytest $(PARALLEL_FAST) -m "$(FAST)" $(PYTEST_FLAGS)

mutations: $(DEV_STAMP) ## Break the product in 25 places, one at a time, and say which the tests of make test notice
	@exec $(BIN)/python -m tests.kit.mutations $(MUTATION_FLAGS)

collected: $(DEV_STAMP)
	@said=$$($(BIN)/python -m pytest --collect-only --quiet --quiet) || { printf '%s\n' "$$said"; exit 1; }

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: $(DEV_STAMP) ## Format the code and mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(DEV_STAMP) ## Measure what pacecar costs
	@for bench in page report hearing import wire; do echo "== $$bench"; $(BIN)/python bench/bench_$$bench.py || exit; done

bench-daemon: $(DEV_STAMP) tools $(NVITOP) ## Measure the daemon against nvitop-exporter and node_exporter
	@exec $(BIN)/python bench/bench_daemon.py $(BENCH_FLAGS)

bench-attribution: $(DEV_STAMP) $(HTA) $(TRACELENS) ## Measure `pacecar analyze` against HolisticTraceAnalysis and TraceLens
	@exec $(BIN)/python bench/bench_attribution.py $(BENCH_FLAGS)

bench-overhead: $(DEV_STAMP) $(TRACEML) ## Measure the hook in a DDP job, beside torch.profiler and TraceML
	@exec $(BIN)/python bench/bench_overhead.py $(BENCH_FLAGS)

bench-policies: $(DEV_STAMP) ## Replay every policy on every curve, with noise, over 100 seeds
	@exec $(BIN)/python bench/bench_policies.py $(BENCH_FLAGS)

bench-causal: $(DEV_STAMP) ## Simulate jobs with known faults and count what `pacecar analyze` names rightly
	@exec $(BIN)/python bench/bench_causal.py $(BENCH_FLAGS)

bench-counterfactual: $(DEV_STAMP) ## Slow a rank of real jobs, and compare what `pacecar analyze` says with the job without it (root)
	@exec $(BIN)/python -m bench.bench_counterfactual $(BENCH_FLAGS)

bench-tuning: $(DEV_STAMP) ## Train on shaped links under every policy (root; BENCH_FLAGS="--cases all" takes many hours)
	@exec $(BIN)/python bench/bench_tuning.py $(BENCH_FLAGS)

bench-run: $(DEV_STAMP) ## Measure what `pacecar run` costs a script that knows nothing of it
	@exec $(BIN)/python bench/bench_run.py $(BENCH_FLAGS)

bench-scaling: $(DEV_STAMP) tools ## Let a real Prometheus scrape 200 simulated nodes, and ask it the Fleet dashboard
	@exec $(BIN)/python bench/bench_scaling.py $(BENCH_FLAGS)

soak-windows: $(DEV_STAMP) ## Take 10 000 windows in one process and watch its memory
	@exec $(BIN)/python -m pytest -m soak -s tests/profiler/test_soak_windows.py

soak-faults: $(DEV_STAMP) ## Inject 500 faults into real jobs, and try the protocol's events in wider bounds
	@exec $(BIN)/python -m pytest -m soak -s tests/controller/test_faults.py tests/controller/test_agreement_checker.py tests/controller/test_restarts.py

soak-daemon: $(DEV_STAMP) ## Run the daemon for 20 minutes while GPUs are lost and return, and watch its memory
	@exec $(BIN)/python -m pytest -m soak -s tests/monitor/test_soak_daemon.py

soak-storm: $(DEV_STAMP) ## 1000 jobs, a million frames, 200 slow scrapers and 50 reloads, one by one and together
	@exec $(BIN)/python -m pytest -m soak -s tests/monitor/test_load.py

# On a machine with a GPU and without a network: its own python with its own torch, and what gpu-carry gathered for it.
gpu: ## Prove pacecar on this machine's NVIDIA GPU, without a network and in eight minutes (PARTS="windows ledger": these)
	@! ls $(CARRIED)/*.whl >/dev/null 2>&1 || $(GPU_PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target $(CARRIED)/site $(CARRIED)/*.whl
	@PYTHONPATH=$(CURDIR)/$(CARRIED)/site exec $(GPU_PYTHON) -m tests.gpu $(if $(PARTS),--parts $(PARTS))

gpu-dry: $(DEV_STAMP) ## The same against stand-ins, so that no minute on a GPU is lost to a slip
	@exec $(BIN)/python -m tests.gpu --stand-in $(if $(PARTS),--parts $(PARTS))

gpu-carry: $(RUN_STAMP) ## Gather in build/gpu-carry what such a machine lacks: our wheel, and wheels for its python (CARRY_PYTHON=3.12)
	@rm -rf $(CARRIED) build/lib && mkdir -p $(CARRIED)
	@$(PIP_IS) wheel --no-deps --wheel-dir $(CARRIED) .
	@$(PIP_IS) download --no-deps --only-binary=:all: --python-version $(CARRY_PYTHON) --implementation cp \
	  $(foreach old,2_28 2_17,--platform manylinux_$(old)_x86_64) --platform manylinux2014_x86_64 -d $(CARRIED) $(CARRY)
	@du -sh $(CARRIED)

# A venv of its own: nvitop pins the version of nvidia-ml-py.
$(NVITOP):
	@$(PYTHON) -m venv $(NVITOP).new
	@$(NVITOP).new/bin/python -m pip --disable-pip-version-check install --quiet $(PIP_FLAGS) nvitop-exporter \
	  || { echo "nvitop-exporter cannot be had: that peer will be left out" >&2; rm -rf $(NVITOP).new; }
	@[ ! -d $(NVITOP).new ] || mv $(NVITOP).new $(NVITOP)

# Venvs of their own again.  HTA 0.5.0 does not say that it cannot do with pandas 3.  TraceLens is AMD's and comes from its
# repository: PyPI's `tracelens` is somebody else's evaluation of language models.
$(HTA): PEER := 'HolisticTraceAnalysis==0.5.0' 'pandas<3'
$(TRACELENS): PEER := 'TraceLens @ git+https://github.com/AMD-AGI/TraceLens'
$(HTA) $(TRACELENS):
	@mkdir -p $(@D)
	@$(PYTHON) -m venv $@.new
	@$@.new/bin/python -m pip --disable-pip-version-check install --quiet $(PIP_FLAGS) $(PEER) \
	  || { echo "$(@F) cannot be had: that peer will be left out" >&2; rm -rf $@.new; }
	@[ ! -d $@.new ] || mv $@.new $@

# A venv of its own, so that its requirements do not move ours; torch it takes from ours, by a path file.
$(TRACEML): $(RUN_STAMP)
	@$(PYTHON) -m venv $(TRACEML).new
	@$(TRACEML).new/bin/python -m pip --disable-pip-version-check install --quiet $(PIP_FLAGS) traceml-ai \
	  || { echo "traceml-ai cannot be had: that peer will be left out" >&2; rm -rf $(TRACEML).new; }
	@[ ! -d $(TRACEML).new ] || { \
	  $(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' > \
	  "$$($(TRACEML).new/bin/python -c 'import site; print(site.getsitepackages()[0])')/ours.pth"; \
	  mv $(TRACEML).new $(TRACEML); }

# A venv of its own, because these libraries bring some forty packages; torch it takes from ours, by a path file.
$(ADAPTERS)/.installed: requirements/adapters.txt constraints.txt $(RUN_STAMP)
	@echo "installing the libraries that the adapters are for into $(ADAPTERS) ..."
	@rm -rf $(ADAPTERS) $(ADAPTERS).new
	@$(PYTHON) -m venv $(ADAPTERS).new
	@$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' > \
	"$$($(ADAPTERS).new/bin/python -c 'import site; print(site.getsitepackages()[0])')/ours.pth"
	@$(ADAPTERS).new/bin/python -m pip --disable-pip-version-check install --quiet $(PIP_FLAGS) -c constraints.txt -r requirements/adapters.txt \
	  || { echo "the adapters' libraries cannot be had: their tests will be skipped, and fail on CI" >&2; rm -rf $(ADAPTERS).new; }
	@[ ! -d $(ADAPTERS).new ] || { mv $(ADAPTERS).new $(ADAPTERS); touch $@; }

adapters: $(ADAPTERS)/.installed ## Install the libraries that the adapters are for, for their tests

# With TORCH the adapters' tests are left out: they run on the torch that is installed here.
compatibility: override PYTHON := python3
compatibility: $(DEV_STAMP) $(if $(TORCH)$(RUN_ON),,$(ADAPTERS)/.installed) ## Run adapters and torch versions, and write docs/compatibility.md (TORCH="2.15.0", PYTHON="3.12": those only)
	@$(if $(TORCH)$(RUN_ON),:,RECORD_COMPATIBILITY=1 $(BIN)/python -m pytest tests/adapters -k table)
	@PIP_FLAGS="$(PIP_FLAGS)" $(BIN)/python tests/compatibility/run.py --torch "$(TORCH)" --python "$(RUN_ON)"; ran=$$?; \
	$(BIN)/python tests/adapters/compatibility.py && exit $$ran

# Without an environment of its own: whoever wants the package wants no torch.
deb: ## Build the Debian package of the daemon into dist/ (ARCH=arm64 for another machine)
	@PYTHON="$(if $(wildcard $(BIN)/python),$(abspath $(BIN)/python),$(PYTHON))" PIP_FLAGS="$(PIP_FLAGS)" ARCH="$(ARCH)" deploy/deb/build.sh dist

# One command with whichever of the three is here.  The other two do not find by its name what to leave out, and write a
# format that has no HEALTHCHECK, unless they are told.  BUILD_FLAGS are the builder's own words, as --build-arg PYTHON_IMAGE=...
image: ## Build the daemon's container image by docker, podman or buildah (BUILDER, IMAGE, BUILD_FLAGS)
	@builder="$(BUILDER)"; \
	for one in docker podman buildah; do [ -n "$$builder" ] || ! command -v $$one >/dev/null || builder=$$one; done; \
	[ -n "$$builder" ] || { echo "there is no docker, podman or buildah here: name one by BUILDER" >&2; exit 1; }; \
	case "$$builder" in *docker) as=;; *) as="--format docker --ignorefile deploy/container/Containerfile.dockerignore";; esac; \
	exec $$builder build -f deploy/container/Containerfile $$as -t "$(IMAGE)" $(BUILD_FLAGS) .

dashboards: $(RUN_STAMP) ## Generate the dashboards, the rules, docs/metrics.md and docs/doctor.md
	$(BIN)/python -m pacecar.dashboards
	$(BIN)/python -m pacecar.commands.doctor docs/doctor.md

# A venv of its own, so that its requirements do not move ours.
$(SITE)/.installed: requirements/site.txt
	@echo "installing what builds the site into $(SITE) ..."
	@rm -rf $(SITE) && $(PYTHON) -m venv $(SITE)
	@$(SITE)/bin/python -m pip --disable-pip-version-check install --quiet $(PIP_FLAGS) -r requirements/site.txt \
	  && touch $@ || echo "mkdocs cannot be had: the site is not built" >&2

site: $(SITE)/.installed ## Build the documentation as a site into build/site, and check its links
	@NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --quiet && echo "build/site/index.html"

tools: ## Fetch promtool, Prometheus, node_exporter, Chromium, TypeScript and helm into .tools, for the tests that need them
	@PYTHON="$(PYTHON)" PIP_FLAGS="$(PIP_FLAGS)" .ci/tools

seen: $(DEV_STAMP) ## Draw the dashboards with Grafana's own components into docs/images (needs half a gigabyte from npm)
	@PYTHON="$(PYTHON)" PIP_FLAGS="$(PIP_FLAGS)" .ci/tools seen
	@exec $(BIN)/python -m tests.dashboards.seen $(SEEN_FLAGS)

clean: ## Remove what was built and installed here; runs/ stays
	rm -rf $(VENV) .tools build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(RUN_STAMP): pyproject.toml constraints.txt
	@echo "installing pacecar and what the demo needs into $(VENV) (once) ..."
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { rm -rf $(VENV); $(MAKE_VENV); }
	@$(PIP) -e '.[torch,dashboards,demo,analyze]'
	@touch $@

# pip learnt --group in 25.1 and a venv of Python 3.11 brings 23.2, so the group is read from pyproject.toml here.
$(DEV_STAMP): $(RUN_STAMP)
	@echo "installing the development tools ..."
	@$(BIN)/python -c 'import tomllib; \
	print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["dev"], sep="\n")' > $(VENV)/dev.txt
	@$(PIP) -r $(VENV)/dev.txt
	@touch $@
