#!/usr/bin/env bash
# Builds the fuzz targets and runs each for FUZZ_SECONDS (default 60).
#
# With clang and its libFuzzer the search is guided by coverage; without, or with FUZZ_DRIVER=seeded, the seeded
# driver beside this file makes the inputs (FUZZ_SEED; default the time). Both under address and undefined-behaviour
# sanitizers. FUZZ_TARGETS names the targets, default all.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. csrc/core_objects.sh

seconds=${FUZZ_SECONDS:-60}
seed=${FUZZ_SEED:-$(date +%s)}
build=${FUZZ_BUILD:-build/fuzz}
flags=(-std=gnu11 -g -O1 -fno-omit-frame-pointer -fno-sanitize-recover=all -Icsrc)
mkdir -p "$build/corpus"

has_libfuzzer() {
    [ "${FUZZ_DRIVER:-}" != seeded ] && command -v clang >/dev/null &&
        echo 'int LLVMFuzzerTestOneInput(const void *d, unsigned long n) { (void)d; (void)n; return 0; }' |
        clang -fsanitize=fuzzer -x c - -o "$build/probe" 2>/dev/null
}

if has_libfuzzer; then
    kind=libfuzzer compile=(clang "${flags[@]}" -fsanitize=address,undefined) driver=(-fsanitize=fuzzer)
    core_objects "$build/core-$kind" "${compile[@]}" -fsanitize=fuzzer-no-link
else
    kind=seeded compile=("${CC:-cc}" "${flags[@]}" -fsanitize=address,undefined) driver=(csrc/fuzz/driver.c)
    core_objects "$build/core-$kind" "${compile[@]}"
fi

for source in csrc/fuzz/fuzz_*.c; do
    name=$(basename "$source" .c)
    if [ -n "${FUZZ_TARGETS:-}" ] && [[ " $FUZZ_TARGETS " != *" $name "* ]]; then continue; fi
    echo "fuzz: $name ($kind, $seconds s)"
    sources=("$source")
    if [ "$name" = fuzz_disk ]; then sources+=(csrc/tests/disk_memfs.c); fi
    "${compile[@]}" "${driver[@]}" "${sources[@]}" "$build/core-$kind"/*.o -lpthread -lrt -o "$build/$name-$kind"
    if [ $kind = libfuzzer ]; then
        mkdir -p "$build/corpus/$name"
        "$build/$name-$kind" -max_total_time="$seconds" -seed="$seed" -max_len=4096 -print_final_stats=1 \
            -artifact_prefix="$build/" "$build/corpus/$name" 2>&1 | tail -n 12
    else
        (cd "$build" && "./$name-$kind" "$seconds" "$seed")
    fi
done
