#!/usr/bin/env bash
# Builds the kernels for ARM with a cross compiler, and runs their tests under user-mode emulation.
#
#   scripts/test_arm.sh [PYTEST_ARGUMENT ...]        or: make test-arm
#
# Needs Debian on x86-64, and its packages g++-aarch64-linux-gnu and qemu-user-static. An ARM Python from Debian and
# wheels for ARM are brought into build/arm the first time (230 MB). On a machine with an ARM processor run
# `pytest tests/kernels` instead.
set -euo pipefail
cd "$(dirname "$0")/.."

compiler=aarch64-linux-gnu-g++
emulator=qemu-aarch64-static
for command in "$compiler" "$emulator" apt-get dpkg-deb unzip; do
  command -v "$command" >/dev/null || {
    echo "test_arm.sh: $command is missing; apt-get install g++-aarch64-linux-gnu qemu-user-static unzip" >&2
    exit 1
  }
done

arm=$PWD/build/arm
python=${PYTHON:-.venv/bin/python}
mkdir -p "$arm"

# An ARM Python of Debian, by package lists of its own: the system's stay as they are.
if [[ ! -e $arm/root/.whole ]]; then
  mkdir -p "$arm"/{root,debs,apt/lists/partial,apt/cache/archives/partial}
  apt=(apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State="$arm/apt"
    -o Dir::State::status=/dev/null -o Dir::Cache="$arm/apt/cache" -o APT::Sandbox::User=root)
  "${apt[@]}" update
  (cd "$arm/debs" && "${apt[@]}" download libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 libssl3 libffi8 libbz2-1.0 liblzma5 \
    libsqlite3-0 libuuid1 libreadline8 libtinfo6 libncursesw6 libcrypt1 \
    python3.11-minimal libpython3.11-minimal libpython3.11-stdlib)
  for package in "$arm"/debs/*.deb; do dpkg-deb -x "$package" "$arm/root"; done
  touch "$arm/root/.whole"
fi

# torch 2.6 is the newest whose wheel for ARM has no CUDA; kernels use little of it. pip would take its dependencies from
# this machine's wheel.
if [[ ! -e $arm/site/.whole ]]; then
  download=("$python" -m pip download --quiet --only-binary=:all: --python-version 311 --dest "$arm/wheels"
    --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64)
  "${download[@]}" --no-deps torch==2.6.0
  "${download[@]}" numpy==2.2.6 sympy==1.13.1 networkx jinja2 fsspec filelock typing_extensions \
    msgspec psutil pytest hypothesis gguf safetensors structlog pyzmq httpx tokenizers pydantic
  for wheel in "$arm"/wheels/*.whl; do unzip -qo "$wheel" -d "$arm/site"; done
  touch "$arm/site/.whole"
fi

build() { # instruction set, flags
  local name=$1 objects=$arm/$1
  shift
  mkdir -p "$objects"
  for source in native/*.cpp; do
    local object=$objects/$(basename "$source" .cpp).o
    if [[ ! -e $object || -n $(find native -newer "$object" \( -name '*.h' -o -path "$source" \)) ]]; then
      "$compiler" -std=c++17 -O3 -fPIC -fopenmp -fvisibility=hidden -fno-math-errno -fno-trapping-math \
        -Wall -Werror -Wno-uninitialized -Wno-maybe-uninitialized "$@" -c "$source" -o "$object"
    fi
  done
  "$compiler" -shared -Wl,-Bsymbolic "$objects"/*.o -o "src/lorikeet/kernels/_cpu_$name.so"
}
build neon -march=armv8-a &
build neonbf16 -march=armv8.2-a+bf16 &
wait %1 && wait %2

if (($# == 0)); then
  set -- tests/kernels/test_native_*.py tests/kernels/test_quantized.py
fi
# The emulator's threads take turns, so that deadlines of examples mean nothing.
exec "$emulator" -L "$arm/root" -E PYTHONHOME="$arm/root/usr" -E PYTHONPATH="$arm/site:$PWD/src:$PWD" \
  -E PYTHONDONTWRITEBYTECODE=1 -E OMP_NUM_THREADS=2 "$arm/root/usr/bin/python3.11" -m pytest -q --noconftest \
  -c tests/arm.ini --rootdir . -p no:cacheprovider -p tests.support.arm "$@"
