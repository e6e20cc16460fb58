#!/usr/bin/env bash
# Coverage-guided fuzzing of the store with the stable compiler: run.sh [TARGET…], all four by default.
# RUNS executions a target (100000) or SECONDS_EACH seconds, inputs in corpus/, findings in artifacts/.
# RUSTC_BOOTSTRAP lets the build pass sanitizer flags, which are what `cargo fuzz` passes on a nightly.
set -euo pipefail
cd "$(dirname "$0")"
cargo run --release --bin seeds corpus
export RUSTC_BOOTSTRAP=1
export RUSTFLAGS="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
  -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
  -Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing -Cdebug-assertions=on -Coverflow-checks=on \
  -Ccodegen-units=1"
HOST="$(rustc -vV | sed -n 's/^host: //p')"
cargo build --release --target "$HOST" --bin open --bin chunk --bin index --bin manifest
BIN="${CARGO_TARGET_DIR:-target}/$HOST/release"
targets=("$@")
[ $# -gt 0 ] || targets=(open chunk index manifest)
if [ -n "${SECONDS_EACH:-}" ]; then bound="-max_total_time=$SECONDS_EACH"; else bound="-runs=${RUNS:-100000}"; fi
for target in "${targets[@]}"; do
  mkdir -p "artifacts/$target"
  "$BIN/$target" "corpus/$target" -artifact_prefix="artifacts/$target/" -max_len=65536 -timeout=10 \
    -rss_limit_mb=1024 -print_final_stats=1 "$bound"
done
