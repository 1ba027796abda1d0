# Two commands do everything on a fresh machine with Python 3.11+ and a C++ compiler: `make demo` and `make test`.
SHELL  := bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt

# Stamps of what is installed: what the demo needs, what tests and checks need on top, and what benchmarks need on top.
RUN    := $(VENV)/.run
READY  := $(VENV)/.ready
BENCH  := $(VENV)/.bench

DATA    ?= ../shared/data
MINUTES ?= 30
SEED    ?= $(shell date +%s)

.PHONY: demo test coverage real-weights architectures triton gpu-compile lint format docs sanitize kernels-test aarch64 mutants tooltips fuzz differential lab-seeds bench bench-quick results wheel findings clean

demo: $(RUN)
	$(BIN)/python examples/demo.py

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal

# The tests, and how much of src/ they run: at least 92 of 100 lines. What only other processes run does not count.
coverage: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal --cov regard --cov-report term:skip-covered --cov-fail-under 92

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror csrc/* tests/kernels/*.h tests/kernels/*.cpp
	$(BIN)/python -m tools.style
	$(BIN)/mypy
	MYPYPATH=src $(BIN)/mypy --config-file= --strict --follow-imports=silent tests/typed/user.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i csrc/* tests/kernels/*.h tests/kernels/*.cpp

# The site, into site/: every page, link and docstring; a warning is an error.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# The kernels' tests on a build that reports every read out of bounds and every overflow.
sanitize: $(READY)
	$(BIN)/python -m tools.sanitize

# The kernels against plain loops, in C++ alone: every instruction set of this CPU.
kernels-test: $(READY)
	$(BIN)/cmake -G Ninja -S . -B build/kernels -DREGARD_TESTS=ON
	$(BIN)/cmake --build build/kernels --target run_kernels_test

# The same for ARM (NEON, and with BF16), cross-compiled and emulated. Debian: apt install g++-aarch64-linux-gnu qemu-user.
EMULATOR := qemu-aarch64;-cpu;max;-L;/usr/aarch64-linux-gnu
aarch64: $(READY)
	$(BIN)/cmake -G Ninja -S . -B build/aarch64 -DREGARD_TESTS=ON -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ "-DCMAKE_CROSSCOMPILING_EMULATOR=$(EMULATOR)"
	$(BIN)/cmake --build build/aarch64 --target run_kernels_test

# Mutation testing: bugs planted in masks, tiles and the binding of the kernels, which the tests must detect.
mutants: $(READY)
	$(BIN)/python -m tools.mutants

# Every number that the viewer prints at 30, 100, 513 and 5,003 tokens, read in a browser and compared with the weights.
tooltips: $(READY)
	$(BIN)/python -m tests.view.tooltips

# Random calls for MINUTES from SEED, on plain and sanitized kernels, within the rounding bound: docs/fuzzing.md.
fuzz: $(READY)
	$(BIN)/python -m tools.fuzz --minutes $(MINUTES) --seed $(SEED)

# Random modules and models for MINUTES from SEED, run in many ways, compared with one plain path in float64.
differential: $(READY)
	$(BIN)/python -m tools.differential --minutes $(MINUTES) --seed $(SEED)

# Verdicts of all claims of the lab with 100 seeds, written to docs/lab_seeds.md; takes hours, and resumes if stopped.
lab-seeds: $(READY)
	$(BIN)/python -m tools.lab_seeds

# Tiny models of all architectures of Transformers with regard, eager and sdpa, written to docs/architectures.md; half an hour on 2
# cores, and it resumes if stopped.
architectures: $(READY)
	$(BIN)/python -m tools.architectures

# Real checkpoints under WEIGHTS (whisper-base, smollm2 and its GGUF file), compared with transformers on real speech and text.
WEIGHTS ?= weights
real-weights: $(READY)
	REGARD_WEIGHTS=$(WEIGHTS) $(BIN)/python -m pytest tests/real

# Mean errors of the engines compared with dense torch, and errors of the kernels' functions: docs/inside/rounding.md.
errors: $(READY)
	$(BIN)/python -m tools.rounding

functions: $(READY)
	$(BIN)/python -m tools.functions

# The GPU kernels in Triton's interpreter on a CPU: a thousand random calls; takes hours.
EXAMPLES ?= 1000
triton: $(READY)
	TRITON_INTERPRET=1 REGARD_TRITON_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest tests/engines/triton -n 2

# The GPU kernels compiled for four GPUs, without a GPU: registers, spills, shared memory.
gpu-compile: $(READY)
	env -u TRITON_INTERPRET $(BIN)/python -m tools.gpu_compile

# Speed as ratios to other libraries, measured side by side, written to docs/benchmarks.md. No test measures speed.
# With DEVICE=cuda: correctness, then speed, on a GPU, written to gpu-report.md.
ifdef DEVICE
bench: $(READY)
	$(BIN)/python -m benchmarks.gpu --device $(DEVICE)
else
bench: $(BENCH)
	$(BIN)/python -m benchmarks.run
endif

bench-quick: $(BENCH)
	$(BIN)/python -m benchmarks.run --quick

# Results of the tasks on real data under DATA, written to docs/results.md; takes hours on 2 cores, and resumes if stopped.
results: $(READY)
	$(BIN)/python -m benchmarks.results --data $(DATA)

# The wheel and the sdist in wheelhouse/, as they are released, installed and used in empty environments.
wheel: $(READY)
	$(INSTALL) --group release
	$(BIN)/python -m tools.wheel

# Results of `regard check` for other libraries, written to docs/findings.json and docs/findings.md. FlexAttention compiles for minutes.
PEERS := torch torch-mha torch-mha-weights flex transformers-eager x-transformers x-transformers-flash keras
findings: $(READY)
	$(INSTALL) --group findings
	$(BIN)/python -m tools.findings $(PEERS)

$(BENCH): $(READY)
	@echo "Installing the libraries that benchmarks compare with; llama.cpp is built from source, which takes minutes."
	$(INSTALL) --group bench
	@touch $@

$(READY): $(RUN)
	@echo "Installing what tests, checks and the documentation need."
	$(INSTALL) --group test --group lint --group docs
	@touch $@

$(RUN): pyproject.toml constraints.txt
	@echo "Creating $(VENV) and installing torch."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(INSTALL) "torch==2.13.0"
	@echo "Compiling the kernels and installing regard with what the demo needs."
	$(BIN)/python -m pip install --verbose --constraint constraints.txt --editable ".[tasks,plot]" | \
	  awk '/\[[0-9]+\/[0-9]+\] Building|[Ee]rror/ { print; fflush() }'
	@touch $@

clean:
	rm -rf $(VENV) build dist wheelhouse site .pytest_cache .mypy_cache .ruff_cache .hypothesis
