#!/usr/bin/env bash
# Makes the Python environment .venv at the repository root. See --help.
set -euo pipefail

usage() {
  cat <<'HELP'
usage: launch/setup.sh [--test] [--bench]

Makes .venv at the repository root with Python 3.11 and installs the pinned requirements.
Running it again is instant when nothing has changed, and safe after an interruption.

  --test    also what the tests need, and on Debian as root the packages that the browser tests
            use (chromium, chromium-driver, fonts-dejavu-core)
  --bench   also torch and transformers, for parity checks and benchmarks
  --help    this text
HELP
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="$root/.venv"
modes=(base)
for arg in "$@"; do
  case "$arg" in
    --test) modes+=(test) ;;
    --bench) modes+=(bench) ;;
    -h | --help) usage; exit 0 ;;
    *) echo "setup.sh: unknown argument: $arg" >&2; usage >&2; exit 2 ;;
  esac
done

say() { echo "setup.sh: $*"; }
die() { echo "setup.sh: $*" >&2; exit 1; }

# Two set-ups at once (two terminals, two test runs) would break each other's pip.
if command -v flock >/dev/null; then
  exec 9<"$root"
  flock 9
fi

apt_updated=0
apt_install() { # packages... ; fails where this is not Debian, or without root
  [[ $EUID -eq 0 ]] && command -v apt-get >/dev/null || return 1
  export DEBIAN_FRONTEND=noninteractive
  if [[ $apt_updated -eq 0 ]]; then
    apt-get update -qq >/dev/null 2>&1 || return 1
    apt_updated=1
  fi
  say "installing Debian packages: $*"
  apt-get install -y -qq --no-install-recommends "$@" >/dev/null 2>&1
}

find_python() { # a `python3.11` on the path may be a shim that cannot run, so each is tried
  local candidate
  for candidate in python3.11 /usr/bin/python3.11 python3 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return 0
    fi
  done
  return 1
}

make_venv() {
  # Console scripts hold the absolute path of the environment, so a moved checkout gets a new one.
  local made="$venv/.made" python
  [[ -f "$made" && "$(cat "$made")" == "$venv" ]] && "$venv/bin/python" -c '' 2>/dev/null && return 0
  python="$(find_python)" || die "Python 3.11 was not found; install it (on Debian 12: python3.11 and python3.11-venv)"
  "$python" -c 'import ensurepip' 2>/dev/null || apt_install python3.11-venv ||
    die "$python has no ensurepip; install python3.11-venv"
  say "making $venv"
  "$python" -m venv --clear "$venv"
  # Scripts in launch/, convert/ and eval/ import mage_jax from the checkout, from any directory.
  echo "$root" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/mage_jax_checkout.pth"
  echo "$venv" >"$made"
}

install_mode() { # base | test | bench
  local file="requirements-$1.txt" stamp="$venv/.stamp-$1" want
  [[ "$1" == base ]] && file=requirements.txt
  want="$1 $(cd "$root" && cat requirements.txt "$file" | sha256sum | cut -d' ' -f1)"
  [[ -f "$stamp" && "$(cat "$stamp")" == "$want" ]] && return 0
  say "installing $file"
  rm -f "$stamp"
  "$venv/bin/python" -m pip install -qq --no-input --disable-pip-version-check -r "$root/$file" ||
    die "pip could not install $file"
  echo "$want" >"$stamp" # last, so that an interrupted installation starts again
}

browser_packages() {
  local missing=()
  command -v chromium >/dev/null || missing+=(chromium)
  command -v chromedriver >/dev/null || missing+=(chromium-driver)
  [[ -e /usr/share/fonts/truetype/dejavu/DejaVuSans.ttf ]] || missing+=(fonts-dejavu-core)
  [[ ${#missing[@]} -eq 0 ]] || apt_install "${missing[@]}" ||
    say "not installed (needs root on Debian, and its package archive): ${missing[*]}; the tests that use them will be skipped"
}

make_venv
for mode in "${modes[@]}"; do install_mode "$mode"; done
if [[ " ${modes[*]} " == *" test "* ]]; then browser_packages; fi
