#!/usr/bin/env bash
# Try the versions of libraries that we allow, each in a fresh environment without our caches.
#
#   tests/versions.sh readme     what README's first two lines install, by typing them; the demo runs
#                                on a pseudo-terminal
#   tests/versions.sh newest     the newest that pyproject.toml allows: fast tests and the demo
#   tests/versions.sh oldest     the oldest: all imports, the engine's fast tests, the parity of
#                                packed bases, a job as a person starts it on stub GPUs
#
# VENV=DIR keeps the environment there. What was seen goes into `TESTED` in
# jobs/preflight/versions.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
leg=${1:?readme, newest or oldest}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
venv=${VENV:-$scratch/venv}
unset PIP_CONSTRAINT
export PIP_QUIET=1
export FSDP_TUI_HOME="$scratch/state" XDG_CACHE_HOME="$scratch/cache" HF_HOME="$scratch/hub"

failed=()
check() {
  echo "+ $*"
  local begin=$SECONDS
  "$@" || failed+=("$*")
  echo "  ($((SECONDS - begin)) s)"
}

versions() {
  python - <<'EOF'
from importlib.metadata import version
from jobs.preflight.versions import TESTED, find_untested
print("versions:", ", ".join(f"{name} {version(name)}" for name in TESTED))
for name, what, _ in find_untested():
    print(f"note: {name} {what}")
EOF
}

# Type a line at a terminal, and `q` into the dashboard once the job that it started has ended.
type_line() {
  {
    until "$venv/bin/fsdp-tui" list --json 2>/dev/null | grep -qE '"(completed|failed|stopped|lost)"'
    do
      [[ -e $scratch/typed ]] && break
      sleep 2
    done
    sleep 3
    printf q
  } | {
    local status=0
    script -qec "stty cols 120 rows 40; $1" "$scratch/screen" >/dev/null || status=$?
    touch "$scratch/typed"  # so that nobody waits to press a key
    exit $status
  } || { tail -n 40 "$scratch/screen"; return 1; }
  "$venv/bin/fsdp-tui" list
  "$venv/bin/fsdp-tui" list --json | grep -q '"completed"'
}

with_uv() {
  python3 -m venv "$scratch/tools"
  "$scratch/tools/bin/pip" install --quiet uv
  "$scratch/tools/bin/uv" venv --quiet --python 3.11 "$venv"
  "$scratch/tools/bin/uv" pip install --quiet --python "$venv/bin/python" "$@" -e '.[test]'
}

case $leg in
readme)
  mapfile -t lines < <(sed -n '/^```$/,/^```$/s/^\(pip install .*[^ ]\)  *#.*/\1/p' README.md | head -2)
  [[ ${#lines[@]} == 2 ]] || { echo "README has no two lines to type" >&2; exit 1; }
  python3 -m venv "$venv"
  # shellcheck source=/dev/null
  source "$venv/bin/activate"
  check type_line "${lines[0]}"
  check bash -c "${lines[1]}"
  versions
  ;;
newest)
  with_uv
  # shellcheck source=/dev/null
  source "$venv/bin/activate"
  versions
  check env FSDP_TUI_CUDA_REQUIRED=1 pytest
  check fsdp-tui demo --headless
  ;;
oldest)
  with_uv --resolution lowest-direct
  # shellcheck source=/dev/null
  source "$venv/bin/activate"
  versions
  export FSDP_TUI_CUDA_REQUIRED=1
  check python -c '
import importlib, pkgutil
for package in ("jobs", "tui", "engine"):
    for module in pkgutil.walk_packages([package], f"{package}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
'
  check pytest tests/engine
  check pytest -n0 -m "slow or not slow" -k "int8 or nf4" tests/engine/parallel/test_parity.py
  check pytest -n0 -m slow tests/cuda/test_launched.py
  ;;
*)
  sed -n 's/^# \{0,1\}//p' "$0" | head -12
  exit 2
  ;;
esac

if ((${#failed[@]})); then
  printf 'failed: %s\n' "${failed[@]}" >&2
  exit 1
fi
