#!/usr/bin/env bash
# Make .venv hold the pinned CPU set and this project. Does nothing when it already does.
#
#   requirements/*, pyproject.toml -> [setup.sh] -> .venv, .venv/.setup-<hash of those>
#   csrc/*, torch's version        -> [setup.sh] -> sgl_vmm, sgl_reroute in .venv,
#                                                   .venv/.csrc-<hash of those>
#
# PYTHON=... chooses the interpreter (default: the first of python3, python3.11 that fits).
# pip's own configuration (index, mirror, proxy, find-links) applies.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VENV=.venv
readonly TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
readonly STEPS=4
step_number=0

say() { printf 'setup: %s\n' "$*"; }

fail() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

# A progress line for each slow step: with the server's own, a first `make serve` shows 15 at most.
step() {
    step_number=$((step_number + 1))
    say "[$step_number/$STEPS] $*"
}

# The folder is part of it: a moved checkout has an editable install that points nowhere.
wanted_hash() {
    { pwd; cat requirements/*.txt pyproject.toml setup.py scripts/setup.sh; } |
        sha256sum | cut -c1-16
}

# sgl_reroute is built against torch's C++ interface, which another version changes.
wanted_csrc_hash() {
    {
        find csrc -type f -not -path 'csrc/tests/*' -print0 | sort -z | xargs -0 sha256sum
        find "$VENV"/lib/python3*/site-packages -maxdepth 1 -name 'torch-*.dist-info' \
            -printf '%f\n' 2>/dev/null || true
    } | sha256sum | cut -c1-16
}

# No other has been tried with these pins (requirements/README.md).
python_fits() {
    "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null
}

choose_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.11}; do
        if python_fits "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "needs Python 3.11, the one its pins were tried with, tried: ${PYTHON:-python3 python3.11}" \
        "install it, or name it: make setup PYTHON=/path/to/python3.11"
}

# Twice quiet: errors only. Extra indexes and editable installs make pip and setuptools warn.
pip_install() {
    "$VENV/bin/python" -m pip install --quiet --quiet --disable-pip-version-check \
        --no-input --no-deps "$@"
}

make_venv() {
    local python=$1
    if [ -e "$VENV" ] && python_fits "$VENV/bin/python"; then
        return
    fi
    "$python" -m venv --clear "$VENV" ||
        fail "$python cannot make a virtual environment" \
            "on Debian and Ubuntu: apt install python3-venv"
}

# The configured index first, so that a mirror or a wheel folder is enough; PyPI itself has no
# CPU build under this version, and then PyTorch's own index is asked.
install_torch() {
    local log="$VENV/torch-first-try.log"
    pip_install -r requirements/torch-cpu.txt 2>"$log" && return
    say "      not on the configured index, asking $TORCH_CPU_INDEX"
    pip_install -r requirements/torch-cpu.txt --index-url "$TORCH_CPU_INDEX" && return
    cat "$log" >&2
    fail_install "torch"
}

fail_install() {
    fail "installing $1 failed; pip's reason is above" \
        "the pins were made on Linux x86_64 with Python 3.11; this is $(uname -sm)" \
        "with $("$VENV/bin/python" -V). Elsewhere other versions may be needed:" \
        "requirements/README.md says how to pin them."
}

# Objects stay in build/, so that a changed file costs only its own compilation.
build_csrc() {
    command -v "${CXX:-c++}" >/dev/null ||
        fail "no C++ compiler: the native code in csrc/ is C++17 and, where torch is, C++20" \
            "on Debian and Ubuntu: apt install g++; or name one: make setup CXX=/path/to/c++"
    pip_install --no-build-isolation --force-reinstall -C build-dir="$PWD/build/csrc" ./csrc ||
        fail "building csrc/ failed; the compiler's reason is above"
    rm -f "$VENV"/.csrc-*
    touch "$1"
}

set_up() {
    local stamp=$1 python
    python=$(choose_python)
    step "virtual environment in $VENV ($("$python" -V))"
    make_venv "$python"
    step "torch, CPU build (about 200 MB)"
    install_torch
    step "SGLang and what it needs on a CPU ($(grep -c == requirements/cpu.txt) packages, a few minutes)"
    pip_install -r requirements/engine.txt -r requirements/cpu.txt -r requirements/build.txt \
        -r requirements/dev.txt || fail_install "the pinned packages"
    step "the native code and this project, editable (a minute)"
    build_csrc "$VENV/.csrc-$(wanted_csrc_hash)"
    pip_install --no-build-isolation --editable . || fail_install "this project"
    "$VENV/bin/python" -m scripts.check_install || fail "not a clean CPU install, see above"
    rm -f "$VENV"/.setup-*
    touch "$stamp"
    say "done in ${SECONDS} s"
}

main() {
    local stamp csrc_stamp
    stamp="$VENV/.setup-$(wanted_hash)"
    csrc_stamp="$VENV/.csrc-$(wanted_csrc_hash)"
    if [ -e "$stamp" ] && [ -e "$csrc_stamp" ]; then
        return
    fi
    # `make serve` and `make test` may be started at once: the second waits, then finds the stamps.
    exec 9>.setup.lock
    if command -v flock >/dev/null; then
        flock 9
    fi
    if [ ! -e "$stamp" ]; then
        set_up "$stamp"
    elif [ ! -e "$csrc_stamp" ]; then
        say "csrc/ has changed, building it again"
        build_csrc "$csrc_stamp"
    fi
}

# Sourced, it only defines its functions (for the tests).
if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    main
fi
