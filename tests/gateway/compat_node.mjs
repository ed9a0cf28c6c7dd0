// Each feature with OpenAI's Node client, unmodified. Asks for one of them on each line of stdin: "FEATURE", answers with a line
// of JSON: {"feature": ..., "error": null or what was wrong}. A line "kill" on stdout asks for the next answer's node to be killed;
// that answer begins when a line says that all is set for it.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const [, , folder, baseURL, seeingURL, pictureURL] = process.argv;
const { default: OpenAI } = createRequire(`${folder}/`)("openai");
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
const seeing = new OpenAI({ baseURL: seeingURL, apiKey: "unused", maxRetries: 0 });

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();

const question = [{ role: "user", content: "Name three rivers of Europe and say a word about each." }];
const story = "Tell a long story of a ferry and its captain.";
const parameters = {
  type: "object", properties: { city: { enum: ["Oslo", "Rome"] } }, required: ["city"], additionalProperties: false,
};
const tool = { type: "function", function: { name: "weather", description: "Tell the weather.", parameters } };
const schema = {
  type: "object", properties: { river: { type: "string", maxLength: 12 }, length: { type: "integer" } },
  required: ["river", "length"], additionalProperties: false,
};

const chat = (fields) =>
  client.chat.completions.create({ model: "any", messages: question, max_tokens: 16, temperature: 0, ...fields });
const text = (fields) =>
  client.completions.create({ model: "any", prompt: "The river Rhine", max_tokens: 8, temperature: 0, ...fields });
const response = (fields) =>
  client.responses.create({ model: "any", input: story, max_output_tokens: 16, temperature: 0, ...fields });

async function all(stream) {
  const items = [];
  for await (const item of stream) items.push(item);
  return items;
}
async function streamed(fields) {
  const texts = [];
  for await (const chunk of await chat({ stream: true, ...fields }))
    for (const choice of chunk.choices) texts[choice.index] = (texts[choice.index] ?? "") + (choice.delta.content ?? "");
  return texts;
}
async function killOfNextAnswer() {
  console.log("kill");
  await lines.next();
}
async function refused(promise, kind = OpenAI.BadRequestError) {
  await assert.rejects(promise, (error) => error instanceof kind && error.message.length > 0);
}

