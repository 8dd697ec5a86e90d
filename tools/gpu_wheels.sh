#!/usr/bin/env bash
# Download the wheels of tools/gpu_wheels.txt for Python 3.12 on x86-64 into $WHEELS, which
# tools/gpu_suite.sh installs without a network.
set -euo pipefail
cd "$(dirname "$0")/.."
WHEELS=${WHEELS:-.whl}
platforms=()
for name in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux1; do
    platforms+=(--platform "${name}_x86_64")
done
rm -rf "$WHEELS" # two versions of one package would stop the installation
"${PYTHON:-python3}" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp "${platforms[@]}" -d "$WHEELS" -r tools/gpu_wheels.txt
du -sh "$WHEELS"
