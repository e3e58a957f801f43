// Three-turn chats through JavaScript clients, for chats.py, one for each line of stdin: writes each answer as a line of
// JSON, and an object at the end, with an "error" if it failed. In a way with "tools" each answer is a forced call, whose
// result goes back; the line has the call's argument.
import { createInterface } from "node:readline";

let url, root, model, key, max_tokens, questions, name, way, messages, tools, stream;
const TOOL_TOKENS = 200;
const RESULT = "3 in stock";
const parameters = {
  type: "object",
  properties: { part: { enum: ["shuttle", "reed"] } },
  required: ["part"],
  additionalProperties: false,
};
const order = { name: "order", description: "Order a spare part." };

function say(text) {
  if (typeof text !== "string") throw new TypeError(`an answer is ${JSON.stringify(text)} instead of a text`);
  console.log(JSON.stringify(text));
}

function sayCall(name, { part, ...others }) {
  const valid = name === order.name && parameters.properties.part.enum.includes(part) && !Object.keys(others).length;
  if (!valid) throw new TypeError(`the call is ${name}(${JSON.stringify({ part, ...others })})`);
  say(part);
}

async function openai() {
  const { default: OpenAI } = await import("openai");
  const client = new OpenAI({ baseURL: url, apiKey: key });
  for (const content of questions) {
    messages.push({ role: "user", content });
    await (way.startsWith("responses") ? response(client) : completion(client));
  }
}

async function response(client) {
  const forced = {
    max_output_tokens: TOOL_TOKENS,
    tools: [{ type: "function", ...order, parameters, strict: true }],
    tool_choice: { type: "function", name: order.name },
  };
  const body = { model, input: messages, max_output_tokens: max_tokens, ...(tools && forced) };
  const answer = stream ? await client.responses.stream(body).finalResponse() : await client.responses.create(body);
  messages.push(...answer.output.map(({ parsed, parsed_arguments, ...item }) => item));
  if (!tools) return say(answer.output_text);
  const call = answer.output.find(({ type }) => type === "function_call");
  messages.push({ type: "function_call_output", call_id: call.call_id, output: RESULT });
  sayCall(call.name, JSON.parse(call.arguments));
}

async function completion(client) {
  const forced = {
    max_tokens: TOOL_TOKENS,
    tools: [{ type: "function", function: { ...order, parameters } }],
    tool_choice: { type: "function", function: { name: order.name } },
  };
  const body = { model, messages, max_tokens, ...(tools && forced) };
  const answer = stream
    ? await client.chat.completions.stream({ ...body, stream_options: { include_usage: true } }).finalChatCompletion()
    : await client.chat.completions.create(body);
  const { message } = answer.choices[0];
  messages.push(message);
  if (!tools) return say(message.content);
  const [call] = message.tool_calls;
  messages.push({ role: "tool", tool_call_id: call.id, content: RESULT });
  sayCall(call.function.name, JSON.parse(call.function.arguments));
}

async function anthropic() {
  const { default: Anthropic } = await import("@anthropic-ai/sdk");
  const client = new Anthropic({ baseURL: root, apiKey: key });
  const forced = {
    max_tokens: TOOL_TOKENS,
    tools: [{ ...order, input_schema: parameters }],
    tool_choice: { type: "tool", name: order.name },
  };
  let result = [];
  for (const text of questions) {
    messages.push({ role: "user", content: [...result, { type: "text", text }] });
    const body = { model, messages, max_tokens, ...(tools && forced) };
    const answer = stream ? await client.messages.stream(body).finalMessage() : await client.messages.create(body);
    messages.push({ role: "assistant", content: answer.content });
    if (tools) {
      const call = answer.content.find(({ type }) => type === "tool_use");
      result = [{ type: "tool_result", tool_use_id: call.id, content: RESULT }];
      sayCall(call.name, call.input);
    } else {
      say(answer.content[0].text);
    }
  }
}

async function ollama() {
  const { Ollama } = await import("ollama");
  const client = new Ollama({ host: root });
  for (const content of questions) {
    messages.push({ role: "user", content });
    const body = { model, messages, options: { num_predict: max_tokens } };
    let text = "";
    if (stream) {
      for await (const part of await client.chat({ ...body, stream: true })) text += part.message.content;
      messages.push({ role: "assistant", content: text });
    } else {
      const answer = await client.chat(body);
      text = answer.message.content;
      messages.push(answer.message);
    }
    say(text);
  }
}

async function languageModel() {
  if (way.endsWith("anthropic")) {
    const { createAnthropic } = await import("@ai-sdk/anthropic");
    return createAnthropic({ baseURL: url, apiKey: key })(model);
  }
  if (way.endsWith("openai")) {
    const { createOpenAI } = await import("@ai-sdk/openai");
    return createOpenAI({ baseURL: url, apiKey: key }).responses(model);
  }
  const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
  return createOpenAICompatible({ name: "treadle", baseURL: url, apiKey: key })(model);
}

async function ai() {
  const { generateText, streamText } = await import("ai");
  const chosen = await languageModel();
  for (const content of questions) {
    messages.push({ role: "user", content });
    const request = { model: chosen, messages, maxOutputTokens: max_tokens, maxRetries: 0 };
    const answer = way.startsWith("streamText")
      ? streamText({ ...request, onError: ({ error }) => { throw error; } })
      : await generateText(request);
    const text = await answer.text;
    messages.push(...(await answer.response).messages);
    say(text);
  }
}

function fail(error) {
  console.log(JSON.stringify({ error: String(error) }));
  process.exit(1);
}

process.on("uncaughtException", fail);
for await (const line of createInterface({ input: process.stdin })) {
  ({ url, root, model, key, max_tokens, questions, package: name, way } = JSON.parse(line));
  [messages, tools, stream] = [[], way.endsWith("tools"), way.includes("stream")];
  await { openai, "@anthropic-ai/sdk": anthropic, ollama, ai }[name]().catch(fail);
  console.log("{}");
}
