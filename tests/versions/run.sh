#!/usr/bin/env bash
# run.sh: the suite with the oldest and with the newest packages that setup.py accepts, each time
# in an environment of its own in $VERSIONS, on the Pythons that this machine has. uv resolves.
# The newest of all need Python 3.12 (megatron-core from 0.17, numpy from 2.5): LANES=3.12-highest
# runs them alone.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${VERSIONS:-.versions}
export OMP_NUM_THREADS=1
said=()

.venv/bin/python -m venv "$folder/uv"
"$folder/uv/bin/python" -m pip install --quiet uv
PATH=$PWD/$folder/uv/bin:$PATH

for name in ${LANES:-3.11-lowest-direct 3.11-highest 3.12-highest 3.13-highest}; do
    own=$folder/$name
    if ! interpreter=$(tests/python.sh "${name%%-*}"); then
        said+=("$name: skipped, there is no Python ${name%%-*}")
        continue
    fi
    "$interpreter" -m venv "$own"
    python=$own/bin/python
    uv pip compile --quiet --upgrade setup.py --extra test --resolution "${name#*-}" --python "$python" \
        --output-file "$own/installed.txt"
    uv pip sync --quiet --python "$python" "$own/installed.txt"
    uv pip install --quiet --python "$python" --no-deps --editable .
    uv pip list --quiet --outdated --python "$python"  # packages that another one holds back
    packages=$(grep -E '^(megatron-|numpy=|torch==|transformers)' "$own/installed.txt" | paste -sd ' ')
    verdict=failed
    "$python" -m pytest -m 'exhaustive or not exhaustive' -n 2 --dist worksteal && verdict=passed
    said+=("$name: $verdict with $packages")
done
printf '%s\n' "${said[@]}"
[[ ${said[*]} != *': failed'* ]]
