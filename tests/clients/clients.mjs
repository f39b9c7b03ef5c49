// The official OpenAI package for Node against a running server.
//
//     npm install --prefix FOLDER openai@6
//     NODE_PATH=FOLDER/node_modules node tests/clients/clients.mjs http://127.0.0.1:8000 [API_KEY]
//
// Asks for things that any model can do, and looks at how the client understands the answers. Exits
// with 1 where something is wrong.

import assert from "node:assert/strict";
import { createRequire } from "node:module";

// Packages of an import are not looked for in NODE_PATH, those of a require are.
const OpenAI = createRequire(import.meta.url)("openai");
const [url = "http://127.0.0.1:8000", key = "none"] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0, timeout: 300_000 });

const user = [{ role: "user", content: "Say hello in one short sentence." }];
const weather = {
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather in a city.",
    parameters: {
      type: "object",
      properties: { city: { type: "string", enum: ["Kyoto", "Oslo"] } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};
const pet = {
  type: "object",
  properties: { name: { type: "string", maxLength: 20 }, kind: { enum: ["cat", "dog"] } },
  required: ["name", "kind"],
  additionalProperties: false,
};

const model = (await client.models.list()).data[0].id;
const chat = (more) => client.chat.completions.create({ model, messages: user, max_tokens: 40, seed: 1, ...more });

const checks = {
  async "a chat, whole and streamed"() {
    const whole = await chat({ temperature: 1 });
    const { message, finish_reason } = whole.choices[0];
    assert.equal(message.role, "assistant");
    assert.equal(whole.usage.total_tokens, whole.usage.prompt_tokens + whole.usage.completion_tokens);
    let text = "", finish, usage;
    const stream = await chat({ temperature: 1, stream: true, stream_options: { include_usage: true } });
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta.content ?? "";
      finish = chunk.choices[0]?.finish_reason ?? finish;
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, message.content);
    assert.equal(finish, finish_reason);
    assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
  },

  async "the stream helper"() {
    const events = [];
    const runner = client.chat.completions.stream({ model, messages: user, max_tokens: 40, seed: 1 });
    runner.on("content", (delta) => events.push(delta));
    const final = await runner.finalChatCompletion();
    assert.equal(events.join(""), final.choices[0].message.content);
  },

  async "tools"() {
    const messages = [{ role: "user", content: "What is the weather in Kyoto?" }];
    for (const tool_choice of ["required", { type: "function", function: { name: "get_weather" } }]) {
      const { message, finish_reason } = (
        await chat({ messages, tools: [weather], tool_choice, parallel_tool_calls: false, max_tokens: 200 })
      ).choices[0];
      assert.equal(finish_reason, "tool_calls");
      assert.equal(message.tool_calls.length, 1);
      const call = message.tool_calls[0];
      assert.equal(call.function.name, "get_weather");
      assert.ok(["Kyoto", "Oslo"].includes(JSON.parse(call.function.arguments).city));
      // What the server said comes back, with the result.
      const after = await chat({
        messages: [...messages, message, { role: "tool", tool_call_id: call.id, content: "Rain, 12 degrees." }],
        tools: [weather],
      });
      assert.ok(after.choices[0].message.content !== null || after.choices[0].message.tool_calls);
    }
    const runner = client.chat.completions.stream({
      model, messages, tools: [weather], tool_choice: "required", parallel_tool_calls: false, max_tokens: 200,
    });
    const final = await runner.finalChatCompletion();
    assert.ok(["Kyoto", "Oslo"].includes(JSON.parse(final.choices[0].message.tool_calls[0].function.arguments).city));
  },

  async "calls cut short"() {
    const { message, finish_reason } = (
      await chat({ tools: [weather], tool_choice: "required", max_tokens: 6 })
    ).choices[0];
    assert.equal(finish_reason, "length");
    assert.equal(message.content, "");
    assert.equal(message.tool_calls, undefined);
  },

  async "structured output"() {
    const { message } = (
      await chat({
        messages: [{ role: "user", content: "Describe a pet as JSON." }],
        response_format: { type: "json_schema", json_schema: { name: "pet", strict: true, schema: pet } },
        max_tokens: 150,
      })
    ).choices[0];
    const described = JSON.parse(message.content);
    assert.deepEqual(Object.keys(described).sort(), ["kind", "name"]);
    assert.ok(["cat", "dog"].includes(described.kind));
  },

  async "responses"() {
    const answer = await client.responses.create({ model, input: "Say hello.", max_output_tokens: 40 });
    assert.ok(answer.output_text);
    let text = "", last;
    const stream = await client.responses.create({ model, input: "Say hello.", max_output_tokens: 40, stream: true });
    for await (const event of stream) {
      if (event.type === "response.output_text.delta") text += event.delta;
      last = event;
    }
    assert.ok(["response.completed", "response.incomplete"].includes(last.type));
    assert.ok(text);
  },

  async "cancel"() {
    for (let n = 0; n < 3; n += 1) {
      const stream = await chat({ max_tokens: 400, stream: true });
      for await (const _ of stream) break;
      stream.controller.abort();
    }
    const gone = new AbortController();
    const asked = client.chat.completions.create({ model, messages: user, max_tokens: 400 }, { signal: gone.signal });
    setTimeout(() => gone.abort(), 50);
    await assert.rejects(asked, OpenAI.APIUserAbortError);
    const deadline = Date.now() + 20_000;
    while (Date.now() < deadline) {
      const { running, waiting } = await (await fetch(`${url}/health`)).json();
      if (running + waiting === 0) return;
      await new Promise((resolve) => setTimeout(resolve, 100));
    }
    assert.fail("a cancelled request runs on");
  },

  async "errors"() {
    for (const [kind, more] of [
      [OpenAI.BadRequestError, { temperature: 9 }],
      [OpenAI.BadRequestError, { messages: [] }],
      [OpenAI.BadRequestError, { stop: "" }],
      [OpenAI.BadRequestError, { messages: [{ role: "user", content: "a ".repeat(200_000) }] }],
      [OpenAI.NotFoundError, { model: "no-such-model" }],
    ]) {
      for (const stream of [false, true]) {
        await assert.rejects(chat({ ...more, stream }), (error) => error instanceof kind && error.message.length > 0);
      }
    }
  },
};

let failed = 0;
for (const [name, check] of Object.entries(checks)) {
  const start = Date.now();
  try {
    await check();
    console.log(`ok      ${name} (${((Date.now() - start) / 1000).toFixed(1)} s)`);
  } catch (error) {
    failed += 1;
    console.log(`FAILED  ${name}\n${error.stack}`);
  }
}
console.log(`${Object.keys(checks).length - failed} passed, ${failed} failed`);
process.exit(failed ? 1 : 0);
