#!/usr/bin/env bash
# run.sh NAME...: run tests/peers/test_NAME*.py in the environment of each, whether or not others
# fail, and say at the end which ran, how many tests, and with which versions.
set -uo pipefail
cd "$(dirname "$0")/../.."
versions='import sys
from importlib.metadata import version
print(*(f"{name} {version(name)}" for name in sys.argv[1:]), sep=", ")'
said=() failed=0
for name; do
    folder=${PEERS:-.peers}/$name python=${PEERS:-.peers}/$name/bin/python
    if ! tests/peers/environment.sh "$name"; then
        said+=("$name: not run, as its environment could not be made") failed=1
        continue
    fi
    OMP_NUM_THREADS=1 "$python" -m pytest -rs --disable-warnings tests/peers/test_"$name"*.py \
        | tee "$folder/result.txt"
    result=${PIPESTATUS[0]}
    [ "$result" = 0 ] || [ "$result" = 5 ] || failed=1  # 5: all skipped
    packages=$(sed -n '/==/s/==.*//p' "tests/peers/$name.txt" | head -n 1)
    with=$("$python" -c "$versions" $packages transformers torch)
    said+=("$name: $(tail -n 1 "$folder/result.txt"), with $with")
done
printf '\nOther training frameworks:\n'
printf '%s\n' "${said[@]}"
exit $failed
