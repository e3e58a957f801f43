// One three-turn chat through a JavaScript client, for chats.py: writes each answer as a line of JSON.
const { url, root, model, key, max_tokens, questions, package: name, way } = JSON.parse(process.argv[2]);
const messages = [];
const say = (text) => console.log(JSON.stringify(text));

async function openai() {
  const { default: OpenAI } = await import("openai");
  const client = new OpenAI({ baseURL: url, apiKey: key });
  for (const content of questions) {
    messages.push({ role: "user", content });
    if (way.startsWith("responses")) {
      const body = { model, input: messages, max_output_tokens: max_tokens };
      const answer = way.endsWith("stream")
        ? await client.responses.stream(body).finalResponse()
        : await client.responses.create(body);
      messages.push(...answer.output.map(({ parsed, ...item }) => item));
      say(answer.output_text);
      continue;
    }
    const body = { model, messages, max_tokens };
    const answer =
      way === "stream"
        ? await client.chat.completions.stream({ ...body, stream_options: { include_usage: true } }).finalChatCompletion()
        : await client.chat.completions.create(body);
    messages.push(answer.choices[0].message);
    say(answer.choices[0].message.content);
  }
}

async function anthropic() {
  const { default: Anthropic } = await import("@anthropic-ai/sdk");
  const client = new Anthropic({ baseURL: root, apiKey: key });
  for (const content of questions) {
    messages.push({ role: "user", content });
    const body = { model, messages, max_tokens };
    const answer = way === "stream" ? await client.messages.stream(body).finalMessage() : await client.messages.create(body);
    messages.push({ role: "assistant", content: answer.content });
    say(answer.content[0].text);
  }
}

async function ollama() {
  const { Ollama } = await import("ollama");
  const client = new Ollama({ host: root });
  for (const content of questions) {
    messages.push({ role: "user", content });
    const body = { model, messages, options: { num_predict: max_tokens } };
    let text = "";
    if (way === "stream") {
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

await { openai, "@anthropic-ai/sdk": anthropic, ollama, ai }[name]();
