NAMED := $(filter command environment,$(firstword $(origin PYTHON)))
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Any Python can run this: its version, and "old" after it where that is too old.
VERSION := import sys; print("%d.%d" % sys.version_info[:2] + " old" * (sys.version_info < (3, 11)))

IMAGE_BUILD ?= docker build
IMAGE_LOAD ?= :

TOOLS := $(VENV)/tools
PYTHON_IMAGE ?=
TAG ?=

MINUTES ?= 30
SEED ?= $(shell date +%s)

.DEFAULT_GOAL := help
.PHONY: help install system-packages up test test-cpus test-pythons test-chaos soak test-hostile hunt images release-images test-cluster check dashboards pictures settings-page licenses-page locks sbom audit clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

# A .venv that cannot be used, or is not of the PYTHON that was named, is made anew.
install: ## make .venv with everything in it
	@version() { $$1 -c '$(VERSION)' 2> /dev/null || echo missing; }; \
	had=$$(version $(BIN)/python) wanted=$$(version '$(PYTHON)'); \
	case "$$had" in 3.*[0-9]) [ "$(NAMED)" ] && [ "$$had" != "$$wanted" ] || exit 0 ;; esac; \
	refuse() { echo "$(PYTHON) $$1; Headrace needs 3.11 or newer: make install PYTHON=python3.12"; exit 1; }; \
	case "$$wanted" in missing) refuse "does not run" ;; *old) refuse "is $${wanted% old}" ;; esac; \
	[ ! -e $(VENV) ] || echo "the Python of $(VENV) is $${had% old}: it is made anew with $$wanted"; \
	rm -rf $(VENV)
	@$(MAKE) -q $(VENV)/.installed || $(MAKE) --no-print-directory $(VENV)/.installed

