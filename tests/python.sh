#!/usr/bin/env bash
# python.sh 3.12: print a Python of this version, from PATH, pyenv or uv. Exit status 1: there is none.
set -euo pipefail
export PYENV_VERSION=$1  # pyenv hides all Pythons but its chosen one
for found in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
    "$found" -c 'import sys; print(sys.executable)' 2> /dev/null && exit
done
uv python find --no-python-downloads "$1" 2> /dev/null && exit
echo "there is no Python $1 on PATH, in pyenv or uv" >&2
exit 1
