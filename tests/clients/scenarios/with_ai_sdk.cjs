// The Vercel AI SDK: `node with_ai_sdk.cjs URL` prints its results as JSON.
"use strict";

const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { generateObject, generateText, stepCountIs, streamText, tool } = require("ai");
const { z } = require("zod");

const QUESTION = "What is the weather in Paris?";
const HELLO = "Who are you?";
const Wheel = z.strictObject({ spokes: z.number().int().min(3).max(9), material: z.enum(["oak", "iron"]) });

async function main() {
  const provider = createOpenAICompatible({
    name: "tidewheel",
    baseURL: `${process.argv[2]}/v1`,
    apiKey: "none",
    supportsStructuredOutputs: true,
  });
  const shared = { model: provider("tidewheel-demo"), temperature: 0, maxOutputTokens: 200, maxRetries: 0 };
  const called = [];
  const get_weather = tool({
    description: "Get the weather of a city",
    inputSchema: z.object({ city: z.string() }),
    execute: async (input) => {
      called.push(input);
      return `It is sunny in ${input.city}.`;
    },
  });
  const answer = await generateText({ ...shared, prompt: QUESTION, tools: { get_weather }, stopWhen: stepCountIs(2) });
  const whole = await generateText({ ...shared, prompt: HELLO });
  let streamed = "";
  for await (const piece of streamText({ ...shared, prompt: HELLO }).textStream) streamed += piece;
  const { object } = await generateObject({ ...shared, prompt: "Invent a wheel.", schema: Wheel });
  const results = { called: called[0], answer: answer.text, whole: whole.text, streamed, structured: object };
  process.stdout.write(JSON.stringify(results));
}

main();
