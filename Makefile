# Every target installs what it needs first; installing a second time costs nothing.
PORT ?= 30000
ARGS ?=
BENCHES ?= bench.expertweave.expert_memory bench.kernels.vmm bench.expertweave.adapter_load bench.kernels.moe_layer bench.expertweave.overhead \
  bench.expertweave.zoo_table bench.kernels.reroute bench.expertweave.batching bench.expertweave.figure5 bench.expertweave.figure6 bench.expertweave.figure7 \
  bench.expertweave.figure8 bench.expertweave.figure9 bench.expertweave.table1 bench.expertweave.table3 bench.soak.lifecycle_load \
  bench.elasticmoe.gap bench.elasticmoe.scales bench.elasticmoe.targets bench.elasticmoe.after bench.elasticmoe.slo bench.elasticmoe.table1 bench.elasticmoe.ablation \
  bench.elasticmoe.day bench.elasticmoe.tunnels bench.quantised.zoo_quality
GPU_PYTHON ?= python3
OUT ?= sgl_esft/zoo/checkpoints

python := .venv/bin/python
typing_links := build/typing/sgl_esft_kernels build/typing/sgl_esft_launch
# That ARGS choose none of the tests is no failure (pytest's status 5).
pytest_some := scripts/pytest_some.sh $(python)

.DEFAULT_GOAL := help
.PHONY: help setup serve serve-elastic test test-fast test-full test-soak browser check format wheel docs bench bench-gpu gpu-bundle zoo clean distclean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## install everything into .venv, without CUDA packages (PYTHON= chooses the interpreter)
	@PYTHON="$(PYTHON)" scripts/setup.sh

serve: setup ## serve the demo on 127.0.0.1 (PORT=30000, ARGS= for any flag of SGLang or ours)
	@exec $(python) -m sgl_esft.launch_server --port $(PORT) $(ARGS)

serve-elastic: setup ## the same, on devices that come and go while it serves (PORT=, ARGS=)
	@exec $(python) -m sgl_esft.launch_server --elastic --port $(PORT) $(ARGS)

# Two processes where tests may run side by side; then one by one those that measure time or need
# much memory.
in_pairs := -n 2 --dist loadscope --durations=15

test: setup browser ## what CI runs: everything but the two tiers below (ARGS= for pytest)
	@$(pytest_some) -m "not full and not soak and not alone" $(in_pairs) $(ARGS)
	@$(pytest_some) -m "alone and not full and not soak" --durations=15 $(ARGS)

test-full: setup browser ## what `make test` leaves out: every layout, documents, browser, Ray, benches
	@$(pytest_some) -m "full and not soak and not alone" $(in_pairs) $(ARGS)
	@$(pytest_some) -m "full and alone and not soak" --durations=15 $(ARGS)

test-soak: setup ## the long random runs and the baselines of scaling (over an hour; ARGS= for pytest)
	@$(python) -m pytest -m soak --durations=15 $(ARGS)

browser: ## see that a browser for the tests is there (on Debian as root: install it)
	@scripts/browser.sh

test-fast: setup browser ## what needs no server, in under five minutes (ARGS= for pytest)
	@$(pytest_some) -m "not server and not slow and not full and not soak" $(in_pairs) $(ARGS)

check: setup $(typing_links) ## ruff (lint and format) and mypy, changing nothing
	@$(python) -m ruff check .
	@$(python) -m ruff format --check .
	@$(python) -m mypy

format: setup ## let ruff fix and format
	@$(python) -m ruff check --fix .
	@$(python) -m ruff format .

wheel: setup ## build the wheel for Linux x86_64, native code within, into dist
	@$(python) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

docs: setup ## build the documents as a site into build/site
	@NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --strict --quiet $(ARGS)

bench: setup ## run the benches (BENCHES=, ARGS=) into bench/results
	@set -e; for bench in $(BENCHES); do echo "bench: $$bench"; $(python) -m $$bench $(ARGS); done

bench-gpu: ## on a GPU machine: its tests and figures into bench/results/gpu*.json (GPU_PYTHON=)
	@$(GPU_PYTHON) -m bench.gpu $(ARGS)

gpu-bundle: setup ## what a GPU machine without network needs, at most 60 MiB, into build/gpu-bundle
	@$(python) -m scripts.gpu_bundle $(ARGS)

zoo: setup ## train the demo's base and adapters again into OUT= (under an hour on two cores)
	@$(python) -m sgl_esft.zoo train --out $(OUT) $(ARGS)

clean: ## remove build outputs and caches
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean ## also remove .venv
	@rm -rf .venv .setup.lock

# mypy cannot read the editable install's import hook, so it finds these by their installed names.
build/typing/sgl_esft_%:
	@mkdir -p $(@D)
	@ln -sfn ../../$* $@
