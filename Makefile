# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
TORCH_VENV := .venv-torch
BENCH_VENV := .venv-bench
BOOK_VENV := .venv-notebooks
GRADE_VENV := .venv-grade
EMULATED_VENV := .venv-emulated
# The course folder of the exercises. One for a real class belongs outside this repository.
COURSE ?= build/course
# One BLAS thread per test worker: two workers on two cores.
ONE_THREAD := OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1

.DEFAULT_GOAL := help
.PHONY: help setup setup-gpu setup-compile demo demo-mpi detector test test-gpu test-emulated conformance bench scaling figures notebooks test-notebooks site test-site exercises grade test-grade lint clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

setup: $(VENV)/ready  ## create the environment in .venv

$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "minamp needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[distributed]' \
		|| echo "MPI could not be installed: the tests with several processes will say that they were skipped"
	@touch $@

setup-gpu: $(VENV)/ready  ## add CuPy and the CUDA libraries that fit it
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,gpu]'
	@$(RUN) -c 'import minamp; print("GPU:", minamp.gpu_status())'

# 430 MB more in .venv. Without it the tests that compile the kernels for sm_75, 80 and 90 say that they were skipped.
setup-compile: $(VENV)/ready  ## add the CUDA compiler, so that make test compiles the kernels, without a GPU too
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,gpu-compile]'

demo: $(VENV)/ready  ## three networks collapse in half precision and are cured (12 s, ARGS=--quick for 6 s)
	$(RUN) -m minamp.demo $(ARGS)

demo-mpi: $(VENV)/ready  ## one training on two processes, one of which dies (7 s)
	$(RUN) -m minamp.demo mpi $(ARGS)

detector: $(VENV)/ready  ## a detector trained in twelve ways, 25 minutes (ARGS=--quick for 12 s)
	$(RUN) -m minamp.demo detector $(ARGS)

test: $(VENV)/ready  ## run the tests
	$(ONE_THREAD) $(RUN) -m pytest -q -n 2 $(ARGS)

test-gpu: $(VENV)/ready  ## run the tests that need an NVIDIA GPU
	$(RUN) -m pytest -q -m gpu $(ARGS)

# Not a part of make test: it reaches into one version of CuPy, and needs g++ and 500 MB.
test-emulated: $(EMULATED_VENV)/ready  ## run the GPU tests without a GPU: real CuPy on a CUDA that the CPU plays (needs g++)
	@$(ONE_THREAD) $(EMULATED_VENV)/bin/python tests/emulated/run.py $(ARGS)

$(EMULATED_VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) tests/emulated/run.py --machine
	$(PYTHON) -m venv $(EMULATED_VENV)
	$(EMULATED_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,gpu-compile]'
	@touch $@

conformance: $(TORCH_VENV)/ready  ## make the golden values again with torch and show what differs
	$(TORCH_VENV)/bin/python tests/conformance/make_goldens.py --check

# The only place that needs torch. Any build of this version will do; the values come from its CPU code.
$(TORCH_VENV)/ready: constraints.txt
	$(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0 numpy
	@touch $@

# OPENBLAS_CORETYPE, where it is set, hides the machine's kernels: unset for this command alone.
bench: $(BENCH_VENV)/ready  ## measure speed and memory, beside torch where it can be had (ARGS="--quick --page --json FILE")
	env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE $(BENCH_VENV)/bin/python tests/benchmarks/bench.py $(ARGS)

$(BENCH_VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(BENCH_VENV)
	@if nvidia-smi -L >/dev/null 2>&1; then extra='[gpu]'; fi; \
		$(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".$$extra"
	@$(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0 \
		|| echo "torch could not be installed: its rows will say so"
	@touch $@

scaling: $(VENV)/ready  ## measure data-parallel training on 1 and 2 processes (ARGS=--page writes the docs' tables)
	env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE $(RUN) tests/benchmarks/scaling.py $(ARGS)

figures: $(VENV)/ready  ## draw every figure of the README again (half an hour)
	$(RUN) -m minamp.demo --figures figures
	$(RUN) -m minamp.demo detector --figures figures

notebooks: $(BOOK_VENV)/ready  ## make the course's notebooks from notebooks/src and run them (ARGS=NAME for one)
	$(BOOK_VENV)/bin/python notebooks/build.py $(ARGS)

test-notebooks: $(BOOK_VENV)/ready  ## run every notebook again and compare
	$(ONE_THREAD) $(BOOK_VENV)/bin/python -m pytest -q tests/test_notebooks.py $(ARGS)

site: $(BOOK_VENV)/ready  ## the course as a website that needs no network: build/site/index.html
	@rm -rf build/site  # what is built anew warns of everything that is wrong, each time
	$(BOOK_VENV)/bin/python -m sphinx -q -W -b html notebooks build/site
	@echo "open build/site/index.html"

test-site: $(BOOK_VENV)/ready  ## look at every page of the website in a browser (needs Chromium)
	$(BOOK_VENV)/bin/python -m pytest -q tests/test_site.py $(ARGS)

$(BOOK_VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(BOOK_VENV)
	$(BOOK_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,notebooks,site]'
	@$(BOOK_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[distributed]' \
		|| echo "MPI could not be installed: notebook 11 will say what it could not measure"
	@touch $@

exercises: $(GRADE_VENV)/ready  ## a course folder with the exercises, for instructors: build/course (COURSE=dir for another)
	$(GRADE_VENV)/bin/python notebooks/course.py "$(COURSE)"

grade: $(GRADE_VENV)/ready  ## mark what students handed in: COURSE=dir, and SUBMISSIONS=dir if it is not COURSE/submitted
	$(GRADE_VENV)/bin/python -m minamp.grade "$(COURSE)" $(if $(SUBMISSIONS),--submitted "$(SUBMISSIONS)") $(ARGS)

test-grade: $(GRADE_VENV)/ready  ## take the exercises from release to exported marks with nbgrader
	$(ONE_THREAD) $(GRADE_VENV)/bin/python -m pytest -q tests/test_gradebook.py $(ARGS)

$(GRADE_VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(GRADE_VENV)
	$(GRADE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[grade,test]'
	@touch $@

lint: $(VENV)/ready  ## check style and format
	$(RUN) -m ruff check minamp tests notebooks
	$(RUN) -m ruff format --check minamp tests notebooks

clean:  ## remove the environment and everything generated outside git
	@if [ -e build/course/results ]; then echo "build/course holds marks: left there"; else rm -rf build/course; fi
	rm -rf $(VENV) $(TORCH_VENV) $(BENCH_VENV) $(BOOK_VENV) $(GRADE_VENV) $(EMULATED_VENV) $(filter-out build/course,$(wildcard build/*)) *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