const checks = {
  async chat() {
    const answer = await chat({});
    assert.ok(answer.choices[0].message.content);
    assert.equal(answer.choices[0].finish_reason, "length");
  },
  async chat_stream() {
    assert.deepEqual(await streamed({}), [(await chat({})).choices[0].message.content]);
  },
  async chat_usage() {
    const messages = [{ role: "user", content: "The ferry crosses the wide and quiet river each night. ".repeat(12) }];
    await chat({ messages });
    const last = (await all(await chat({ messages, stream: true, stream_options: { include_usage: true } }))).at(-1);
    assert.equal(last.usage.completion_tokens, 16);
    assert.ok(last.usage.prompt_tokens_details.cached_tokens > 0.8 * last.usage.prompt_tokens - 32);
  },
  async chat_n() {
    const drawn = { n: 2, temperature: 0.9, seed: 5 };
    const whole = (await chat(drawn)).choices.map((choice) => choice.message.content);
    assert.notEqual(whole[0], whole[1]);
    assert.deepEqual(await streamed(drawn), whole);
  },
  async chat_stop() {
    const whole = (await chat({ max_tokens: undefined, max_completion_tokens: 16 })).choices[0].message.content;
    const stop = whole.split(/\s+/)[2];
    const answer = (await chat({ stop: [stop] })).choices[0];
    assert.equal(answer.finish_reason, "stop");
    assert.ok(!answer.message.content.includes(stop));
  },
  async chat_logprobs() {
    const choice = (await chat({ logprobs: true, top_logprobs: 2 })).choices[0];
    const tokens = choice.logprobs.content.map((one) => one.token);
    assert.equal(tokens.join(""), choice.message.content);
    const chunks = await all(await chat({ logprobs: true, top_logprobs: 2, stream: true }));
    assert.deepEqual(chunks.flatMap((c) => c.choices[0].logprobs?.content ?? []).map((one) => one.token), tokens);
  },
  async chat_schema() {
    const response_format = { type: "json_schema", json_schema: { name: "river", schema, strict: true } };
    const parsed = await client.chat.completions.parse({
      model: "any", messages: question, max_tokens: 60, temperature: 0, response_format,
    });
    assert.equal(typeof JSON.parse(parsed.choices[0].message.content).length, "number");
  },
  async chat_json() {
    const answer = await chat({ response_format: { type: "json_object" }, max_tokens: 40 });
    assert.ok(answer.choices[0].message.content.startsWith("{"));
  },
  async chat_tools() {
    for (const tool_choice of ["required", { type: "function", function: { name: "weather" } }]) {
      const answer = (await chat({ tools: [tool], tool_choice, max_tokens: 60 })).choices[0];
      assert.equal(answer.finish_reason, "tool_calls");
      assert.ok(["Oslo", "Rome"].includes(JSON.parse(answer.message.tool_calls[0].function.arguments).city));
    }
  },
  async chat_tool_stream() {
    const stream = client.chat.completions.stream({
      model: "any", messages: question, tools: [tool], tool_choice: "required", max_tokens: 60, temperature: 0,
    });
    const [call] = (await stream.finalMessage()).tool_calls;
    assert.ok(["Oslo", "Rome"].includes(JSON.parse(call.function.arguments).city));
  },
  async chat_tool_loop() {
    const told = [];
    const runner = client.chat.completions.runTools({
      model: "any", messages: question, max_tokens: 60, temperature: 0, tool_choice: tool_named("weather"),
      tools: [{ type: "function", function: { ...tool.function, parse: JSON.parse, function: ({ city }) => (told.push(city), "sunny") } }],
    }, { maxChatCompletions: 2 });
    await runner.done();
    assert.equal(told.length, 1);
    const message = runner.messages.find((one) => one.tool_calls);
    const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "sunny" };
    const answer = await chat({ messages: [...question, message, result], tools: [tool], tool_choice: "none" });
    assert.ok(answer.choices[0].message.content);
  },
  async chat_images() {
    const ask = async (...urls) => {
      const images = urls.map((url) => ({ type: "image_url", image_url: { url } }));
      const messages = [{ role: "user", content: [...images, { type: "text", text: "What is this?" }] }];
      const answer = await seeing.chat.completions.create({ model: "any", messages, max_tokens: 4, temperature: 0 });
      return answer.usage.prompt_tokens;
    };
    assert.ok((await ask(pictureURL)) > (await ask()) + 4);
  },
  async chat_failover() {
    const fields = { messages: [{ role: "user", content: story }], max_tokens: 120 };
    const whole = (await chat(fields)).choices[0].message.content;
    await killOfNextAnswer();
    assert.deepEqual(await streamed(fields), [whole]);
  },
  async text() {
    const whole = (await text({})).choices[0].text;
    assert.ok(whole);
    assert.equal((await all(await text({ stream: true }))).map((chunk) => chunk.choices[0].text).join(""), whole);
  },
  async text_many() {
    const drawn = { temperature: 0.8, seed: 1 };
    const answers = (await text({ prompt: ["One", "Two"], n: 2, ...drawn })).choices;
    assert.deepEqual(answers.map((choice) => choice.index), [0, 1, 2, 3]);
    assert.equal(answers[2].text, (await text({ prompt: "Two", ...drawn })).choices[0].text);
    assert.equal((await text({ prompt: [504, 216] })).usage.prompt_tokens, 2);
  },
  async text_echo() {
    assert.equal((await text({ echo: true })).choices[0].text, "The river Rhine" + (await text({})).choices[0].text);
  },
  async text_logprobs() {
    const choice = (await text({ logprobs: 2 })).choices[0];
    assert.equal(choice.logprobs.tokens.join(""), choice.text);
    assert.ok(choice.logprobs.top_logprobs.every((others) => Object.keys(others).length === 2));
  },
  async response() {
    const whole = (await response({})).output_text;
    const events = await all(await response({ stream: true }));
    const deltas = events.filter((event) => event.type === "response.output_text.delta").map((event) => event.delta);
    assert.equal(deltas.join(""), whole);
  },
  async response_previous() {
    const first = await response({});
    const second = await response({ input: "And then?", previous_response_id: first.id });
    assert.ok(second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens);
  },
  async response_background() {
    const started = await response({ background: true, max_output_tokens: 30 });
    const events = await all(await client.responses.retrieve(started.id, { stream: true }));
    const rest = await all(await client.responses.retrieve(started.id, { stream: true, starting_after: 5 }));
    assert.deepEqual(rest.map((e) => e.sequence_number), events.slice(6).map((e) => e.sequence_number));
    const long = await response({ background: true, max_output_tokens: 2000 });
    assert.equal((await client.responses.cancel(long.id)).status, "cancelled");
  },
  async response_tools() {
    const tools = [{ type: "function", strict: true, ...tool.function }];
    const first = await response({ tools, tool_choice: "required", max_output_tokens: 60 });
    const told = { type: "function_call_output", call_id: first.output[0].call_id, output: "sunny" };
    assert.ok((await response({ input: [told], previous_response_id: first.id })).output_text);
  },
  async response_schema() {
    const format = { type: "json_schema", name: "river", schema, strict: true };
    const answer = await response({ text: { format }, max_output_tokens: 60 });
    assert.deepEqual(Object.keys(JSON.parse(answer.output_text)), ["river", "length"]);
  },
  async response_forgotten() {
    const kept = await response({});
    await client.responses.delete(kept.id);
    await refused(client.responses.retrieve(kept.id), OpenAI.NotFoundError);
    assert.equal((await response({ store: false })).store, false);
  },
  async response_failover() {
    const whole = (await response({ max_output_tokens: 120 })).output_text;
    await killOfNextAnswer();
    const events = await all(await response({ max_output_tokens: 120, stream: true }));
    const deltas = events.filter((event) => event.type === "response.output_text.delta").map((event) => event.delta);
    assert.equal(deltas.join(""), whole);
  },
  async models() {
    const [model] = (await client.models.list()).data;
    assert.deepEqual(await client.models.retrieve(model.id), model);
  },
  async errors() {
    await assert.rejects(chat({ top_p: "much" }), (e) => e instanceof OpenAI.BadRequestError && e.param === "top_p");
    await refused(client.models.retrieve("none"), OpenAI.NotFoundError);
    const messages = [{ role: "user", content: "river ".repeat(9000) }];
    await assert.rejects(chat({ messages }), (error) => error.code === "context_length_exceeded");
    await assert.rejects(chat({ user: "x".repeat(49 << 20) }), (error) => error.status === 413);
  },
  async no_logit_bias() {
    for (const field of [{ logit_bias: { 5: 1 } }, { presence_penalty: 1 }, { frequency_penalty: 1 }]) await refused(chat(field));
  },
  async no_audio() {
    await refused(chat({ modalities: ["text", "audio"], audio: { voice: "alloy", format: "wav" } }));
  },
  async no_web() {
    const part = { type: "image_url", image_url: { url: "https://example.org/a.png" } };
    await refused(chat({ messages: [{ role: "user", content: [part] }] }));
  },
  async no_suffix() {
    for (const field of [{ suffix: "x" }, { best_of: 2 }, { echo: true, logprobs: 1 }]) await refused(text(field));
  },
  async no_hosted_tools() {
    await refused(response({ tools: [{ type: "web_search" }] }));
    await refused(response({ truncation: "auto" }));
  },
  async no_embeddings() {
    await refused(client.embeddings.create({ model: "any", input: "x" }));
  },
};

function tool_named(name) {
  return { type: "function", function: { name } };
}

for await (const feature of lines) {
  let error = null;
  try {
    await checks[feature]();
  } catch (caught) {
    error = `${caught.name}: ${caught.message}`.slice(0, 400);
  }
  console.log(JSON.stringify({ feature, error }));
}
