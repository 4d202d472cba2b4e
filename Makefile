# `make demo` and `make test` do all set-up on a fresh machine: a virtual environment in .venv, then the job.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
READY := $(VENV)/.ready
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)

CHECKS := $(VENV)/.checks

.PHONY: demo serve test check lint bench clean

demo: $(READY)
	@$(BIN)/rcd demo

serve: $(READY)
	@$(BIN)/rcd serve

test: $(READY) lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

# what takes longer than `make test` may: the whole fuzz, its faults, many callers, every golden answer; a browser, Ray
check: $(CHECKS)
	$(BIN)/python -m tests.equivalence.fuzz --cases 2000 --seed 0
	$(BIN)/python -m tests.equivalence.faults
	$(BIN)/python -m tests.equivalence.stress --threads 8 --calls 200
	$(BIN)/python -m tests.equivalence.stress --cancel
	$(BIN)/python tests/fixtures/golden/make.py --check
	RCD_BROWSER=required $(BIN)/python -m pytest -n 2 --dist loadfile tests/browser
	RCD_CHECKS=required $(BIN)/python -m pytest -n 0 tests/check

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/rcd bench decode --shape sdar-tiny

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "rcd needs Python 3.11 or newer; name one with: make PYTHON=python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q "$(TORCH)"
	PYTHONWARNINGS=ignore $(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	@touch $(READY)

# a browser for the page's tests, nginx and systemd for those of deploy/: the system's, or Debian's
$(CHECKS): $(READY)
	PYTHONWARNINGS=ignore $(BIN)/pip install -q -c constraints.txt -e '.[dev,check]'
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || test -n "$$RCD_CHROMIUM" \
		|| { $(SUDO) apt-get update -qq && $(SUDO) apt-get install -y -qq chromium; } \
		|| { echo "make check needs a browser: install chromium, or name one with RCD_CHROMIUM"; exit 2; }
	@for name in nginx systemd-analyze openssl; do PATH="$$PATH:/usr/sbin" command -v $$name >/dev/null && continue; \
		case $$name in nginx) package=nginx-light;; systemd-analyze) package=systemd;; *) package=$$name;; esac; \
		{ $(SUDO) apt-get update -qq && $(SUDO) apt-get install -y -qq $$package; } \
			|| { echo "make check needs $$name: install $$package"; exit 2; }; done
	@touch $(CHECKS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
