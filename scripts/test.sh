#!/usr/bin/env bash
# Makes .venv if it is missing, installs the pinned stack with the test extras, builds the fused op, and runs the tests.
#
#   bash scripts/test.sh                      all tests
#   bash scripts/test.sh tests/test_rope.py   some; any argument of pytest works
#
# scripts/venv.sh says which environment variables choose the interpreter and the build of Paddle.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

make_venv
build_op
cd "$root"
say "python -m pytest -q $*"
exec "$python" -m pytest -q "$@"
