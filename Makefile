# make demo       train a small translator here, check every op against the reference, draw two pictures
# make test       lint, and the short list of tests: every test, every pair of options; about ten minutes, one verdict
# make test-all   every case of every test, and the tests of the tools; more than an hour
#                 WHEEL=all (or baseline): with either, also a wheel is built and run in an empty environment
# make bench      the benchmark suite on this machine; CPU=avx2: as on one without AVX-512
# make gpu        on a machine with a GPU: check parity, measure beside peers, whole steps, tiles, test, benchmark
#                 (installs nothing); BUDGET=330: in so many seconds; in parts: docs/results/gpu.md. Without a GPU it ends
#                 at once; REHEARSE=1: it goes on
# make gpu-prepare  compile here, without a GPU, what a GPU machine of minutes takes along, and print its commands
# make predict    how long the Triton kernels would take on an H100, from their machine code, without a GPU
# make fuzz       random calls of attention, and of generation, against the reference, and wrong calls of every operator:
#                 make fuzz SEED=0 COUNT=500, of each kind
# make emulate    every Triton and CUDA kernel as compiled for two GPU architectures, executed here against the reference;
#                 then faulty kernels, of which most must be seen. 40 minutes of one core; it goes on where it was stopped
# make lab        the tests of these two, which no other command runs: lab/README.md
# make mutants    plant faults in the sources, one at a time, see which tests fail, and write tests/mutants.md; more than
#                 an hour. ONLY=norm: only faults with this in their name or file
# make sanitize   the ops' tests and random calls under the sanitizers for memory and undefined behaviour;
#                 make sanitize-threads, under the one for races
# make arm-check  compile the CPU kernels for aarch64, and run them in qemu
# make pythons    build, verify and test with every Python from 3.11 on that is here, and with the newest and the oldest
#                 torch; some gigabytes each. ROWS="python312 and torch211": only these; make oldest, the last one
# make wheel      a source distribution, and a wheel built from it, in dist, for the Python and the torch of .venv;
#                 URL=https://host/owner/name: where README's links lead from a package index
# make wheel-all  one wheel for torch 2.11 to 2.15 and every Python from 3.11 on that is here; it goes on where it was
#                 stopped
# make release-check  such a wheel of a clean clone, used as a new user would; ROWS as for pythons, WHEEL=file: this
#                 wheel instead
# make hub        the Triton attention as a kernel of Hugging Face's hub, in build/hub, for its kernel-builder
# make docs       the site, in site/: pages, and the reference from the docstrings; URL=https://host/owner/name: it
#                 names the repository
# make fmt        format Python and C++, and fix what ruff can
#
# Each does its own set-up: a virtual environment in .venv, pinned packages, the extension built in place.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= auto
WHEEL ?=
RESULTS ?= results
REHEARSE ?=
BUDGET ?=
SEED ?= 0
COUNT ?= 500
# make bench CPU=avx2: both sides without AVX-512, as on a machine that has none
CPU ?=
BENCH_CPU := $(if $(CPU),TRANSFORMER_FAST_CPU=$(CPU) ATEN_CPU_CAPABILITY=$(CPU) DNNL_MAX_CPU_ISA=$(CPU) \
  MKL_ENABLE_INSTRUCTIONS=$(CPU) TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/build/inductor-$(CPU))

NOX := $(BIN)/nox --noxfile noxfile.py
WHEEL_SESSION := $(if $(WHEEL),"wheel($(WHEEL))")
ROWS ?=
CHOSEN := $(if $(ROWS),-k "$(ROWS)")

