# Every target first makes its own .venv, so each works on a fresh checkout.
# Needs Python 3.11 or newer; `make PYTHON=/path/to/python3 ...` names one.

CANDIDATES := $(strip $(PYTHON) python3 python3.13 python3.12 python3.11)
EXTRAS := dev,ray,checkpoint,report,examples
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/installed
IS_NEW_ENOUGH := -c 'import sys; sys.exit(sys.version_info < (3, 11))'
N ?= 1000
# Seconds that a test of a commit may take: one that hangs is told.
TIMEOUT := 900

.PHONY: demo test test-all test-targets fuzz lint install

demo: install
	@$(VENV)/bin/autopar demo

test: install
	@$(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder --timeout $(TIMEOUT)

test-all: install
	@$(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not targets"

# Compilers of devices that are not here; AUTOPAR_NO_TARGETS=1 goes without them.
test-targets: export AUTOPAR_TARGETS := $(abspath $(VENV)/targets)
test-targets: install
	@for platform in cuda tpu; do \
	    $(RUN) -c "import sys; from autopar.targets import compilers; \
	        sys.exit(compilers.find('$$platform') is None)" || \
	        [ "$$AUTOPAR_NO_TARGETS" = 1 ] || \
	        $(VENV)/bin/autopar targets add $$platform || true; \
	done
	@$(RUN) -m pytest -m targets --timeout $(TIMEOUT) tests/targets

fuzz: install
	@rm -f .pytest_cache/fuzz.jsonl
	@AUTOPAR_FUZZ_EXAMPLES=$(N) $(RUN) -m pytest -n 2 --dist worksteal -m fuzz; \
	    status=$$?; $(RUN) -m tests.fuzz.report; exit $$status

lint: install
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m pyright

install: $(STAMP)

# The package list of setup.cfg is read at installation only: reinstall on change.
$(STAMP): pyproject.toml setup.cfg constraints.txt
	@if ! { $(RUN) $(IS_NEW_ENOUGH) && $(RUN) -m pip --version; } >/dev/null 2>&1; then \
	    for candidate in $(CANDIDATES); do \
	        if $$candidate $(IS_NEW_ENOUGH) 2>/dev/null; then found=$$candidate; break; fi; \
	    done; \
	    if [ -z "$$found" ]; then \
	        echo "autopar needs Python 3.11 or newer; none of these is: $(CANDIDATES)." \
	            "Install one, or name it: make PYTHON=/path/to/python3" >&2; \
	        exit 1; \
	    fi; \
	    echo "Making $(VENV) with $$found"; \
	    $$found -m venv --clear $(VENV) || { \
	        echo "$$found cannot make a virtual environment;" \
	            "on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }; \
	fi
	@echo "Installing autopar and its dependencies into $(VENV)"
	@$(RUN) -m pip install --quiet --quiet --disable-pip-version-check \
	    --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@
