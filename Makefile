NAMED := $(filter command environment,$(firstword $(origin PYTHON)))
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Any Python can run this: its version, and "old" after it where that is too old.
VERSION := import sys; print("%d.%d" % sys.version_info[:2] + " old" * (sys.version_info < (3, 11)))

# With Podman or buildah: IMAGE_BUILD="podman build", IMAGE_TAG="podman tag", IMAGE_PUSH="podman push".
IMAGE_BUILD ?= docker build
IMAGE_TAG ?= docker tag
IMAGE_PUSH ?= docker push
IMAGE_LOAD ?= :
HELM ?= helm
IMAGES := gateway operator engine
VERSION_OF_CHART = $(shell sed -n 's/^appVersion: "\{0,1\}\([^"]*\)"\{0,1\}$$/\1/p' charts/headrace/Chart.yaml)
TAGS ?= $(VERSION_OF_CHART)
REGISTRY ?=

TOOLS := $(VENV)/tools
PYTHON_IMAGE ?=
TAG ?=
FROM ?=
PREVIOUS := build/previous

# Tests start hundreds of processes, which read their bytecode where it was written before.
unexport PYTHONDONTWRITEBYTECODE

MINUTES ?= 30
SEED ?= $(shell date +%s)

.DEFAULT_GOAL := help
.PHONY: help install install-dev environment system-packages up test test-readme test-cpus test-pythons test-chaos soak test-sealed test-upgrade test-hostile hunt images push chart-push release-images test-cluster check types structure pictures console-pictures demo-vision generated docs locks sbom audit clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

install: environment ## make .venv with what running needs: make install PYTHON=python3.12
	@$(MAKE) -q $(VENV)/.installed-up || $(MAKE) --no-print-directory $(VENV)/.installed-up

install-dev: environment ## make .venv with what tests and checks need too
	@$(MAKE) -q $(VENV)/.installed || $(MAKE) --no-print-directory $(VENV)/.installed

# A .venv that cannot be used, or is not of the PYTHON that was named, is removed.
environment:
	@version() { $$1 -c '$(VERSION)' 2> /dev/null || echo missing; }; \
	had=$$(version $(BIN)/python) wanted=$$(version '$(PYTHON)'); \
	case "$$had" in 3.*[0-9]) [ "$(NAMED)" ] && [ "$$had" != "$$wanted" ] || exit 0 ;; esac; \
	refuse() { echo "$(PYTHON) $$1; Headrace needs 3.11 or newer: make install PYTHON=python3.12"; exit 1; }; \
	case "$$wanted" in missing) refuse "does not run" ;; *old) refuse "is $${wanted% old}" ;; esac; \
	[ ! -e $(VENV) ] || echo "the Python of $(VENV) is $${had% old}: $(VENV) is replaced, with Python $$wanted"; \
	rm -rf $(VENV)

