// What an agent does with the openai npm package; prints what came of it as JSON.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const ask = [{ role: "user", content: "Please call the tool that reads pyproject.toml" }];
const tools = [
  {
    type: "function",
    function: {
      name: "read_file",
      parameters: { type: "object", properties: { path: { type: "string" } }, required: ["path"] },
    },
  },
];
const hello = [{ role: "user", content: "Hello" }];
const result = {};

result.models = [];
for await (const model of client.models.list()) result.models.push(model.id);

const whole = await client.chat.completions.create({ model: "sim", messages: hello, max_tokens: 16 });
result.whole = whole.choices[0].message.content;

const stream = await client.chat.completions.create({
  model: "sim", messages: hello, max_tokens: 24, stream: true, stream_options: { include_usage: true },
});
result.streamed = "";
for await (const chunk of stream) {
  result.streamed += chunk.choices[0]?.delta?.content ?? "";
  if (chunk.usage) result.completion_tokens = chunk.usage.completion_tokens;
}

const called = await client.chat.completions.create({ model: "sim", messages: ask, tools });
const call = called.choices[0].message.tool_calls[0].function;
result.tool = { name: call.name, arguments: call.arguments };

const final = await client.chat.completions.stream({ model: "sim", messages: ask, tools }).finalChatCompletion();
const streamedCall = final.choices[0].message.tool_calls[0].function;
result.streamed_tool = { name: streamedCall.name, arguments: streamedCall.arguments };

try {
  await client.chat.completions.create({ model: "unknown", messages: hello });
} catch (error) {
  result.error = { class: error.constructor.name, code: error.code };
}
console.log(JSON.stringify(result));
