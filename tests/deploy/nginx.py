"""Two kozue servers behind nginx, with docs/deploy/nginx.conf as it is but for its addresses.

    python3 tests/deploy/nginx.py KOZUE MODEL

Needs nginx on the path (Debian: nginx-light) and nothing else. Exits with 1 where something is wrong.
"""

import http.client
import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

KOZUE, MODEL = sys.argv[1:3]
CONF = pathlib.Path(__file__).parents[2] / "docs/deploy/nginx.conf"


class Server:
    """A kozue server at a free port."""

    def __init__(self):
        command = [KOZUE, "serve", MODEL, "--port", "0", "--threads", "1", "--parallel", "2", "--queue", "8"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                self.port = int(found[1])
                return
        raise SystemExit("kozue serve did not start")

    def answered(self):
        _, text = get(self.port, "/metrics")
        found = re.search(r'kozue_http_requests_total\{path="/v1/chat/completions",status="200"\} (\d+)', text)
        return int(found[1]) if found else 0

    def running(self):
        load = json.loads(get(self.port, "/health")[1])
        return load["running"] + load["waiting"]

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0, "the server did not end well"


def get(port, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("GET", path)
    response = connection.getresponse()
    return response.status, response.read().decode()


def post(port, messages, session=None, **more):
    headers = {"content-type": "application/json"} | ({"x-session-id": session} if session else {})
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, "seed": 1} | more
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    return connection, connection.getresponse()


def chat(port, messages, session=None):
    _, response = post(port, messages, session)
    text = response.read().decode()
    assert response.status == 200, (response.status, text)
    return json.loads(text)


def say(text):
    return {"role": "user", "content": text}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def check(servers, port):
    model = json.loads(get(port, "/v1/models")[1])["data"][0]["id"]
    print(f"ok      {model} through the router")

    # A session has all its turns at one server, and finds its cache there.
    used = set()
    for number in range(12):
        before = [server.answered() for server in servers]
        question = say(f"Session {number}. " + "one two three four " * 30)
        first = chat(port, [question], f"session-{number}")
        answer = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
        second = chat(port, [question, answer, say("And then?")], f"session-{number}")
        more = [server.answered() - count for server, count in zip(servers, before)]
        assert sorted(more) == [0, 2], f"session {number} was answered {more} times by the servers"
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > first["usage"]["prompt_tokens"] // 2, (cached, first["usage"])
        used.add(more.index(2))
    assert used == {0, 1}, "all sessions went to one server"
    print("ok      sessions stay, and both servers are used")

    # The router changes no byte of an answer.
    direct = chat(servers[0].port, [say("Hello")])["choices"]
    assert chat(port, [say("Hello")])["choices"] == direct
    print("ok      the same answer")

    # A stream comes while it is made.
    long = {"max_tokens": 400, "stream": True}
    connection, response = post(port, [say("Tell a long story about a river.")], "stream", **long)
    assert response.status == 200 and response.getheader("content-type") == "text/event-stream"
    pieces = []
    while piece := response.read1(65536):
        pieces.append(piece)
    assert b"[DONE]" in pieces[-1] and len(pieces) > 2, f"the stream came in {len(pieces)} pieces"
    print(f"ok      a stream in {len(pieces)} pieces")

    # A client that leaves ends its request behind the router too.
    connection, response = post(port, [say("Tell a long story about a mountain.")], "gone", **long)
    response.read1(1)
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    deadline = time.time() + 30
    while any(server.running() for server in servers):
        assert time.time() < deadline, "a request runs on without its client"
        time.sleep(0.1)
    print("ok      a client that leaves is noticed")

    # Errors pass as they are.
    _, response = post(port, [], "bad")
    error = json.loads(response.read())["error"]
    assert response.status == 400 and error["param"] == "messages", error
    print("ok      errors pass")

    # Sessions of a server that is gone go on at the other one.
    servers[0].stop()
    for number in range(12):
        chat(port, [say(f"Session {number} again.")], f"session-{number}")
    print("ok      a server less, and every session goes on")


with tempfile.TemporaryDirectory() as folder:
    servers = [Server(), Server()]
    port = free_port()
    conf = CONF.read_text().replace("listen 8080", f"listen 127.0.0.1:{port}")
    for number, server in enumerate(servers):
        conf = conf.replace(f"kozue-{number + 1}:8000", f"127.0.0.1:{server.port}")
    # What distributions put into their own nginx.conf around it.
    paths = "".join(f"    {kind}_temp_path {folder}/{kind};\n" for kind in
                    ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    conf = conf.replace("http {\n", f"http {{\n    access_log off;\n{paths}", 1)
    path = pathlib.Path(folder) / "nginx.conf"
    path.write_text(f"daemon off;\npid {folder}/nginx.pid;\nerror_log stderr warn;\n{conf}")
    router = subprocess.Popen(["nginx", "-p", folder, "-c", path, "-e", "stderr"])
    try:
        for _ in range(100):
            try:
                if get(port, "/router/health")[0] == 200:
                    break
            except OSError:
                time.sleep(0.1)
        else:
            raise SystemExit("nginx did not start")
        check(servers, port)
    finally:
        router.send_signal(signal.SIGQUIT)
        router.wait(30)
        for server in servers:
            server.process.kill()
print("all ok")
