// What applications do with the `ollama` package: `node ollama_scenario.cjs HOST QUESTION CALL` prints it as JSON.
"use strict";

const { Ollama } = require("ollama");

async function main() {
  const [host, question, call] = process.argv.slice(2);
  const client = new Ollama({ host });
  const ask = (content, more) => client.chat({ model: "scripted", messages: [{ role: "user", content }], ...more });
  const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
  const tools = [{ type: "function", function: { name: "weather", description: "The weather", parameters } }];
  const whole = await ask(question);
  let streamed = "";
  for await (const part of await ask(question, { stream: true })) streamed += part.message.content;
  const { tool_calls } = (await ask(call, { tools })).message;
  const generated = await client.generate({ model: "scripted", prompt: question, options: { num_predict: 3 } });
  const failure = await ask(question, { model: "absent" }).catch((error) => error.message);
  const { models } = await client.list();
  const results = { whole: whole.message.content, took: whole.total_duration, streamed, tool_calls };
  const others = { generated: generated.response, failure, models: models.map((model) => model.name) };
  process.stdout.write(JSON.stringify({ ...results, ...others }));
}

main();
