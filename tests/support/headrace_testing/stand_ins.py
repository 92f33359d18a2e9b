"""Small programs that `headrace up` may run in place of the real engine and gateway.

They are real processes with real sockets: they answer health checks, drain on SIGTERM and fail on
request (STAND_IN_FAIL=engine: it does not start; STAND_IN_STUCK=engine: it does not drain). Their
log consists of JSON lines.
"""

from importlib import import_module
from pathlib import Path

_COMMON = """
import http.server, json, os, signal, socket, sys, threading

def log(message, level="INFO", **fields):
    line = {"timestamp": "t", "level": level, "message": message, **fields}
    print(json.dumps(line), file=sys.stderr, flush=True)

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(os.getpid()).encode())
    def log_message(self, *args):
        pass

def serve(sock):
    server = http.server.ThreadingHTTPServer(sock.getsockname(), Health, False)
    server.socket.close()
    server.socket = sock
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server

def main(role, servers):
    signals = {signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    if os.environ.get("STAND_IN_FAIL") == role:
        log("weights missing", "ERROR", file="model.safetensors")
        sys.exit(2)
    running = [serve(sock) for sock in servers]
    log("started", pid=os.getpid(), args=sys.argv[1:])
    signal.sigwait(signals)
    if os.environ.get("STAND_IN_STUCK") == role:
        log("stuck")
        signal.pause()
    log("drained")

def health_port(role):
    return passed(f"HEADRACE_{role}_METRICS_FD")

def passed(name):
    sock = socket.socket(fileno=int(os.environ[name]))
    sock.setblocking(True)
    return sock
"""

_ENGINE = _COMMON + '\nmain("engine", [health_port("ENGINE")])\n'
_GATEWAY = _COMMON + '\nmain("gateway", [health_port("GATEWAY"), passed("HEADRACE_GATEWAY_FD")])\n'


def write_stand_ins(folder: Path) -> Path:
    """Writes both packages; the folder goes first on the children's PYTHONPATH."""
    for package, program in {"headrace_engine": _ENGINE, "headrace_gateway": _GATEWAY}.items():
        (folder / package).mkdir(parents=True)
        # The real package's settings, which `up` reads, stay importable.
        real = list(import_module(package).__path__)
        (folder / package / "__init__.py").write_text(f"__path__ += {real!r}\n")
        (folder / package / "__main__.py").write_text(program)
    return folder
