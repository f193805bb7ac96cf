#!/usr/bin/env bash
# Sets up .venv if needed, checks style, runs the tests. See --help.
set -euo pipefail

usage() {
  cat <<'HELP'
usage: launch/test.sh [--all] [pytest arguments...]

Runs launch/setup.sh --test, ruff (lint and format) and pytest on the CPU. Paths among the pytest
arguments are relative to the repository root. The exit status is pytest's.

  --all     also the tests marked slow
  --help    this text
HELP
}

cd "$(dirname "${BASH_SOURCE[0]}")/.."
markers=(-m "not slow")
args=()
for arg in "$@"; do
  case "$arg" in
    --all) markers=() ;;
    -h | --help) usage; exit 0 ;;
    *) args+=("$arg") ;;
  esac
done

bash launch/setup.sh --test

code=()
for path in mage_jax configs launch convert eval tests; do
  if [[ -d $path ]]; then code+=("$path"); fi
done
.venv/bin/python -m ruff check --quiet "${code[@]}"
.venv/bin/python -m ruff format --check --quiet "${code[@]}"

# -rs: the closing lines name every skipped test and why. Tests that need several devices start
# subprocesses with their own XLA_FLAGS.
export JAX_PLATFORMS=cpu
exec .venv/bin/python -m pytest -rs "${markers[@]}" "${args[@]}"
