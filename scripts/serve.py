"""Serve a trained Ernie35 model over HTTP, as OpenAI's completions API, with a page to try it at /.

    python scripts/serve.py --model_name_or_path output/demo/model --served_model_name demo
    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \
        -d '{"model": "demo", "prompt": "Return the number of", "max_tokens": 32}'

It listens on 127.0.0.1 unless --host says otherwise; there is no password, so put a proxy in front of it
before others can reach it. Ctrl-C or SIGTERM stops it after the answers under way. docs/prediction.md has
more. """

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Optional, Sequence

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without an installed package too

from ernie35se.runtime import check_versions, log_to_stderr, tune_cpu

PAGE = Path(__file__).with_name("serve.html")


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Serve until told to stop; returns the exit status, 2 for a user's mistake."""
    try:
        log_to_stderr()
        check_versions()
        from ernie35se.prediction import parse_serve_arguments

        settings = parse_serve_arguments(argv)
        tune_cpu(settings.device)
        with listening_socket(settings.host, settings.port) as sock:
            serve(settings, sock)
    except (ValueError, OSError) as error:
        print(f"serve.py: error: {error}", file=sys.stderr)
        return 2
    return 0


def listening_socket(host: str, port: int):
    """Bound before the model is loaded, so that a port in use is said at once."""
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise ValueError(
            f"host {host}, port {port}: cannot listen there ({error.strerror}); choose another --port"
        ) from None
    return sock


def serve(settings, sock) -> None:
    """Load the model and answer requests until a signal."""
    import uvicorn

    from ernie35se.prediction import load_predictor
    from ernie35se.server import Limits, Server

    name = settings.served_model_name or Path(settings.model_name_or_path).resolve().name
    limits = Limits(settings.batch_size, settings.max_waiting)
    server = Server(load_predictor(settings), name, limits, PAGE.read_text(encoding="utf-8"))
    host, port = sock.getsockname()[:2]
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn's own handlers stop it; it raises the signal again then
        signal.signal(number, lambda *_: None)
    print(f"Serving {name!r} on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    uvicorn.Server(uvicorn.Config(server.app, log_level="warning", timeout_graceful_shutdown=60)).run(
        sockets=[sock]
    )


if __name__ == "__main__":
    sys.exit(main())
