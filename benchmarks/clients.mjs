// One three-turn chat through a JavaScript client, for clients.py: writes each answer as a line of JSON.
const { url, model, key, max_tokens, questions, package: name, way } = JSON.parse(process.argv[2]);
const messages = [];
const say = (text) => console.log(JSON.stringify(text));

async function openai() {
  const { default: OpenAI } = await import("openai");
  const client = new OpenAI({ baseURL: url, apiKey: key });
  for (const content of questions) {
    messages.push({ role: "user", content });
    const body = { model, messages, max_tokens };
    const answer =
      way === "stream"
        ? await client.chat.completions.stream({ ...body, stream_options: { include_usage: true } }).finalChatCompletion()
        : await client.chat.completions.create(body);
    messages.push(answer.choices[0].message);
    say(answer.choices[0].message.content);
  }
}

async function ai() {
  const { generateText, streamText } = await import("ai");
  const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
  const provider = createOpenAICompatible({ name: "treadle", baseURL: url, apiKey: key });
  for (const content of questions) {
    messages.push({ role: "user", content });
    const asked = { model: provider(model), messages, maxOutputTokens: max_tokens, maxRetries: 0 };
    const answer = way === "streamText" ? streamText({ ...asked, onError: ({ error }) => { throw error; } }) : await generateText(asked);
    const text = await answer.text;
    messages.push(...(await answer.response).messages);
    say(text);
  }
}

await (name === "ai" ? ai() : openai());
