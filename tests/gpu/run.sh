#!/usr/bin/env bash
# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# What only a machine with an NVIDIA GPU can show (README.md here). Needs this checkout, Python 3.11 or newer with venv, and a GPU; no root, no CUDA
# toolkit. Exit status: 0 all shown, 77 no GPU here, anything else a failure.
#
#   tests/gpu/run.sh [arguments for pytest]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

no_gpu() { echo "no GPU here: $*"; exit 77; }

command -v nvidia-smi > /dev/null || no_gpu "there is no nvidia-smi on PATH"
listed=$(nvidia-smi -L 2>&1) || no_gpu "nvidia-smi says: $(head -n 1 <<< "$listed")"
grep -q '^GPU [0-9]' <<< "$listed" || no_gpu "nvidia-smi lists none: $(head -n 1 <<< "$listed")"
${PYTHON:-python3} -c 'import ctypes; ctypes.CDLL("libcuda.so.1")' 2> /dev/null || no_gpu "libcuda.so.1 cannot be loaded, so nothing can take GPU memory"
echo "$listed"

venv=${GPU_TEST_VENV:-.venv}
if [[ ! -x $venv/bin/python ]]; then
    ${PYTHON:-python3} -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: PYTHON=python3.12 $0"; exit 1; }
    ${PYTHON:-python3} -m venv "$venv"
fi
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r requirements/demo.txt pytest
exec "$venv/bin/python" -m pytest -v -rs -p no:cacheprovider tests/gpu "$@"
