# Sourced by demo.sh, demo_finetune.sh and test.sh: `make_venv` makes .venv and installs the pinned stack of setup.py into it.
# Afterwards $python is its interpreter and $root the repository. `build_op` then adds the fused LayerNorm op and the CPU ops;
# `step` runs one command of a demo, unless its result is there.
#
#   PYTHON=python3.11          the interpreter to make .venv with (default: the first suitable one on the PATH)
#   ERNIE35SE_EXTRA=cpu|gpu    which build of Paddle (default cpu; docs/install.md says what gpu needs)
#   ERNIE35SE_FUSED_LN=0       do without the fused LayerNorm op (docs/fused_ln.md)
#   ERNIE35SE_CPU_OPS=0        do without the CPU ops (docs/cpu_ops.md)

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python="$root/.venv/bin/python"

say() { printf '== %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

# is_suitable PYTHON: whether it runs and its version is one that every pinned package has a build for.
is_suitable() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; }

version_of() { "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null || echo 'does not run'; }

# Prints the interpreter to make .venv with.
choose_python() {
    local candidate without_pip='' seen=''
    for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.10 python}; do
        command -v "$candidate" >/dev/null || continue
        seen+="${seen:+, }$candidate ($(version_of "$candidate"))"
        is_suitable "$candidate" || continue
        if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            echo "$candidate"
            return
        fi
        without_pip=${without_pip:-$candidate}
    done
    if [ -n "$without_pip" ]; then
        local minor
        minor=$("$without_pip" -c 'import sys; print(f"{sys.version_info[0]}.{sys.version_info[1]}")')
        fail "$without_pip cannot make virtual environments: its ensurepip module is missing." \
            "On Debian and Ubuntu: apt-get install python$minor-venv"
    fi
    fail "Python 3.10, 3.11 or 3.12 is needed; seen: ${seen:-none}${PYTHON:+ (PYTHON=$PYTHON)}." \
        "Install one, or name it: PYTHON=/path/to/python3.11 bash $0"
}

# Makes .venv, or completes one whose making was interrupted.
make_environment() {
    local base
    if is_suitable "$python"; then
        "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >/dev/null ||
            fail "$root/.venv has no pip: remove that folder and run this again"
        return
    fi
    if "$python" -c '' 2>/dev/null; then
        fail "$root/.venv holds Python $(version_of "$python"), and 3.10, 3.11 or 3.12 is needed:" \
            "remove that folder and run this again"
    fi
    base=$(choose_python) || exit 1
    say "making .venv with $base ($(version_of "$base"))"
    # Nothing in a .venv whose interpreter does not run is of use, so it is cleared.
    "$base" -m venv --clear "$root/.venv" || fail "$base -m venv --clear $root/.venv failed, see above"
}

make_venv() {
    local extras="${ERNIE35SE_EXTRA:-cpu},test"
    local stamp="$root/.venv/installed" log="$root/.venv/install.log" wanted
    make_environment
    # The stamp is written last, so an interrupted install is done again.
    wanted=$(echo "# .[$extras] at $root"; cat "$root/setup.py")
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        say "reusing .venv: it holds what setup.py asks for"
        return
    fi
    rm -f "$stamp"
    say "installing the pinned stack into .venv (about 2 GB and some minutes; log in .venv/install.log)"
    if ! "$python" -m pip install --progress-bar off --use-pep517 -e "$root[$extras]" 2>&1 | tee "$log"; then
        if grep -qiE 'connection|timed? ?out|name resolution|max retries|proxyerror|sslerror' "$log"; then
            fail "pip could not reach its package index: check the network, or name a mirror in PIP_INDEX_URL," \
                "then run this again"
        fi
        fail "pip install failed, see above; run this again when it is mended"
    fi
    (cd "$root" && "$python" -c 'from ernie35se.runtime import check_versions; check_versions()') ||
        fail "the installed versions are not those of setup.py, see above"
    printf '%s\n' "$wanted" >"$stamp"
}

# Builds both modules of external_ops into .venv. Sets $fused_ln to 1 where the fused LayerNorm is there afterwards, to 0
# where it is not; the CPU ops a model finds by itself.
build_op() {
    local ops="$root/external_ops"
    build_module fused_ln "$ops" ERNIE35SE_FUSED_LN "the fused LayerNorm op" "Paddle's own LayerNorm, not the fused op"
    fused_ln=$built
    build_module cpu_ops "$ops/cpu_ops" ERNIE35SE_CPU_OPS "the CPU ops" "plain Paddle operators, not the CPU ops"
}

# build_module NAME FOLDER SWITCH WHAT INSTEAD: builds a module into .venv, unless the variable SWITCH is 0 or there is no C++
# compiler. Sets $built to 1 where it is there afterwards, to 0 where it is not.
build_module() {
    local name=$1 folder=$2 switch=$3 what=$4 instead=$5
    local stamp="$root/.venv/${name}_built" log="$root/.venv/$name.log" compiler="${CXX:-g++}" wanted
    built=0
    if [ "${!switch:-1}" = 0 ]; then
        say "$switch=0: $instead"
        return
    fi
    if ! command -v "${compiler%% *}" >/dev/null; then
        say "no C++ compiler (${compiler%% *}): $instead"
        return
    fi
    wanted=$(cat "$root"/external_ops/*.py "$folder/setup.py" "$folder"/csrc/* "$root/.venv/installed")
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        say "reusing $what"
    else
        rm -f "$stamp"
        say "building $what (about half a minute; log in .venv/$name.log)"
        if ! "$python" -m pip install --no-build-isolation --no-deps --force-reinstall "$folder" >"$log" 2>&1; then
            tail -n 40 "$log" >&2
            fail "$what cannot be built, see above and docs/$name.md; to do without: $switch=0 bash $0"
        fi
        printf '%s\n' "$wanted" >"$stamp"
    fi
    built=1
}

# step FILE WHAT COMMAND...: runs the command, unless FILE, which it writes at its end, exists.
step() {
    local made=$1 what=$2
    shift 2
    if [ -e "$made" ]; then
        say "$what: reusing $made"
        return
    fi
    say "$what: ${*/#$python/python}"
    "$@" || {
        [ $? -ne 130 ] || exit 130 # Ctrl-C
        fail "$what failed, see above; run this again when it is mended, and it continues from there"
    }
}
