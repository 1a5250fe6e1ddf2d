#!/usr/bin/env bash
# Installs the programs that tests start and pip does not bring: PostgreSQL for the registry's tests, Chromium and Node
# for the console's, promtool for the alerts'. Continuous integration runs it before the tests (.ci/run and
# .github/workflows). Where apt-get or the right to use it is missing, it installs nothing.
set -euo pipefail

shopt -s nullglob
servers=(/usr/lib/postgresql/*/bin/postgres) # Debian keeps it outside PATH
missing=()
command -v postgres >/dev/null || [ ${#servers[@]} -gt 0 ] || missing+=(postgresql)
command -v chromium >/dev/null || command -v google-chrome >/dev/null || missing+=(chromium)
command -v promtool >/dev/null || missing+=(prometheus)
command -v node >/dev/null || missing+=(nodejs)
command -v npm >/dev/null || missing+=(npm)
[ ${#missing[@]} -gt 0 ] || exit 0

sudo=()
if [ "$(id -u)" -ne 0 ]; then
  sudo -n true 2>/dev/null || exit 0
  sudo=(sudo -n)
fi
command -v apt-get >/dev/null || exit 0
"${sudo[@]}" apt-get update
"${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "${missing[@]}"