PROGRESS := $(PYTHON) tools/progress.py
# Python compiles a module when it is imported first; most of them never are.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --no-compile
CSRC := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
SOURCES := setup.py $(CSRC)
FORMATTED := $(CSRC) $(wildcard tests/*/*.cpp tools/*.cpp)

.PHONY: setup demo test test-all lint fuzz emulate lab mutants fmt docs wheel bench predict gpu gpu-prepare cuda-check pythons oldest release-check wheel-all hub arm-check sanitize sanitize-threads clean

# The tools are installed while the extension is compiled.
setup:
	@$(MAKE) --no-print-directory -j2 $(VENV)/.linked $(VENV)/.tools

$(VENV)/.installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "transformer_fast needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.11"; exit 1; }
	@command -v $${CXX:-c++} > /dev/null || { echo "transformer_fast needs a C++ compiler (g++), and there is none on PATH"; exit 1; }
	@$(PROGRESS) "virtual environment" $(PYTHON) -m venv $(VENV)
	@$(PROGRESS) "packages" $(PIP) -r requirements.txt
	@touch $@

$(VENV)/.tools: requirements-dev.txt | $(VENV)/.installed
	@$(PROGRESS) "tools" $(PIP) -r requirements-dev.txt
	@touch $@

$(VENV)/.built: $(VENV)/.installed $(SOURCES)
	@$(PROGRESS) "C++ extension" $(BIN)/python setup.py build_ext --inplace
	@$(BIN)/python -m transformer_fast info --build
	@touch $@

# Makes the package importable from everywhere, and its command; ninja finds the extension built.
$(VENV)/.linked: pyproject.toml | $(VENV)/.built
	@$(PROGRESS) "package" $(PIP) --no-deps --no-build-isolation -e .
	@touch $@

demo: $(VENV)/.linked
	$(BIN)/python -m transformer_fast demo --out demo

test: setup
	@WORKERS=$(WORKERS) $(NOX) -s lint triton tests kernels interpreter $(WHEEL_SESSION)

test-all: setup $(VENV)/.docs
	@WORKERS=$(WORKERS) $(NOX) -s lint triton tests kernels interpreter tools $(WHEEL_SESSION) -- --all

$(VENV)/.docs: requirements-docs.txt | $(VENV)/.installed
	@$(PROGRESS) "packages of the site" $(PIP) -r requirements-docs.txt
	@touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(if $(URL),TRANSFORMER_FAST_URL=$(URL)) $(BIN)/mkdocs build --strict
	@echo "site/index.html; for its search: python3 -m http.server --directory site"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/prose.py
	$(BIN)/codespell
	$(BIN)/mypy
	@echo $(BIN)/clang-format --dry-run csrc && $(BIN)/clang-format --dry-run --Werror $(FORMATTED)

fuzz: setup
	EXAMPLES=$(COUNT) $(BIN)/python -m pytest -n $(WORKERS) --hypothesis-seed=$(SEED) tests/fuzz
	EXAMPLES=$(COUNT) TRITON_INTERPRET=1 $(BIN)/python -m pytest --hypothesis-seed=$(SEED) tests/interpreter/test_fuzz.py

emulate: setup
	$(BIN)/python -m lab.emulation --workers $(or $(filter-out auto,$(WORKERS)),2) --seed $(SEED) --continue build/emulate.jsonl
	$(BIN)/python -m lab.emulation --workers $(or $(filter-out auto,$(WORKERS)),2) --seed $(SEED) --mutants

mutants: setup
	$(BIN)/python tools/mutants.py $(if $(ONLY),--only "$(ONLY)")

fmt: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	@echo $(BIN)/clang-format -i csrc && $(BIN)/clang-format -i $(FORMATTED)

wheel: setup
	rm -rf dist
	@$(PROGRESS) "source distribution and wheel" env TRANSFORMER_FAST_CPU_SETS=$${TRANSFORMER_FAST_CPU_SETS:-all} \
	  $(if $(URL),TRANSFORMER_FAST_URL=$(URL)) $(BIN)/python -m build --no-isolation

wheel-all: setup
	$(if $(URL),TRANSFORMER_FAST_URL=$(URL)) $(BIN)/python tools/wheel_all.py

hub:
	$(PYTHON) tools/hub_kernel.py

release-check: setup
	$(if $(WHEEL),,rm -rf build/release/dist && $(BIN)/python tools/wheel_all.py --clone)
	$(NOX) -s pythons $(CHOSEN) -- $(or $(WHEEL),build/release/dist/*.whl)

bench: setup
	mkdir -p $(RESULTS)
	$(BENCH_CPU) $(BIN)/python -m pytest benchmarks --benchmark-json $(RESULTS)/benchmarks.json
	$(BIN)/python benchmarks/report.py $(RESULTS)/benchmarks.json --out $(RESULTS)

predict: setup
	$(BIN)/python -m lab.prediction

$(VENV)/.lab: lab/pyproject.toml | $(VENV)/.linked
	@$(PROGRESS) "laboratory" $(PIP) --no-deps --no-build-isolation -e lab
	@touch $@

lab: setup $(VENV)/.lab
	$(BIN)/python -m pytest -n $(WORKERS) --dist=worksteal --all lab/tests

gpu:
	$(PYTHON) benchmarks/gpu.py --out $(RESULTS) $(if $(BUDGET),--budget $(BUDGET)) $(if $(REHEARSE),--rehearse)

gpu-prepare:
	$(PYTHON) -m tools.gpu_prepare

cuda-check: setup
	$(BIN)/python tools/cuda_check.py

pythons: setup
	$(NOX) -s pythons $(CHOSEN)

oldest: setup
	$(NOX) -s pythons -k torch211

arm-check: $(VENV)/.installed
	$(BIN)/python tools/arm_check.py

sanitize: $(VENV)/.tools
	$(BIN)/python tools/sanitize.py

sanitize-threads: $(VENV)/.tools
	$(BIN)/python tools/sanitize.py --threads

clean:
	rm -rf $(VENV) .venv-cuda .venv-gpu .gpu .nox build dist site *.egg-info transformer_fast/*.so $(RESULTS) demo
