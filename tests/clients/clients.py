"""Real clients against a running server: openai, anthropic, litellm.

    python clients.py http://127.0.0.1:8000 [API_KEY]

Needs the packages in requirements.txt. Asks for things that any model can do, and looks at how
the clients understand the answers. Exits with 1 where something is wrong.
"""

import json
import os
import sys
import threading
import time
import traceback

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import anthropic
import httpx
import litellm
import openai

URL = sys.argv[1].rstrip("/") if len(sys.argv) > 1 else "http://127.0.0.1:8000"
KEY = sys.argv[2] if len(sys.argv) > 2 else "none"
MODEL = httpx.get(f"{URL}/v1/models", headers={"authorization": f"Bearer {KEY}"}).json()["data"][0]["id"]

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=300)
claude = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=300)

USER = [{"role": "user", "content": "Say hello in one short sentence."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Kyoto", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}

checks = []


def check(function):
    checks.append(function)
    return function


def chat(**more):
    options = {"model": MODEL, "messages": USER, "max_tokens": 40, "seed": 1} | more
    return client.chat.completions.create(**options)


@check
def openai_chat():
    answer = chat()
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@check
def openai_stream_equals_whole():
    whole = chat(temperature=1.0)
    text, finish, usage = "", None, None
    for chunk in chat(temperature=1.0, stream=True, stream_options={"include_usage": True}):
        if chunk.usage:
            usage = chunk.usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert text == whole.choices[0].message.content, (text, whole)
    assert finish == whole.choices[0].finish_reason
    assert usage.completion_tokens == whole.usage.completion_tokens


@check
def openai_seed_and_n():
    first = chat(temperature=1.3, n=3)
    again = chat(temperature=1.3, n=3)
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert len(set(texts)) > 1, texts


@check
def openai_stop_and_length():
    short = chat(max_tokens=3)
    assert short.choices[0].finish_reason == "length" and short.usage.completion_tokens == 3
    whole = chat(temperature=0).choices[0].message.content
    stop = whole[3:6]
    cut = chat(temperature=0, stop=[stop]).choices[0]
    assert cut.message.content == whole[: whole.index(stop)] and cut.finish_reason == "stop"


@check
def openai_logprobs():
    answer = chat(logprobs=True, top_logprobs=3, temperature=0, max_tokens=8)
    content = answer.choices[0].logprobs.content
    assert len(content) >= 1
    for token in content:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3
        best = max(top.logprob for top in token.top_logprobs)
        assert abs(best - token.logprob) < 1e-4
    text = b"".join(bytes(token.bytes) for token in content).decode(errors="replace")
    assert text.startswith(answer.choices[0].message.content), (text, answer)
    streamed = []
    for chunk in chat(logprobs=True, top_logprobs=3, temperature=0, max_tokens=8, stream=True):
        for choice in chunk.choices:
            if choice.logprobs:
                streamed += choice.logprobs.content
    assert [t.token for t in streamed] == [t.token for t in content]


@check
def openai_json_schema():
    for extra in ({}, {"chat_template_kwargs": {"enable_thinking": True}}):
        answer = chat(
            messages=[{"role": "user", "content": "Describe a pet as JSON."}],
            response_format={"type": "json_schema", "json_schema": {"name": "pet", "strict": True, "schema": PERSON}},
            max_tokens=400 if extra else 150,
            extra_body=extra,
        )
        choice = answer.choices[0]
        if extra and choice.finish_reason == "length":
            continue
        pet = json.loads(choice.message.content)
        assert set(pet) == {"name", "age", "kind"} and pet["kind"] in ("cat", "dog"), pet


@check
def openai_json_object():
    answer = chat(response_format={"type": "json_object"}, max_tokens=200)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)


@check
def openai_tools():
    messages = [{"role": "user", "content": "What is the weather in Kyoto?"}]
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        answer = chat(messages=messages, tools=[WEATHER], tool_choice=choice, max_tokens=400)
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls", answer
        call = message.tool_calls[0]
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments)["city"] in ("Kyoto", "Oslo")
    # What the server said comes back, with the result.
    messages.append(message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "Rain, 12 degrees."})
    for more in message.tool_calls[1:]:
        messages.append({"role": "tool", "tool_call_id": more.id, "content": "Snow."})
    answer = chat(messages=messages, tools=[WEATHER])
    assert answer.choices[0].message.content is not None or answer.choices[0].message.tool_calls
    # Streamed, put together by the client's own helper.
    with client.chat.completions.stream(
        model=MODEL, messages=messages[:1], tools=[WEATHER], tool_choice="required", max_tokens=400
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    arguments = final.choices[0].message.tool_calls[0].function.parsed_arguments
    assert arguments["city"] in ("Kyoto", "Oslo"), final


@check
def openai_prefix_cache():
    messages = [{"role": "user", "content": "Count: " + " ".join(str(n) for n in range(150))}]
    first = chat(messages=messages)
    again = chat(messages=messages)
    assert again.usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens // 2, again.usage
    assert first.choices[0].message.content == again.choices[0].message.content


@check
def openai_completions():
    answer = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=10, seed=3)
    streamed = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=10, seed=3, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == answer.choices[0].text


