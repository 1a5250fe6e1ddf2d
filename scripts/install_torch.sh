#!/usr/bin/env bash
# Installs torch before anything else can choose a build of it: install_torch.sh PYTHON VERSION [pip's options]
#
# TORCH_BUILD says which build is wanted: cpu, or cuda. By default it is cpu unless nvidia-smi sees a GPU; the CPU build
# is some 2 GB smaller. On x86-64 Linux the package index has torch with CUDA under the plain version. The CPU build is
# called VERSION+cpu and lies elsewhere: in the places where pip is set to look (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL),
# or where uv finds it by itself. On other machines there is one build.
set -euo pipefail
python=$1 version=$2
shift 2

if [ -z "${TORCH_BUILD:-}" ]; then
  if nvidia-smi -L >/dev/null 2>&1; then TORCH_BUILD=cuda; else TORCH_BUILD=cpu; fi
fi
if [ "$TORCH_BUILD" != cpu ] || [ "$(uname -sm)" != "Linux x86_64" ]; then
  exec "$python" -m pip install "$@" "torch==$version"
fi
if ! "$python" -m pip install "$@" "torch==$version+cpu"; then
  echo "pip finds no CPU build of torch; uv looks for it"
  "$python" -m pip install "$@" uv
  exec "$python" -m uv pip install --python "$python" --torch-backend cpu "torch==$version"
fi
