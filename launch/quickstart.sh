#!/usr/bin/env bash
# The main job on a laptop: sets up .venv, trains a toy model on real web pages, exports, re-imports, generates.
set -euo pipefail

usage() {
  cat <<'HELP'
usage: launch/quickstart.sh [--smoke] [--run DIR]

Sets up .venv (launch/setup.sh), then runs launch/quickstart.py on the CPU: trains a toy model on 85
screenshots of web pages, exports it to a Hugging Face folder, imports that again, generates, and
prints a table. Running it again continues where it stopped.

  --smoke     six training steps, to see the whole path in a minute
  --run DIR   run folder (default: runs/quickstart)
  --help      this text
HELP
}

args=()
while [[ $# -gt 0 ]]; do
  case "$1" in
    --smoke) args+=(--smoke) ;;
    --run | --run=*)
      dir="${1#--run}"
      dir="${dir#=}"
      if [[ -z "$dir" ]]; then
        [[ $# -gt 1 ]] || { echo "quickstart.sh: --run needs a folder" >&2; exit 2; }
        dir="$2"
        shift
      fi
      [[ "$dir" == /* ]] || dir="$PWD/$dir" # relative to where the user stands
      args+=(--run "$dir")
      ;;
    -h | --help) usage; exit 0 ;;
    *) echo "quickstart.sh: unknown argument: $1" >&2; usage >&2; exit 2 ;;
  esac
  shift
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
exec .venv/bin/python launch/quickstart.py "${args[@]}"
