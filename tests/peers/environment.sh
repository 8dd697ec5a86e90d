#!/usr/bin/env bash
# environment.sh NAME: make $PEERS/NAME, where the packages of NAME.txt stand before those of .venv.
# Nothing else is installed twice. What NAME.txt leaves out of a trainer's requirements, its data
# code does not import; nor does it need the Python that some of them declare.
# A NAME.txt with the line "# Python 3.12" needs that one: there stand constraints.txt's packages.
set -euo pipefail
cd "$(dirname "$0")/../.."
list=tests/peers/$1.txt folder=${PEERS:-.peers}/$1 base=.venv/bin/python
version=$(sed -n 's/^# Python //p' "$list")
[ -z "$version" ] || base=$(tests/python.sh "$version")
wanted=$("$base" --version; cat "$list" ${version:+constraints.txt})

is_made() { [ "$(cat "$folder/installed.txt" 2> /dev/null)" = "$wanted" ]; }

if ! is_made; then
    rm -rf "$folder"
    "$base" -m venv --without-pip "$folder"
fi
# Always: it may have been made by another checkout, which has a .venv of its own.
site='import sysconfig; print(sysconfig.get_path("purelib"))'
shared=$(.venv/bin/python -c "$site") own=$("$folder/bin/python" -c "$site")
[ -z "$version" ] || shared=$PWD  # for what the checkout's egg-info says of it
echo "import site; site.addsitedir('$shared')" > "$own/shared.pth"
if ! is_made; then
    install=(.venv/bin/python -m pip --python "$folder/bin/python" install --quiet)
    [ -z "$version" ] || "${install[@]}" --requirement constraints.txt
    "${install[@]}" --no-deps --ignore-requires-python --requirement "$list"
    echo "$wanted" > "$folder/installed.txt"
fi
