#!/bin/sh
# Makes an environment with everything that the services need, in the tested versions: dependencies.sh BUILD_FOLDER ENVIRONMENT
set -eu
build=$1 environment=$2 pins=/tmp/constraints.txt requirements=/tmp/requirements.txt

pip() { /installer/bin/python -m pip --python "$environment/bin/python" "$@"; }

python3 -m venv --without-pip "$environment"
cp "$build/constraints.txt" $pins
if [ -n "${TORCH_SPEC:-}" ]; then
  grep -vE '^(torch|torchvision|triton|nvidia-.*|cuda-.*)==' "$build/constraints.txt" >$pins
  # Words on purpose: TORCH_SPEC names several packages.
  # shellcheck disable=SC2086
  pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} $TORCH_SPEC
  pip freeze | grep -E '^(torch|torchvision)==' >>$pins
fi
python3 - "$build/pyproject.toml" "${EXTRAS:-}" >$requirements <<'PROGRAM'
import sys
import tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
chosen = [extra for extra in sys.argv[2].split(",") if extra]
print(*project["dependencies"], *(line for extra in chosen for line in project["optional-dependencies"][extra]), sep="\n")
PROGRAM
pip install --no-cache-dir --only-binary :all: -c $pins -r $requirements
rm $pins $requirements
