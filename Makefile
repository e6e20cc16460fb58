PYTHON ?= python3
VENV   ?= .venv
RUST   := $(shell find rust -name '*.rs' -o -name Cargo.toml) Cargo.toml Cargo.lock
RUN    := $(VENV)/bin/python -m

# Cargo's own builds of the bindings look at the interpreter that they will be loaded into.
export PYO3_PYTHON = $(abspath $(VENV))/bin/python

.PHONY: quickstart test test-sglang lint docs clean

quickstart: $(VENV)/.installed
	$(VENV)/bin/tracekit train configs/quickstart.toml --clean

test: $(VENV)/.installed
	$(RUN) pytest
	cargo test --workspace --release --features tracekit-guidance/uring

# A real engine on a CPU. Its pinned packages go beside the project's own, so it comes last in a shared environment.
test-sglang: $(VENV)/.installed
	$(RUN) pip install --quiet --disable-pip-version-check --no-deps -r tests/sglang/requirements.txt
	OMP_NUM_THREADS=1 $(RUN) pytest tests/sglang

lint: $(VENV)/.installed
	cargo clippy --workspace --all-targets --release --features tracekit-guidance/uring -- -D warnings
	cargo fmt --all --check
	$(RUN) ruff check .
	$(RUN) ruff format --check .

docs: $(VENV)/.installed
	$(RUN) tracekit.config.reference docs

$(VENV)/.installed: pyproject.toml $(RUST)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "tracekit needs Python 3.11 or newer; name one: make PYTHON=python3.11"; exit 1; }
	@command -v cargo >/dev/null || { echo "tracekit needs a Rust toolchain: https://rustup.rs"; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(RUN) pip install --quiet --disable-pip-version-check --no-compile -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) target
