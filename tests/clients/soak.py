"""Many clients at once, some of them rude, against a running server.

    python soak.py http://127.0.0.1:8000 [SECONDS] [CLIENTS]

Every request must be answered or refused as it should be, every answer must be the bytes of the
same request asked alone, and the server's memory must stay flat (read from /proc where the
server runs on this machine: give its process id as KOZUE_PID, and start it with a small --cache-size,
as a cache that fills grows too). Exits with 1 otherwise.
"""

import asyncio
import collections
import json
import os
import random
import sys
import time

import httpx

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
SECONDS = float(sys.argv[2]) if len(sys.argv) > 2 else 60
CLIENTS = int(sys.argv[3]) if len(sys.argv) > 3 else 16

seen = collections.Counter()
problems = []


def body(n, stream):
    """Request n, always the same."""
    rng = random.Random(n)
    words = " ".join(rng.choice(["tree", "river", "seven", "why", "the", "of", "light"]) for _ in range(rng.randrange(3, 120)))
    fields = {
        "messages": [{"role": "user", "content": words}],
        "max_tokens": rng.randrange(1, 60),
        "temperature": rng.choice([0, 0.7, 1.2]),
        "seed": n,
        "stream": stream,
    }
    if n % 7 == 0:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes", "no"]}}}
    if n % 11 == 0:
        fields["stop"] = ["e"]
    return fields


async def text_of(client, n, stream, pause=0.0, leave=None):
    """The answer's text; None where this client left early."""
    if not stream:
        response = await client.post("/v1/chat/completions", json=body(n, False))
        if response.status_code == 429:
            seen["429"] += 1
            return None
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]["content"]
    text, chunks, done = "", 0, False
    async with client.stream("POST", "/v1/chat/completions", json=body(n, True)) as response:
        if response.status_code == 429:
            assert response.headers["retry-after"]
            seen["429"] += 1
            return None
        assert response.status_code == 200, response.status_code
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                assert "error" not in event, event
                text += event["choices"][0]["delta"].get("content") or ""
                chunks += 1
            if leave is not None and chunks > leave:
                return None
            if pause:
                await asyncio.sleep(pause)
    assert done, "a stream without its end"
    return text


async def rude(client, rng):
    """Requests that must be refused."""
    content, status = rng.choice([
        (b"{", 400), (b"", 400), (b"[]", 400), (b"\xff\xfe", 400), (b'{"messages": 3}', 400),
        (b'{"messages": [{"role": "user", "content": "hi"}], "temperature": 1e999}', 400),
        (json.dumps({"messages": [{"role": "user", "content": "a b " * 400_000}]}).encode(), 400),
        (b"[" * 100_000, 400), (b" " * (40 << 20), 413),
    ])
    try:
        response = await client.post("/v1/chat/completions", content=content)
    except httpx.WriteError:
        # Refused before all of it was sent.
        assert status == 413
    else:
        assert response.status_code == status, (content[:60], response.status_code)
    seen["refused"] += 1


async def run(number, alone, deadline):
    rng = random.Random(1000 + number)
    async with httpx.AsyncClient(base_url=URL, timeout=300) as client:
        while time.time() < deadline:
            n = rng.randrange(len(alone))
            kind = rng.choice(["whole", "stream", "stream", "slow", "leave", "drop", "rude"])
            try:
                if kind == "rude":
                    await rude(client, rng)
                elif kind == "drop":
                    # Gone before anything is said.
                    try:
                        await client.post("/v1/chat/completions", json=body(n, False), timeout=rng.random() * 0.2)
                    except httpx.TimeoutException:
                        pass
                    seen[kind] += 1
                else:
                    pause = 0.05 if kind == "slow" else 0.0
                    leave = rng.randrange(5) if kind == "leave" else None
                    text = await text_of(client, n, kind != "whole", pause, leave)
                    if text is not None:
                        assert text == alone[n], f"request {n}: {text!r} beside others, {alone[n]!r} alone"
                    seen[kind] += 1
            except Exception as error:
                problems.append(f"{kind} {n}: {error!r}")


def memory():
    pid = os.environ.get("KOZUE_PID")
    if not pid:
        return 0
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


async def main():
    async with httpx.AsyncClient(base_url=URL, timeout=300) as client:
        alone = [await text_of(client, n, False) for n in range(40)]
    start = time.time()
    half = None
    tasks = [asyncio.create_task(run(number, alone, start + SECONDS)) for number in range(CLIENTS)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0.5)
        if half is None and time.time() > start + SECONDS / 2:
            half = memory()
    end = memory()
    await asyncio.gather(*tasks)
    async with httpx.AsyncClient(base_url=URL, timeout=30) as client:
        for _ in range(100):
            health = (await client.get("/health")).json()
            if health["running"] == health["waiting"] == 0:
                break
            await asyncio.sleep(0.1)
        else:
            problems.append(f"requests stay: {health}")
    print(dict(seen))
    print(f"memory: {half or 0:.0f} MB half-way, {end:.0f} MB at the end")
    if half and end > half * 1.2 + 50:
        problems.append("memory grows")
    for problem in problems[:20]:
        print("PROBLEM", problem)
    print(f"{sum(seen.values())} requests, {len(problems)} problems")


asyncio.run(main())
sys.exit(1 if problems else 0)
