#!/usr/bin/env bash
# environment.sh NAME: make .peers/NAME, where the packages of NAME.txt stand before those of .venv.
# Nothing else is installed twice. What NAME.txt leaves out of a trainer's requirements, its data
# code does not import.
set -euo pipefail
cd "$(dirname "$0")/../.."
list=tests/peers/$1.txt folder=.peers/$1

cmp --silent "$list" "$folder/installed.txt" && exit
rm -rf "$folder"
.venv/bin/python -m venv --without-pip "$folder"
shared=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
own=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$shared')" > "$own/shared.pth"
"$folder/bin/python" -m pip install --quiet --no-deps --requirement "$list"
cp "$list" "$folder/installed.txt"
