#!/bin/sh
# Runs every fuzz target for some seconds: fuzz/run.sh SECONDS [TARGET...]
# Fails at the first crash; prints how many inputs each target has run. Needs a nightly toolchain.
# SANITIZER=none makes `open_index` and `conditioned_tables`, which have no unsafe code below them, several times as fast.
set -eu
seconds=${1:?usage: fuzz/run.sh SECONDS [TARGET...]}
shift
cd "$(dirname "$0")/.."
sanitizer=${SANITIZER:-address}
# gcc takes constant tables for variables out of scope, and reports zstd for it.
[ "$sanitizer" = none ] || export CFLAGS="${CFLAGS:-} -fno-sanitize-address-use-after-scope"
command -v cargo-fuzz >/dev/null || cargo install cargo-fuzz --locked
[ $# -gt 0 ] || set -- $(cargo +nightly fuzz list)
target_dir=fuzz/target/$sanitizer
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for target; do
    mkdir -p "fuzz/corpus/$target"
    if ! cargo +nightly fuzz run --sanitizer "$sanitizer" --target-dir "$target_dir" "$target" \
        "fuzz/corpus/$target" "fuzz/seeds/$target" -- \
        -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 >"$log" 2>&1; then
        cut -c1-2000 "$log"
        echo "$target: failed" >&2
        exit 1
    fi
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
    echo "$target: $runs executions in $seconds s"
done
