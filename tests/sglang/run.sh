#!/usr/bin/env bash
# Validate against the protocol models of the sglang wheel, in an environment of its own: the wheel is installed without
# its dependencies, beside the few packages that its protocol module imports.
#   PYTHON          makes that environment (default: python3)
#   SGLANG_VENV     where it is (default: .venv/sglang)
#   PROJECT_PYTHON  runs this project's programs (default: .venv/bin/python)
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${SGLANG_VENV:-.venv/sglang}
installed=$venv/.installed-sglang-0.5.20
if [ ! -e "$installed" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    # In this order: the other one makes pip list all the dependencies that the wheel is left without.
    "$venv/bin/python" -m pip install --quiet openai pydantic numpy requests tqdm ipython pybase64 pytest
    "$venv/bin/python" -m pip install --quiet --no-deps sglang==0.5.20
    touch "$installed"
fi
export MILES_REF_PYTHON=${PROJECT_PYTHON:-$PWD/.venv/bin/python}
export PYTHONPATH=$PWD
exec "$venv/bin/python" -m pytest -c tests/sglang/sglang.ini --rootdir tests/sglang tests/sglang "$@"
