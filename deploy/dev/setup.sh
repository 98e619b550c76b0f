#!/usr/bin/env bash
# Sets up a checkout: system packages (as root), .venv from requirements/dev.lock, Infera installed editable, the C core.
# Each step leaves a stamp holding the digest of what it was made from, so a second run has nothing to do.
#
#   deploy/dev/setup.sh        what building and testing need
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

venv=.venv
apt_is_fresh=no

# quietly COMMAND...: shows what the command printed only when it fails.
quietly() {
    local log
    log=$(mktemp)
    "$@" >"$log" 2>&1 || { cat "$log" >&2; rm -f "$log"; die "failed: $*"; }
    rm -f "$log"
}

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# need PACKAGE WHAT: installs a Debian package, or says what is missing and how to get it.
need() {
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        die "$2 is missing; install it, e.g. on Debian or Ubuntu: sudo apt-get install $1"
    fi
    if [ "$apt_is_fresh" = no ]; then
        say "updating the package lists of apt"
        apt-get update -qq || say "apt-get update failed; going on with the lists that are there"
        apt_is_fresh=yes
    fi
    say "installing $1 ($2 is missing)"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$1" >/dev/null ||
        die "apt-get could not install $1; install $2 by hand and run this again"
}

is_usable_python() {
    "$1" -c 'import sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3.14 python3; do
        if command -v "$candidate" >/dev/null && is_usable_python "$candidate"; then
            command -v "$candidate"
            return 0
        fi
    done
    return 1
}

python_has() { "$python" -c "$1" 2>/dev/null; }
has_python_header() {
    python_has 'import os, sysconfig; raise SystemExit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
}

ensure_system_packages() {
    python=$(find_python) || { need python3 "Python 3.11 or newer"; python=$(find_python); } ||
        die "no Python from 3.11 to 3.14 found; install one, or name it: make setup PYTHON=/path/to/python3.11"
    local version
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    python_has 'import ensurepip, venv' || need "python$version-venv" "the venv module of $python"
    has_python_header || need "python$version-dev" "Python.h of $python"
    command -v cc >/dev/null || need gcc "a C compiler"
    printf '#include <stdlib.h>\n' | cc -E - >/dev/null 2>&1 || need libc6-dev "the header files of the C library"
}

is_current() { [ -x "$venv/bin/python" ] && [ "$(cat "$venv/stamp-$1" 2>/dev/null)" = "$2" ]; }

# digest FILE...: one digest over names and contents.
digest() { sha256sum "$@" | sha256sum | cut -d' ' -f1; }

ensure_venv() {
    local want
    want=$(digest requirements/dev.lock)
    is_current dev "$want" && return
    ensure_system_packages
    if ! [ -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        say "making $venv with $python"
        rm -rf "$venv"
        "$python" -m venv "$venv"
    fi
    say "installing the packages of requirements/dev.lock into $venv (about a minute)"
    quietly "$venv/bin/python" -m pip install --disable-pip-version-check --require-hashes -r requirements/dev.lock
    printf '%s\n' "$want" >"$venv/stamp-dev"
}

ensure_infera() {
    local want
    want=$(digest pyproject.toml setup.py requirements/dev.lock infera/__init__.py)
    if ! is_current infera "$want"; then
        ensure_system_packages
        say "installing infera from this checkout (editable) and building the C core"
        quietly "$venv/bin/python" -m pip install --disable-pip-version-check --no-deps --no-build-isolation --editable .
        rm -f "$venv"/stamp-core "$venv"/stamp-plugin-*
        printf '%s\n' "$want" >"$venv/stamp-infera"
    fi
}

ensure_core() {
    local want
    want=$(find csrc -maxdepth 1 -type f \( -name '*.c' -o -name '*.h' -o -name '*.py' \) -print0 | sort -z |
        xargs -0 sha256sum | sha256sum | cut -d' ' -f1)
    if is_current core "$want" && compgen -G 'csrc/infera_core/_native*.so' >/dev/null; then return; fi
    ensure_system_packages
    say "building the C core"
    # --force: setuptools compares times, and a checkout may bring older files than the last build.
    quietly "$venv/bin/python" setup.py build_ext --inplace --force
    printf '%s\n' "$want" >"$venv/stamp-core"
}

ensure_plugins() {
    local project name want
    for project in plugins/*/pyproject.toml; do
        [ -e "$project" ] || continue
        name=$(basename "$(dirname "$project")")
        want=$(digest "$project")
        is_current "plugin-$name" "$want" && continue
        say "installing plugins/$name from this checkout (editable)"
        quietly "$venv/bin/python" -m pip install --disable-pip-version-check --no-deps --no-build-isolation \
            --editable "plugins/$name"
        printf '%s\n' "$want" >"$venv/stamp-plugin-$name"
    done
}

main() {
    ensure_venv
    ensure_infera
    ensure_core
    ensure_plugins
}

main "$@"
