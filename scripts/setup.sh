#!/usr/bin/env bash
# Installs what Weft needs on Debian 12 and is not there yet: packages, and a Python virtual
# environment in .venv for the scripts. Quick when there is nothing to do.
#   scripts/setup.sh            packages and .venv
#   scripts/setup.sh --python   .venv only
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

packages=(
  # tools
  ccache clang-format cmake g++ git iproute2 ninja-build openssl pkg-config procps python3-venv
  # libraries, and the generators that go with them
  libabsl-dev libcivetweb-dev libcli11-dev libfmt-dev libgrpc++-dev libhwy-dev libpcre2-dev
  libprotobuf-dev libspdlog-dev libssl-dev libucx-dev libutf8proc-dev nlohmann-json3-dev
  prometheus-cpp-dev protobuf-compiler protobuf-compiler-grpc
  # tests
  clang libbenchmark-dev libboost-context-dev libclang-rt-14-dev libgmock-dev libgtest-dev prometheus ucx-utils
)

install_packages() {
  local missing=() package
  for package in "${packages[@]}"; do
    if [[ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" != installed ]]; then
      missing+=("$package")
    fi
  done
  if ((${#missing[@]} == 0)); then return; fi
  echo "setup: installing ${missing[*]}"
  local sudo=()
  if ((EUID != 0)); then sudo=(sudo); fi
  "${sudo[@]}" apt-get update -qq
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "${missing[@]}"
}

# The copy of requirements.txt inside .venv is written last: it says that the environment is whole.
make_venv() {
  if cmp -s scripts/requirements.txt .venv/requirements.txt && [[ -x .venv/bin/python ]]; then
    return
  fi
  echo "setup: making .venv"
  rm -rf .venv
  # Debian's python3-venv belongs to Debian's interpreter, whatever else is first in PATH.
  /usr/bin/python3 -m venv .venv
  .venv/bin/python -m pip install -q --disable-pip-version-check -r scripts/requirements.txt
  cp scripts/requirements.txt .venv/requirements.txt
}

main() {
  case "${1-}" in
    "") install_packages ;;
    --python) ;;
    *)
      echo "usage: scripts/setup.sh [--python]" >&2
      exit 2
      ;;
  esac
  # Two scripts started together must not both build .venv.
  exec 9<scripts/setup.sh
  flock 9
  make_venv
}

main "$@"
