#!/usr/bin/env bash
# Builds the C core's self-test under sanitizers and runs it.
#
#   csrc/tests/sanitize.sh BUILD_FOLDER SECONDS SEED [address|portable|thread ...]
set -euo pipefail
mkdir -p "$1"
build=$(realpath "$1") seconds=$2 seed=$3
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. csrc/core_objects.sh

shift 3
kinds=("${@:-address portable thread}")

for kind in ${kinds[*]}; do
    case $kind in
        address) flags="-fsanitize=address,undefined -fno-sanitize-recover=all" ;;
        # The same without the CRC instruction, for machines that lack it.
        portable) flags="-fsanitize=address,undefined -fno-sanitize-recover=all -DCHECKSUM_PORTABLE" ;;
        # TSan does not model fences (-Wno-tsan); every shared word is atomic, which it does check.
        thread) flags="-fsanitize=thread -Wno-tsan" ;;
        *) echo "sanitize: unknown kind $kind; use address, portable or thread" >&2; exit 2 ;;
    esac
    # shellcheck disable=SC2206
    compile=(${CC:-gcc} -std=gnu11 -O1 -g -fno-omit-frame-pointer -Wall -Wextra -Werror -Wno-error=tsan $flags)
    core_objects "$build/core-$kind" "${compile[@]}"
    for test in selftest selftest_map selftest_load selftest_disk selftest_disk_threads; do
        sources=("csrc/tests/$test.c")
        if [ "$test" = selftest_disk ]; then sources+=(csrc/tests/disk_memfs.c); fi
        "${compile[@]}" -o "$build/$test-$kind" "${sources[@]}" "$build/core-$kind"/*.o -lpthread -lrt
        echo "sanitize: $kind $test"
        ASAN_OPTIONS=detect_leaks=1 "$build/$test-$kind" "$seconds" "$seed"
    done
done
