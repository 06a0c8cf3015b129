// What applications do with the `openai` package: `node openai_scenarios.cjs` reads lines of JSON from stdin, each of
// which is [name of a scenario, client settings, arguments]. For each it prints a line: {"result"} or {"error"}.
"use strict";

const readline = require("node:readline");
const OpenAI = require("openai");
const { zodFunction, zodResponseFormat } = require("openai/helpers/zod");
const { z } = require("zod");

const Weather = z.object({ city: z.string(), days: z.number().int() });
const WEATHER_TOOL = {
  type: "function",
  function: {
    name: "Weather",
    description: "The weather of a city",
    parameters: {
      type: "object",
      properties: { city: { type: "string" }, days: { type: "integer" } },
      required: ["city", "days"],
    },
  },
};
const Mill = z.object({
  name: z.string().max(12),
  wheels: z.array(z.object({ spokes: z.number().int().min(3).max(9), material: z.enum(["oak", "iron"]) })).max(2),
  grinds: z.boolean().nullable(),
});

const describe = (error) => ({
  name: error.constructor.name,
  isApiError: error instanceof OpenAI.APIError,
  status: error.status,
  type: error.type,
  code: error.code,
  param: error.param,
  message: error.message,
});

async function failure(promise) {
  try {
    await promise;
  } catch (error) {
    return describe(error);
  }
  throw new Error("nothing failed");
}

const scenarios = {
  async chat(client, body) {
    const { data, response, request_id } = await client.chat.completions.create(body).withResponse();
    return { completion: data, status: response.status, requestId: request_id };
  },

  async stream(client, body) {
    const stream = await client.chat.completions.create({
      ...body,
      stream: true,
      stream_options: { include_usage: true },
    });
    let text = "";
    let usage;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    return { text, usage };
  },

  async streamHelper(client, body) {
    let text = "";
    const calls = [];
    const stream = client.chat.completions
      .stream({ ...body, tools: [zodFunction({ name: "Weather", parameters: Weather })] })
      .on("content", (delta) => (text += delta))
      .on("tool_calls.function.arguments.done", (call) => calls.push([call.index, call.name, call.parsed_arguments]));
    const completion = await stream.finalChatCompletion();
    return { text, calls, choice: completion.choices[0], usage: await stream.totalUsage() };
  },

  async runTools(client, { body, result }) {
    const asked = [];
    const weather = (args) => {
      asked.push(args);
      return result;
    };
    const tools = [{ type: "function", function: { ...WEATHER_TOOL.function, parse: JSON.parse, function: weather } }];
    const runner = client.chat.completions.runTools({ ...body, tools });
    const content = await runner.finalContent();
    return { asked, content, roles: runner.messages.map((message) => message.role) };
  },

  async parseTools(client, body) {
    const completion = await client.chat.completions.parse({
      ...body,
      tools: [zodFunction({ name: "Weather", parameters: Weather })],
    });
    return completion.choices[0].message.tool_calls.map((call) => call.function.parsed_arguments);
  },

  async parse(client, body) {
    const format = zodResponseFormat(Mill, "mill");
    const whole = await client.chat.completions.parse({ ...body, response_format: format });
    const streamed = await client.chat.completions.stream({ ...body, response_format: format }).finalChatCompletion();
    const { schema } = format.json_schema;
    const plain = await client.chat.completions.parse({
      ...body,
      response_format: { type: "json_schema", json_schema: { name: "mill", schema } },
    });
    return [whole, streamed, plain].map((completion) => Mill.parse(completion.choices[0].message.parsed));
  },

  async responses(client, body) {
    const tools = [{ type: "function", strict: false, name: "Weather", parameters: WEATHER_TOOL.function.parameters }];
    const first = await client.responses.create({ ...body, tools });
    const types = new Set();
    let text = "";
    const stream = client.responses
      .stream({ ...body, tools, previous_response_id: first.id })
      .on("event", (event) => types.add(event.type))
      .on("response.output_text.delta", (event) => (text += event.delta));
    const last = await stream.finalResponse();
    const { output_text: retrieved } = await client.responses.retrieve(first.id);
    return { whole: first.output_text, retrieved, text, output: last.output, status: last.status, types: [...types] };
  },

  async completions(client, body) {
    const whole = await client.completions.create(body);
    const streamed = body.prompt.map(() => "");
    for await (const chunk of await client.completions.create({ ...body, stream: true })) {
      for (const choice of chunk.choices) streamed[choice.index] += choice.text;
    }
    return { whole: whole.choices.map((choice) => choice.text), streamed };
  },

  async models(client) {
    const ids = [];
    for await (const model of client.models.list()) ids.push(model.id);
    return { ids, retrieved: (await client.models.retrieve(ids[0])).id };
  },

  async embeddings(client, body) {
    const byDefault = await client.embeddings.create(body);
    const asked = await client.embeddings.create({ ...body, encoding_format: "float" });
    return [byDefault, asked].map((answer) => answer.data.map((item) => item.embedding));
  },

  async errors(client, { body, broken }) {
    const read = async (stream) => {
      for await (const _ of await stream);
    };
    return {
      unknownModel: await failure(client.chat.completions.create({ ...body, model: "other" })),
      badParameter: await failure(client.chat.completions.create({ ...body, temperature: -1 })),
      badParameterOfAStream: await failure(client.chat.completions.create({ ...body, top_p: 2, stream: true })),
      badKey: await failure(client.withOptions({ apiKey: "wrong" }).models.list()),
      brokenStream: await failure(read(client.chat.completions.create({ ...broken, stream: true }))),
      brokenHelper: await failure(client.chat.completions.stream(broken).done()),
    };
  },

  async abort(client, body) {
    const controller = new AbortController();
    const bySignal = await client.chat.completions.create({ ...body, stream: true }, { signal: controller.signal });
    for await (const _ of bySignal) controller.abort(); // which ends the loop
    for await (const _ of await client.chat.completions.create({ ...body, stream: true })) break;
    const helper = client.chat.completions.stream(body);
    helper.on("chunk", () => helper.abort());
    return {
      helper: await failure(helper.done()),
      timeout: await failure(client.chat.completions.create(body, { timeout: 200 })),
    };
  },
};

async function main() {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const [name, settings, given] = JSON.parse(line);
    const said = await scenarios[name](new OpenAI(settings), given).then(
      (result) => ({ result }),
      (error) => ({ error: error.stack }),
    );
    process.stdout.write(`${JSON.stringify(said)}\n`);
  }
}

main();
