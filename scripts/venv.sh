# Sourced by the other scripts: makes the project's virtual environments, once.
#
#   make_venv DIR PINS REQUIREMENT...   installs the requirements at the versions that the file PINS
#                                       names; does nothing when DIR was made from the same before

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

find_python() {
  local candidate
  for candidate in python3.11 python3 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "This needs Python 3.11 or newer on PATH (the SDK alone runs on 3.10)." >&2
  return 1
}

make_venv() {
  local dir=$1 constraints=$2 python want
  shift 2
  want=$(cat "$constraints" pyproject.toml <(echo "$@") | cksum)
  if [ "$(cat "$dir/.pins" 2>/dev/null)" = "$want" ]; then
    return
  fi
  python=$(find_python) || return 1
  echo "Setting up $dir (once; a few minutes on a slow line) ..." >&2
  if ! "$python" -m venv "$dir"; then
    echo "Could not make a virtual environment; on Debian or Ubuntu: apt install python3-venv" >&2
    return 1
  fi
  rm -f "$dir/.pins"
  local pip=("$dir/bin/python" -m pip install --quiet --disable-pip-version-check)
  if [[ " $* " == *dev* ]]; then
    # Alone and first: anything else that needs torch would bring the CUDA build along.
    "${pip[@]}" torch==2.13.0 || return 1
  fi
  "${pip[@]}" --constraint "$constraints" setuptools || return 1
  "${pip[@]}" --constraint "$constraints" --no-build-isolation "$@" || return 1
  echo "$want" >"$dir/.pins"
}
