#!/bin/sh
# Runs every fuzz target for some seconds: fuzz/run.sh SECONDS [TARGET...]
# Fails on the first crash; prints how many inputs each target has run. Needs a nightly toolchain.
set -eu
seconds=${1:?usage: fuzz/run.sh SECONDS [TARGET...]}
shift
cd "$(dirname "$0")/.."
command -v cargo-fuzz >/dev/null || cargo install cargo-fuzz --locked
[ $# -gt 0 ] || set -- $(cargo +nightly fuzz list)
cargo +nightly fuzz build
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for target; do
    mkdir -p "fuzz/corpus/$target"
    if ! cargo +nightly fuzz run "$target" "fuzz/corpus/$target" "fuzz/seeds/$target" -- \
        -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 >"$log" 2>&1; then
        cat "$log"
        echo "$target: failed" >&2
        exit 1
    fi
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
    echo "$target: $runs executions in $seconds s"
done