# Renewed when a declared dependency or a kernel changes. `dev` has all that `up` has.
DECLARED := pyproject.toml hatch_build.py requirements/uv.txt requirements/install_lock.py \
  $(wildcard engine/headrace_engine/kernels/cpu/*.cpp engine/headrace_engine/kernels/cpu/*.h)
TELL = @echo "installing packages into $(VENV), and compiling kernels: once, for some minutes"
MAKE_VENV = @test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.installed-up: requirements/up.txt $(DECLARED)
	$(TELL)
	$(MAKE_VENV)
	$(BIN)/python requirements/install_lock.py up
	@touch $@

# Tests start hundreds of processes, so what they import is compiled first.
$(VENV)/.installed: requirements/dev.txt $(DECLARED)
	$(TELL)
	$(MAKE_VENV)
	$(BIN)/python requirements/install_lock.py --all-kernels dev
	$(BIN)/python requirements/compile_packages.py
	@touch $(VENV)/.installed-up $@

# Tests skip what is missing here, but not in CI.
system-packages: ## install the Debian packages that tests use (as root): prometheus, redis exporter, faketime, nginx, docker-registry, busybox, chromium-headless-shell
	@command -v apt-get >/dev/null || { echo "no apt-get here: install prometheus (with promtool), prometheus-redis-exporter, faketime, nginx, docker-registry, busybox and chromium-headless-shell"; exit 1; }
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends prometheus prometheus-redis-exporter faketime nginx-light docker-registry busybox chromium-headless-shell

# What the first start did not import is compiled meanwhile, while nothing else wants a processor.
up: install ## serve the bundled model on http://localhost:8000
	@($(BIN)/python requirements/compile_packages.py $$$$ > /dev/null 2>&1 &); exec $(BIN)/headrace up $(ARGS)

# Files stay whole, as their tests share processes; ARGS="-n 0" runs them in one process.
test: install-dev ## run all tests, four files at a time
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder $(ARGS)

test-readme: install-dev ## type the README's first commands in a new clone, with empty caches (some minutes)
	$(BIN)/python -m pytest tests/test_first_answer.py -m bare -n 0 -s $(ARGS)

test-cpus: install-dev ## run what depends on the CPU's instructions at the lower levels that this CPU can pretend
	PYTHONPATH=tests/support $(BIN)/python -m headrace_testing.cpu_levels $(ARGS)

test-pythons: install-dev ## run what depends on it with every Python that is installed; ARGS="3.13 --whole"
	PYTHONPATH=tests/support $(BIN)/python -m headrace_testing.pythons $(ARGS)

test-chaos: install-dev ## break gateways, engines and Redis in every way, with three seeds each (some minutes)
	$(BIN)/python -m pytest tests/test_chaos -m "long_fault or not long_fault" --seeds 3 --durations 0 --durations-min 1 $(ARGS)

soak: install-dev ## draw faults and seeds of test-chaos for MINUTES; SEED=... repeats what was drawn
	$(BIN)/python -m tests.test_chaos --fault all --minutes $(MINUTES) --seed $(SEED)

# The search of Redis' files at the end belongs to no test, so no test's time limit applies to it.
test-sealed: install-dev ## run the end-to-end and fault tests with prompts sealed in Redis, and look for them there
	HEADRACE_TEST_SEALED=1 $(BIN)/python -m pytest -n 0 -o timeout_func_only=true tests/test_e2e tests/test_chaos $(ARGS)

test-upgrade: install-dev ## run gateways and engines of the release before beside these: FROM=v0.1.0
	@test -n '$(FROM)' || { echo "FROM is empty: name the release before, as FROM=v0.1.0"; exit 1; }
	rm -rf $(PREVIOUS) && mkdir -p $(PREVIOUS) && git archive '$(FROM)' | tar -x -C $(PREVIOUS)
	$(MAKE) --no-print-directory -C $(PREVIOUS) install PYTHON=$(PYTHON)
	HEADRACE_TEST_PREVIOUS=$(CURDIR)/$(PREVIOUS) $(BIN)/python -m pytest tests/test_e2e/test_previous_release.py -m previous -n 0 $(ARGS)

test-hostile: install-dev ## throw attacks at real processes under a pod's limits, and measure (some minutes)
	$(BIN)/python -m pytest tests/test_hostile -m hostile -n 0 --maxfail 5 $(ARGS)

hunt: install-dev ## look for dearer attacks for MINUTES; SEED=... repeats what was drawn
	$(BIN)/python -m tests.test_hostile --minutes $(MINUTES) --seed $(SEED)

images: ## build the three images and give them to a cluster: IMAGE_LOAD="kind load docker-image", IMAGE_BUILD, TAGS
	@for tag in $(TAGS); do for target in $(IMAGES); do \
	  $(IMAGE_BUILD) --target $$target --tag headrace-$$target:$$tag . && \
	  $(IMAGE_LOAD) headrace-$$target:$$tag || exit 1; done; done

REGISTRY_GIVEN = @test -n '$(REGISTRY)' || { echo "REGISTRY is empty: name where images go, as REGISTRY=registry.example.com/team"; exit 1; }

push: ## push what `make images` built: REGISTRY=registry.example.com/team, TAGS
	$(REGISTRY_GIVEN)
	@for tag in $(TAGS); do for target in $(IMAGES); do \
	  $(IMAGE_TAG) headrace-$$target:$$tag $(REGISTRY)/headrace-$$target:$$tag && \
	  $(IMAGE_PUSH) $(REGISTRY)/headrace-$$target:$$tag || exit 1; done; done
	@echo "install with --set image.repository=$(REGISTRY)/headrace"

chart-push: ## push the chart: REGISTRY=registry.example.com/team, HELM_FLAGS=--plain-http for one without TLS
	$(REGISTRY_GIVEN)
	@mkdir -p dist
	$(HELM) package charts/headrace --destination dist
	$(HELM) push dist/headrace-$$(sed -n 's/^version: //p' charts/headrace/Chart.yaml).tgz oci://$(REGISTRY) $(HELM_FLAGS)

release-images: ## build the images of a release: PYTHON_IMAGE=python:3.11-slim-bookworm@sha256:..., TAG, REGISTRY
	@echo '$(PYTHON_IMAGE)' | grep -Eq '@sha256:[0-9a-f]{64}$$' || { echo "PYTHON_IMAGE is '$(PYTHON_IMAGE)': a release needs its base by digest, as python:3.11-slim-bookworm@sha256:...; docs/development.md says how to find it"; exit 1; }
	@test -n '$(TAG)' || { echo "TAG is empty: name the release, as TAG=0.1.0"; exit 1; }
	@for target in $(IMAGES); do \
	  $(IMAGE_BUILD) --target $$target --tag $(REGISTRY:%=%/)headrace-$$target:$(TAG) --build-arg PYTHON_IMAGE='$(PYTHON_IMAGE)' \
	    --build-arg VERSION='$(TAG)' --build-arg REVISION=$$(git rev-parse HEAD) . || exit 1; done

test-cluster: install-dev ## run the tests on the cluster of KUBECONFIG, which has the images and an ingress at INGRESS_URL
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests_cluster --timeout 900 $(ARGS)

check: install-dev ## ruff, mypy strict, import-linter, English, the documentation site
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@$(MAKE) --no-print-directory --jobs 2 --keep-going --output-sync=target types structure

# mypy has a processor to itself for minutes; the other takes the rest of `check` meanwhile.
types: install-dev
	$(BIN)/mypy

structure: install-dev
	$(BIN)/lint-imports
	PYTHONPATH=tests/support $(BIN)/python -m headrace_testing.import_layers
	PYTHONPATH=tests/support $(BIN)/python -m headrace_testing.prose
	$(MAKE) --no-print-directory docs

# The theme would advertise its successor.
docs: install-dev ## build the documentation site in build/site; HEADRACE_SOURCE_URL names where links to source lead
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "open build/site/index.html; the search needs a server: python3 -m http.server --directory build/site"

PAGES = architecture cli licenses models offline reference settings vllm

CRD = charts/headrace/files/crds/modelservices.yaml

# Pages last: one describes the fields of the CRD.
generated: install-dev ## write what is made from code: the CRD, Redis users, dashboards, pages of docs
	$(BIN)/python -m headrace_operator.spec.schema > $(CRD).new && mv $(CRD).new $(CRD)
	$(BIN)/headrace redis users | while read -r line; do echo "$$line" > charts/headrace/files/acl/$$(echo "$$line" | cut -d ' ' -f 2 | cut -d - -f 2).acl; done
	$(BIN)/python charts/generate/dashboards.py
	@for page in $(PAGES); do PYTHONPATH=tests/support $(BIN)/python -m headrace_testing.pages.$$page || exit 1; done

console-pictures: install-dev ## write docs/console: pictures of the console, and of a stream that goes on after a kill (needs system-packages)
	CONSOLE_PICTURES=docs/console $(BIN)/python -m pytest tests/test_e2e/test_console_pictures.py -n 0 $(ARGS)

VISION := common/headrace_common/demo_vision

demo-vision: install-dev ## train the model that reads pictures, score it, test it (half an hour on two cores)
	$(BIN)/python demo/train_vision.py --out $(VISION) $(ARGS)
	$(BIN)/python demo/review_vision.py $(VISION)
	$(BIN)/python -m pytest tests/test_engine/offline/test_demo_vision.py tests/test_e2e/test_demo_vision.py -n 0

pictures: install-dev ## draw docs/dashboards from a loaded server (needs system-packages, three minutes)
	PYTHONPATH=tests/support $(BIN)/python charts/generate/pictures.py

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
	$(LOCK) pyproject.toml requirements/build.in --extra up -c constraints.txt -o requirements/up.txt
	$(LOCK) pyproject.toml requirements/build.in --extra dev --extra sdks -c constraints.txt -o requirements/dev.txt
	$(LOCK) requirements/flash-attn.in --no-deps -c constraints.txt -o requirements/flash-attn.txt
	$(LOCK) requirements/build.in -c constraints.txt -o requirements/build.txt
	$(LOCK) requirements/uv.in -o requirements/uv.txt
	$(LOCK) requirements/tools.in -o requirements/tools.txt

sbom: install-dev $(TOOLS)/.installed ## write dist/sbom: the Python packages of each image as CycloneDX
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
