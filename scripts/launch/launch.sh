# Sourced by the scripts of this folder: where they find the interpreter and the machines, and how they start.
#
#   DEVICE=gpu NPROC=8     processes on this machine, one a GPU; CUDA_VISIBLE_DEVICES wins. DEVICE=cpu: so many processes
#   NNODES=2 MASTER=address:port    more than one machine: the first one's address, set on each
#   PYTHON=python          the interpreter (default: the one in .venv)

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
DEVICE=${DEVICE:-gpu}
NPROC=${NPROC:-8}
NNODES=${NNODES:-1}
MASTER=${MASTER:-}
PYTHON=${PYTHON:-$([ -x "$root/.venv/bin/python" ] && echo "$root/.venv/bin/python" || echo python)}
if ! [[ $NPROC =~ ^[1-9][0-9]*$ ]]; then
    echo "NPROC=$NPROC: expected a number of processes, 1 or more" >&2
    exit 2
fi

# launch SCRIPT ARGUMENT...: runs it in every process; logs to LOG_DIR/workerlog.N. With --dry_run it is one process, here.
launch() {
    local gpus places
    case " $* " in
        *" --dry_run false "* | *" --dry_run=false "* | *" --dry_run 0 "* | *" --dry_run=0 "*) ;;
        *" --dry_run"[\ =]*) exec "$PYTHON" "$@" ;;
    esac
    if [ "$DEVICE" = gpu ]; then
        gpus=${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((NPROC - 1)))}
        places=(--devices "$gpus")
        NPROC=$(awk -F, '{print NF}' <<<"$gpus")
    else
        places=(--nproc_per_node "$NPROC")
    fi
    echo "logs: $LOG_DIR/workerlog.0 to workerlog.$((NPROC - 1)); output: $OUTPUT_DIR"
    exec "$PYTHON" -m paddle.distributed.launch "${places[@]}" --log_dir "$LOG_DIR" \
        --nnodes "$NNODES" ${MASTER:+--master "$MASTER"} "$@"
}
