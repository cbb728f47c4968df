#!/usr/bin/env bash
# Makes the seeds, then runs every fuzz target for some seconds, as many at a time as there are cores: fuzz/run.sh SECONDS [TARGET...]
# Fails if one crashes; prints how many inputs each target has run. With 0 seconds it only builds. Needs a nightly toolchain, and
# what scripts/environment needs.
# SANITIZER=none makes targets several times as fast, and sees what assertions and overflow checks see. COMPARES=no does not look
# at the operands of comparisons, which is as much again where a target compares a lot: for runs from a corpus that has grown.
set -euo pipefail
seconds=${1:?usage: fuzz/run.sh SECONDS [TARGET...]}
shift
cd "$(dirname "$0")/.."
if [ "$seconds" != 0 ]; then
    # Before the flags below, which the program that makes pairs does not take.
    python=$(scripts/environment)
    "$python" fuzz/make_seeds.py
fi
sanitizer=${SANITIZER:-address}
# gcc takes constant tables for variables out of scope, and reports zstd for it.
[ "$sanitizer" = none ] || export CFLAGS="${CFLAGS:-} -fno-sanitize-address-use-after-scope"
command -v cargo-fuzz >/dev/null || cargo install cargo-fuzz --locked
# Without a name, `cargo fuzz build` builds all targets side by side.
built=("$@")
[ $# -gt 0 ] || { built=(""); set -- $(cargo +nightly fuzz list); }
options=(--sanitizer "$sanitizer" --target-dir "fuzz/target/$sanitizer")
[ "${COMPARES:-yes}" = yes ] || options=(--sanitizer "$sanitizer" --no-trace-compares --target-dir "fuzz/target/$sanitizer-count")
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

# Runs a target that has been built.
fuzz() {
    local target=$1 log=$logs/$1
    mkdir -p "fuzz/corpus/$target"
    if ! cargo +nightly fuzz run "${options[@]}" "$target" "fuzz/corpus/$target" "fuzz/seeds/$target" -- \
        -max_total_time="$seconds" -timeout=60 -rss_limit_mb=2048 -print_final_stats=1 >"$log" 2>&1; then
        cut -c1-2000 "$log"
        echo "$target: failed" >&2
        return 1
    fi
    echo "$target: $(sed -n 's/^stat::number_of_executed_units: *//p' "$log") executions in $seconds s"
}

for target in "${built[@]}"; do
    cargo +nightly fuzz build "${options[@]}" ${target:+"$target"} >"$logs/build" 2>&1 || { cat "$logs/build"; exit 1; }
done
[ "$seconds" != 0 ] || exit 0
running=0
failed=0
for target; do
    if [ "$running" -ge "$(nproc)" ]; then
        wait -n || failed=1
        running=$((running - 1))
    fi
    fuzz "$target" &
    running=$((running + 1))
done
while [ "$running" -gt 0 ]; do
    wait -n || failed=1
    running=$((running - 1))
done
exit "$failed"
