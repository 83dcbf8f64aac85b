# make demo         train a small translator here, check every op against the reference, draw two pictures
# make test         lint, and the short list of tests: every test, every pair of options; about ten minutes, one verdict
#                   WHEEL=all (or baseline): also a wheel is built and run in an empty environment
# make test-all     every case of every test; more than an hour; WHEEL as above
# make lint         format, types, spelling and prose
# make bench        the benchmark suite on this machine; CPU=avx2: as on one without AVX-512
# make gpu          on a machine with a GPU: check parity, measure beside peers, whole steps, tiles, test, benchmark
#                   (installs nothing); BUDGET=330: in so many seconds; REHEARSE=1: without a GPU (docs/results/gpu.md)
# make gpu-prepare  compile here, without a GPU, what a GPU machine of minutes takes along, and print its commands
# make docs         the site, in site/; URL=https://host/owner/name: it names the repository
# make wheel        a source distribution and a wheel in dist, for the Python and the torch of .venv; URL as above
# Each does its own set-up: a virtual environment in .venv, pinned packages, the extension built in place.
# Everything else that a developer runs is a session of nox: .venv/bin/nox --list

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WHEEL ?=
RESULTS ?= results
CPU ?=
BENCH_CPU := $(if $(CPU),TRANSFORMER_FAST_CPU=$(CPU) ATEN_CPU_CAPABILITY=$(CPU) DNNL_MAX_CPU_ISA=$(CPU) \
  MKL_ENABLE_INSTRUCTIONS=$(CPU) TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/build/inductor-$(CPU))
PROGRESS := $(PYTHON) tools/progress.py
# Python compiles a module when it is imported first; most of them never are.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --no-compile
SOURCES := setup.py $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

.PHONY: setup demo test test-all lint bench gpu gpu-prepare docs wheel clean

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
	@$(BIN)/nox -s lint triton tests kernels interpreter $(if $(WHEEL),"wheel($(WHEEL))")

test-all: setup
	@$(BIN)/nox -s lint triton tests kernels interpreter $(if $(WHEEL),"wheel($(WHEEL))") -- --all

lint: setup
	@$(BIN)/nox -s lint

bench: setup
	mkdir -p $(RESULTS)
	$(BENCH_CPU) $(BIN)/python -m pytest benchmarks --benchmark-json $(RESULTS)/benchmarks.json
	$(BIN)/python benchmarks/report.py $(RESULTS)/benchmarks.json --out $(RESULTS)

gpu:
	$(PYTHON) benchmarks/gpu.py --out $(RESULTS) $(if $(BUDGET),--budget $(BUDGET)) $(if $(REHEARSE),--rehearse)

gpu-prepare:
	$(PYTHON) -m tools.gpu_prepare

docs: $(VENV)/.tools
	NO_MKDOCS_2_WARNING=1 $(if $(URL),TRANSFORMER_FAST_URL=$(URL)) $(BIN)/mkdocs build --strict -f tools/site/mkdocs.yml
	@echo "site/index.html; for its search: python3 -m http.server --directory site"

wheel: setup
	rm -rf dist
	@$(PROGRESS) "source distribution and wheel" env TRANSFORMER_FAST_CPU_SETS=$${TRANSFORMER_FAST_CPU_SETS:-all} \
	  $(if $(URL),TRANSFORMER_FAST_URL=$(URL)) $(BIN)/python -m build --no-isolation

clean:
	rm -rf $(VENV) .venv-cuda .venv-gpu .gpu .nox build dist site *.egg-info transformer_fast/*.so $(RESULTS) demo