# It is renewed when a declared dependency changes.
$(VENV)/.installed: pyproject.toml requirements/dev.txt hatch_build.py $(wildcard engine/headrace_engine/kernels/*.cpp engine/headrace_engine/kernels/*.h)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# Tests skip what is missing here, but not in CI.
system-packages: ## install the Debian packages that tests use (as root): prometheus, redis exporter, faketime
	@command -v apt-get >/dev/null || { echo "no apt-get here: install prometheus (with promtool), prometheus-redis-exporter and faketime"; exit 1; }
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends prometheus prometheus-redis-exporter faketime

up: install ## serve the bundled model on http://localhost:8000
	$(BIN)/headrace up $(ARGS)

# Files stay whole, as their tests share processes; ARGS="-n 0" runs them in one process.
test: install ## run all tests, two files at a time
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-cpus: install ## run what depends on the CPU's instructions at the lower levels that this CPU can pretend
	PYTHONPATH=tests/support $(BIN)/python -m headrace_testing.cpu_levels $(ARGS)

test-pythons: install ## run what depends on it with every Python that is installed; ARGS="3.13 --whole"
	PYTHONPATH=tests/support $(BIN)/python -m headrace_testing.pythons $(ARGS)

test-chaos: install ## break gateways, engines and Redis in the ways that take long (some minutes)
	$(BIN)/python -m pytest tests/test_chaos -m long_fault --durations 0 --durations-min 1 $(ARGS)

soak: install ## draw faults and seeds of test-chaos for MINUTES; SEED=... repeats what was drawn
	$(BIN)/python -m tests.test_chaos --fault all --minutes $(MINUTES) --seed $(SEED)

test-hostile: install ## throw attacks at real processes under a pod's limits, and measure (some minutes)
	$(BIN)/python -m pytest tests/test_hostile -m hostile -n 0 --maxfail 5 $(ARGS)

hunt: install ## look for dearer attacks for MINUTES; SEED=... repeats what was drawn
	$(BIN)/python -m tests.test_hostile --minutes $(MINUTES) --seed $(SEED)

images: ## build the images that the cluster tests use: IMAGE_BUILD, IMAGE_LOAD="kind load docker-image"
	@for tag in dev dev-next; do for target in gateway operator engine; do \
	  $(IMAGE_BUILD) --target $$target --tag headrace-$$target:$$tag . && \
	  $(IMAGE_LOAD) headrace-$$target:$$tag || exit 1; done; done

release-images: ## build the images of a release: PYTHON_IMAGE=python:3.11-slim-bookworm@sha256:..., TAG
	@echo '$(PYTHON_IMAGE)' | grep -Eq '@sha256:[0-9a-f]{64}$$' || { echo "PYTHON_IMAGE is '$(PYTHON_IMAGE)': a release needs its base by digest, as python:3.11-slim-bookworm@sha256:...; docs/development.md says how to find it"; exit 1; }
	@test -n '$(TAG)' || { echo "TAG is empty: name the release, as TAG=0.1.0"; exit 1; }
	@for target in gateway operator engine; do \
	  $(IMAGE_BUILD) --target $$target --tag headrace-$$target:$(TAG) --build-arg PYTHON_IMAGE='$(PYTHON_IMAGE)' \
	    --build-arg VERSION='$(TAG)' --build-arg REVISION=$$(git rev-parse HEAD) . || exit 1; done

test-cluster: install ## run the tests on the cluster of KUBECONFIG, which has the images and an ingress at INGRESS_URL
	$(BIN)/python -m pytest tests_cluster --timeout 900 $(ARGS)

check: install ## ruff, mypy strict, import-linter
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

dashboards: install ## write charts/headrace/dashboards from charts/generate
	$(BIN)/python charts/generate/dashboards.py

settings-page: install ## write docs/settings.md
	PYTHONPATH=tests/support $(BIN)/python -m headrace_testing.settings_page

pictures: install ## draw docs/dashboards from a loaded server (needs system-packages, three minutes)
	PYTHONPATH=tests/support $(BIN)/python charts/generate/pictures.py

licenses-page: install ## write docs/licenses.md
	PYTHONPATH=tests/support $(BIN)/python -m headrace_testing.licenses_page

$(TOOLS)/.installed: requirements/tools.txt
	@test -x $(TOOLS)/bin/python || $(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/tools.txt
	@touch $@

# Without --upgrade, versions stay unless pyproject.toml or constraints.txt ask for others.
LOCK = $(TOOLS)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
  --no-emit-index-url --custom-compile-command "make locks"

locks: $(TOOLS)/.installed ## write requirements/*.txt: every package with its hashes
	@for extra in gateway operator engine; do \
	  $(LOCK) pyproject.toml --extra $$extra -c constraints.txt -o requirements/$$extra.txt || exit 1; done
	$(LOCK) pyproject.toml requirements/build.in --extra dev --extra sdks -c constraints.txt -o requirements/dev.txt
	$(LOCK) requirements/build.in -c constraints.txt -o requirements/build.txt
	$(LOCK) requirements/tools.in -o requirements/tools.txt

sbom: install $(TOOLS)/.installed ## write dist/sbom: the Python packages of each image as CycloneDX
	@mkdir -p dist/sbom
	@for image in gateway operator engine; do \
	  PYTHONPATH=tests/support $(BIN)/python -m headrace_testing.locks $$image | \
	  $(TOOLS)/bin/cyclonedx-py requirements - --pyproject pyproject.toml --output-reproducible --of JSON \
	    -o dist/sbom/headrace-$$image.cdx.json || exit 1; done
	@ls dist/sbom

audit: $(TOOLS)/.installed ## ask the advisory service about every package of the images (needs the network)
	@for image in gateway operator engine; do echo "image $$image"; \
	  $(TOOLS)/bin/pip-audit --progress-spinner off --disable-pip --require-hashes -r requirements/$$image.txt 2> $(TOOLS)/audit.log; \
	  status=$$?; tail -n 1 $(TOOLS)/audit.log; [ $$status = 0 ] || { \
	    grep -q 'Found .* known' $(TOOLS)/audit.log || echo "NOTHING WAS CHECKED: pip-audit did not reach the advisory service (all of it: $(TOOLS)/audit.log)"; \
	    exit 1; }; done

clean: ## remove the environment and what was built
	rm -rf $(VENV) build dist .headrace