@check
def openai_errors():
    for error, options in [
        (openai.BadRequestError, {"temperature": 9}),
        (openai.BadRequestError, {"messages": []}),
        (openai.BadRequestError, {"messages": [{"role": "user", "content": "a " * 200_000}]}),
        (openai.NotFoundError, {"model": "no-such-model"}),
    ]:
        for stream in (False, True):
            try:
                chat(**options, stream=stream)
            except error as raised:
                assert raised.body["message"]
            else:
                raise AssertionError(f"{options} was accepted")
    try:
        client.embeddings.create(model=MODEL, input="x")
    except openai.BadRequestError:
        pass
    else:
        raise AssertionError("embeddings were made")


@check
def openai_cancel():
    for _ in range(3):
        stream = chat(max_tokens=400, stream=True)
        next(iter(stream))
        stream.close()
    deadline = time.time() + 20
    while time.time() < deadline:
        if httpx.get(f"{URL}/health").json()["running"] == 0:
            return
        time.sleep(0.1)
    raise AssertionError("a cancelled request runs on")


@check
def openai_responses():
    answer = client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=40)
    assert answer.status in ("completed", "incomplete") and answer.output_text
    text, kinds = "", []
    stream = client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=40, stream=True)
    for event in stream:
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            text += event.delta
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
    assert event.response.output_text == text
    tool = {"type": "function"} | WEATHER["function"]
    answer = client.responses.create(
        model=MODEL, input="Weather in Oslo?", tools=[tool], tool_choice="required", max_output_tokens=400
    )
    call = [item for item in answer.output if item.type == "function_call"][0]
    assert json.loads(call.arguments)["city"] in ("Kyoto", "Oslo")
    following = [item.model_dump(exclude_none=True) for item in answer.output]
    following.append({"type": "function_call_output", "call_id": call.call_id, "output": "Snow."})
    client.responses.create(
        model=MODEL, input=[{"role": "user", "content": "Weather in Oslo?"}] + following, max_output_tokens=40
    )


@check
def openai_parallel():
    texts = {}

    def ask(n):
        texts[n] = chat(seed=n, temperature=1.2).choices[0].message.content

    alone = {}
    for n in range(6):
        ask(n)
        alone[n] = texts[n]
    threads = [threading.Thread(target=ask, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == alone


@check
def anthropic_messages():
    answer = claude.messages.create(model=MODEL, max_tokens=40, messages=USER)
    assert answer.stop_reason in ("end_turn", "max_tokens") and answer.content[0].type in ("text", "thinking")
    with claude.messages.stream(model=MODEL, max_tokens=40, messages=USER) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "".join(block.text for block in final.content if block.type == "text")
    count = claude.messages.count_tokens(model=MODEL, messages=USER)
    assert count.input_tokens == final.usage.input_tokens + final.usage.cache_read_input_tokens


@check
def anthropic_tools():
    function = WEATHER["function"]
    tool = {"name": function["name"], "description": function["description"], "input_schema": function["parameters"], "strict": True}
    ask = [{"role": "user", "content": "Weather in Kyoto?"}]
    with claude.messages.stream(
        model=MODEL, max_tokens=400, messages=ask, tools=[tool], tool_choice={"type": "any"}
    ) as stream:
        final = stream.get_final_message()
    use = [block for block in final.content if block.type == "tool_use"][0]
    assert use.input["city"] in ("Kyoto", "Oslo") and final.stop_reason == "tool_use"
    uses = [block for block in final.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "Rain."} for block in uses]
    claude.messages.create(
        model=MODEL,
        max_tokens=40,
        tools=[tool],
        messages=ask + [{"role": "assistant", "content": [block.model_dump() for block in final.content]},
                        {"role": "user", "content": results}],
    )


@check
def anthropic_errors():
    try:
        claude.messages.create(model="no-such-model", max_tokens=5, messages=USER)
    except anthropic.NotFoundError as raised:
        assert raised.body["error"]["type"] == "not_found_error"
    else:
        raise AssertionError("accepted")


@check
def litellm_chat():
    common = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY, "messages": USER, "max_tokens": 40}
    answer = litellm.completion(**common, seed=1)
    text, finish = "", None
    for chunk in litellm.completion(**common, seed=1, stream=True, logprobs=True, top_logprobs=1):
        text += chunk.choices[0].delta.content or ""
        finish = chunk.choices[0].finish_reason or finish
    assert text == answer.choices[0].message.content
    assert finish == answer.choices[0].finish_reason
    answer = litellm.completion(
        model=f"anthropic/{MODEL}", api_base=URL, api_key=KEY, messages=USER, max_tokens=40
    )
    assert answer.choices[0].message.content


failed = 0
for function in checks:
    start = time.time()
    try:
        function()
        print(f"ok      {function.__name__} ({time.time() - start:.1f} s)", flush=True)
    except Exception:
        failed += 1
        print(f"FAILED  {function.__name__}\n{traceback.format_exc()}", flush=True)
print(f"{len(checks) - failed} passed, {failed} failed")
sys.exit(1 if failed else 0)
