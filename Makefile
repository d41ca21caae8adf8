# Two commands from nothing: `make bert_mlm` and `make test`.
# Each makes .venv with plain `python3 -m venv` and installs requirements.lock when needed.

PYTHON ?= python3
BIN := .venv/bin
ARGS ?=
CHECK_PYTHON := $(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else "Python 3.11 to 3.13 is needed, %s is %d.%d; name another one with: make PYTHON=python3.12 ..." % (sys.executable, *v))'

# tests/conftest.py: how many processes, and which files first.
IN_PARALLEL := -n auto --dist loadfile --no-loadscope-reorder

.PHONY: help bert_mlm causal_lm seq2seq mnist dna_melting text_classification test lint types format check-long check-upstream check-tests test-export test-ray test-gpu mutation soak soak-ray fuzz bench bench-gpu results lock clean

help:
	@echo "make bert_mlm [ARGS=...]     fill in masked words: train, test and save a BERT"
	@echo "make mnist [ARGS=...]        classify small images"
	@echo "make causal_lm [ARGS=...]    continue text: train, test and save a Llama"
	@echo "make seq2seq [ARGS=...]      write a text from another: train, test and save a BART"
	@echo "make dna_melting [ARGS=...]  melting temperatures of DNA duplexes and hairpins"
	@echo "make text_classification [ARGS=...]  classify sentences"
	@echo "make test                    lint and the test suite"
	@echo "make types                   mypy, on all of the packages"
	@echo "make format                  ruff: layout and import order"
	@echo "make check-long              the longer tests: every strategy, family and precision, two hosts"
	@echo "make check-upstream          which of our repairs of Keras the installed Keras still needs"
	@echo "make test-export             exports, with the packages they are for (an environment of its own)"
	@echo "make test-ray                runs on a Ray cluster of three nodes on this machine (an environment of its own)"
	@echo "make test-gpu                what only a GPU can prove"
	@echo "make check-tests             break the code on purpose: do tests fail?"
	@echo "make mutation ARGS='FILE TESTS'  random changes of a file: which ones do its tests miss?"
	@echo "make fuzz                    random options and damaged files: no traceback"
	@echo "make soak                    kill runs at random moments and compare"
	@echo "make soak-ray                take and give nodes of a Ray cluster at random moments and compare"
	@echo "make bench                   measure it beside the tutorial and Hugging Face's Trainer"
	@echo "make bench-gpu               measure it on a GPU: sizes, XLA, a split GPU, seconds to the first step"
	@echo "make results ARGS='RUN ...'  write the README's table from the results of runs"
	@echo "make lock                    write the checksums of all packages into the lock files"
	@echo "make clean                   remove .venv, .venv-export and .venv-ray"

.venv/installed: requirements.lock pyproject.toml
	@$(CHECK_PYTHON)
	@echo "installing TensorFlow, Keras and what they need into .venv: some minutes, once"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps -e .
	@touch $@

bert_mlm causal_lm seq2seq mnist dna_melting text_classification: .venv/installed
	@$(BIN)/python -m recipes.$@ $(ARGS)

lint: .venv/installed
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

# Apart from lint: the first time it takes longer than all of ruff's work.
types: .venv/installed
	@$(BIN)/mypy

format: .venv/installed
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# What lint finds holds no test up; it fails the target in the end.
test: .venv/installed
	@$(MAKE) --no-print-directory lint; lint=$$?; \
	$(BIN)/python -m pytest -m "not long and not upstream and not export and not ray and not gpu" $(IN_PARALLEL) $(ARGS); tests=$$?; \
	echo "left out: make types, make check-long (every strategy, family and precision, two hosts), make check-upstream, make check-tests, make test-export, make test-ray, make test-gpu, make soak, make soak-ray, make fuzz, make bench, make bench-gpu"; \
	test $$lint -eq 0 || echo "make lint: failed, see above"; \
	test $$lint -eq 0 -a $$tests -eq 0

check-long: .venv/installed
	@$(BIN)/python -m pytest -m "long and not export and not ray" $(IN_PARALLEL) $(ARGS)

check-upstream: .venv/installed
	@$(BIN)/python -m pytest -m upstream -rxX $(ARGS)

# transformers, PyTorch, onnxruntime and LiteRT stay out of .venv. Without hashes: which PyTorch, and what comes
# with it, depends on the machine.
.venv-export/installed: requirements.lock requirements-export.lock pyproject.toml
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv .venv-export
	.venv-export/bin/python -m pip install --disable-pip-version-check --require-hashes -r requirements.lock
	.venv-export/bin/python -m pip install --disable-pip-version-check -r requirements-export.lock
	.venv-export/bin/python -m pip install --disable-pip-version-check --no-deps -e .
	@touch $@

test-export: .venv-export/installed
	@.venv-export/bin/python -m pytest tests/exports tests/models/test_transformers_format.py tests/benchmarks/test_same_weights.py $(ARGS)

# Ray and the published schemas of the manifests in docs/ stay out of .venv.
.venv-ray/installed: requirements.lock requirements-ray.lock pyproject.toml
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install --disable-pip-version-check --require-hashes -r requirements.lock -r requirements-ray.lock
	.venv-ray/bin/python -m pip install --disable-pip-version-check --no-deps -e .
	@touch $@

test-ray: .venv-ray/installed
	@.venv-ray/bin/python -m pytest -m ray $(ARGS)

# On the first GPU alone: several are not split.
test-gpu: .venv/installed
	@CUDA_VISIBLE_DEVICES=$${CUDA_VISIBLE_DEVICES:-0} $(BIN)/python -m pytest -m gpu tests/gpu $(ARGS)

check-tests: .venv/installed
	@$(BIN)/python tests/check_tests.py $(ARGS)

mutation: .venv/installed
	@$(BIN)/python tests/mutate.py $(ARGS)

soak: .venv/installed
	@$(BIN)/python tests/soak.py $(ARGS)

soak-ray: .venv-ray/installed
	@.venv-ray/bin/python tests/soak_ray.py $(ARGS)

fuzz: .venv/installed
	@$(BIN)/python tests/fuzz.py $(ARGS)

# PyTorch and transformers, whose Trainer is measured beside ours, stay out of .venv.
bench: .venv/installed .venv-export/installed
	@$(BIN)/python benchmarks/everything.py --trainer-python .venv-export/bin/python $(ARGS)
	@$(BIN)/python benchmarks/checkpoint_cost.py

# `--trainer-python PYTHON` measures transformers' Trainer too; PYTHON needs PyTorch for the GPU.
bench-gpu: .venv/installed
	@$(BIN)/python benchmarks/gpu.py $(ARGS)

results: .venv/installed
	@$(BIN)/python benchmarks/results.py $(ARGS)

# The checksums in the lock files, for three kinds of machine and three of Python; downloads gigabytes.
lock:
	@$(PYTHON) -m machine.lock requirements.lock
	@$(PYTHON) -m machine.lock requirements-ray.lock

clean:
	rm -rf .venv .venv-export .venv-ray
