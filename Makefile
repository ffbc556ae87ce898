# Two targets are for everyone: `make demo` and `make test`. The rest are their parts, and tools for developers.
SHELL := /bin/bash
CLUSTER ?= embedded
PYTHON := .venv/bin/python
export PYTHONPATH := tests:tools
export PYTHONUNBUFFERED := 1

.PHONY: help demo test test-full bench-operator bootstrap prepare lint types imports unit images image-sm70 crds docs kernels-nvcc device-bundle test-device \
        clean-cluster clean-cache bare

help:  ## Show the targets.
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

bootstrap:
	@tools/bootstrap.sh

demo: bootstrap  ## From nothing to a token: build, start the cluster, install the operator, serve the tiny model.
	@$(PYTHON) -m demo --cluster $(CLUSTER) $(if $(OPERATOR_IMAGE),--operator-image $(OPERATOR_IMAGE)) $(if $(ENGINE_IMAGE),--engine-image $(ENGINE_IMAGE))

prepare: bootstrap  ## Build what the tests run on: cluster programs, CPU lane, images.
	@$(PYTHON) -m prepare

lint: bootstrap  ## ruff: lint and format.
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

types: bootstrap  ## mypy --strict.
	.venv/bin/mypy

imports: bootstrap  ## The import contracts of the architecture.
	.venv/bin/lint-imports

unit: bootstrap  ## Everything that needs neither a cluster nor a server.
	.venv/bin/pytest -q -m "not cluster and not engine and not full"

test: lint types imports prepare  ## Everything that gates a change.
	.venv/bin/pytest -q -m "not full" --durations 20

test-full: lint types imports prepare  ## Long soaks and full grids as well.
	.venv/bin/pytest -q

images: bootstrap  ## The images that run on the test cluster.
	@$(PYTHON) tools/images.py build operator engine-cpu

image-sm70: bootstrap  ## The image for real V100 GPUs (built and swept here, it cannot run without one).
	@$(PYTHON) tools/images.py build engine-sm70

crds: bootstrap  ## Generate the CRD and its reference from the operator's types.
	@$(PYTHON) -m sm70_operator.api.crd --write crds charts/sm70-operator/crds
	@$(PYTHON) -m sm70_operator.api.reference --write docs/reference/crd.md

kernels-nvcc: bootstrap  ## Compile the kernels with the nvcc of a CUDA toolkit, 11.8 to 12.9 (NVCC=path).
	@$(PYTHON) -m sm70_engine.kernels.nvcc build/nvcc $(NVCC)

device-bundle: bootstrap  ## Pack what the device lane needs on a machine with a GPU (docs/engine/device_lane.md).
	@$(PYTHON) tools/device_bundle.py

test-device:  ## On that machine: the sm70 engine end to end; STAGE=first,reference for some of it.
	@python3 tests/device/run_engine.py $(if $(STAGE),--stage $(STAGE)) $(if $(DEVICE_OUT),--out $(DEVICE_OUT))

bench-operator: bootstrap  ## What the operator costs at 1, 100 and 1,000 services (SERVICES="5000" for more).
	@$(PYTHON) -m bench.bench_operator --services $(or $(SERVICES),1 100 1000)

bare: bootstrap  ## Run `make demo` once inside a debootstrapped Debian 12 with empty caches.
	@tools/bare.sh

clean-cluster:  ## Remove every namespace, mount, cgroup and process of test clusters and demos.
	@test -x $(PYTHON) || exit 0; $(PYTHON) -m testcluster down --all

clean-cache: clean-cluster  ## Remove what was built: programs, lanes, images (about 25 GB).
	rm -rf "$${SM70_CACHE:-$$HOME/.cache/sm70}"
