#!/bin/sh
# Says in one line what this machine lacks and how to get it. The Makefile calls it first.
# Usage: check_prerequisites.sh PYTHON
python="$1"

missing() {
    echo "blockyard: $1" >&2
    exit 1
}

for tool in git g++; do
    command -v "$tool" >/dev/null || missing "$tool is missing: install it, for instance with 'apt install $tool'"
done
command -v "$python" >/dev/null ||
    missing "$python is missing: install Python 3.10 or newer, for instance with 'apt install python3 python3-venv'"
"$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' ||
    missing "$python is $("$python" -V): Blockyard is built with Python 3.10 to 3.14; name one with 'make PYTHON=python3.12'"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    missing "$python lacks venv: install it, for instance with 'apt install python3-venv'"
command -v cargo >/dev/null && command -v rustc >/dev/null ||
    missing "Rust is missing: install Rust 1.85 or newer with rustup, see https://rustup.rs"
version=$(rustc --version | cut -d' ' -f2)
[ "$(printf '%s\n' 1.85.0 "$version" | sort -V | head -n1)" = 1.85.0 ] ||
    missing "rustc is $version: Blockyard needs Rust 1.85 or newer; 'rustup update stable' brings it"
for part in clippy fmt; do
    cargo "$part" --version >/dev/null 2>&1 ||
        missing "cargo $part is missing: install it with 'rustup component add clippy rustfmt'"
done
