# The two commands a newcomer needs: `make run` and `make test`.
SHELL := /bin/bash
VENV ?= .venv
PY := $(VENV)/bin/python
BIN := $(VENV)/bin
MODEL_FILE ?= examples/smollm2.yaml

.PHONY: run test lint bench soak format generate e2e gpu-check kube-binaries clean install

install: $(VENV)/.stamp-installed

$(VENV)/.stamp-installed: pyproject.toml constraints.txt
	@test -x $(PY) || python3 -m venv $(VENV)
	@$(PY) -m pip --version >/dev/null 2>&1 || python3 -m venv $(VENV)
	@echo "installing into $(VENV) (torch is 4.7 GB on disk; 1-5 minutes)"
	@$(PY) -m pip install -q --disable-pip-version-check "uv>=0.8"
	@$(BIN)/uv pip install -q -p $(PY) -c constraints.txt -e '.[dev]'
	@touch $@

run: install
	$(BIN)/forebay up $(MODEL_FILE)

test: install
	$(PY) -m pytest tests -m "not soak" --durations=15

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini bench e2e tests
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generate: install
	$(PY) charts/chart_tools.py

# How often each disruption is repeated on the cluster, and which (pytest's -k): SOAK_REPEATS=3 SOAK_CASES="drain or router".
SOAK_REPEATS ?= 20
SOAK_CASES ?=

soak: install
	$(PY) -m pytest tests -v -m soak --durations=15
	FOREBAY_SOAK_REPEATS=$(SOAK_REPEATS) $(PY) -m e2e -m soak $(if $(SOAK_CASES),-k "$(SOAK_CASES)")

# docs/benches.md: what each measures, and how long. BENCHES="transfer idle" runs some.
BENCHES ?= transfer engine interference idle prefix router switch shift observe rescale operator

bench: install
	@for name in $(BENCHES); do \
	  options=; \
	  if [ $$name = rescale ]; then options=--short; fi; \
	  if [ $$name = operator ] && ! $(PY) -c "from e2e.cluster.binaries import missing; exit(bool(missing('etcd', 'kube-apiserver')))"; then \
	    echo "== bench.operator is left out: it needs \`make kube-binaries\`" >&2; continue; \
	  fi; \
	  echo "== bench.$$name (began $$(date +%T))" >&2; \
	  $(PY) -m bench.$$name $$options || failed="$$failed $$name"; \
	done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed" >&2; exit 1; fi

# The programs of the cluster that `make e2e` builds where there is no other: 8-10 minutes of two cores, once.
kube-binaries: install
	$(PY) -m e2e.cluster.binaries

e2e: install
	$(PY) -m e2e

# docs/gpu.md: what has to be seen on a GPU.
gpu-check: install
	$(PY) tests/gpu

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
