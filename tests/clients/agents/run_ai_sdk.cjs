// Asks the Vercel AI SDK for OpenAI's tools that clients run, whole and as streams.
// `node run_ai_sdk.cjs URL QUESTIONS`, which are an object in JSON: what to ask, by the tools' names. Prints what it was
// answered, and the changes of files that it was asked for.
"use strict";

const { execFileSync, execSync } = require("node:child_process");
const { createOpenAI } = require("@ai-sdk/openai");
const { generateText, stepCountIs, streamText } = require("ai");

const [url, questions] = process.argv.slice(2);
const { responses, tools } = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const changes = [];

function ran(command) {
  return { stdout: execSync(command).toString(), stderr: "", outcome: { type: "exit", exitCode: 0 } };
}

const TOOLS = {
  shell: tools.shell({ execute: async ({ action }) => ({ output: action.commands.map(ran) }) }),
  local_shell: tools.localShell({
    execute: async ({ action: { command: [program, ...rest] } }) => ({ output: execFileSync(program, rest).toString() }),
  }),
  apply_patch: tools.applyPatch({
    execute: async ({ operation }) => {
      changes.push(operation);
      return { status: "completed", output: `SAY(${operation.path} is changed)YAS` };
    },
  }),
};

async function main() {
  const answers = [];
  for (const [name, asked] of Object.entries(JSON.parse(questions))) {
    for (const prompt of asked) {
      const tool = { [name]: TOOLS[name] };
      const shared = { model: responses("scripted"), tools: tool, prompt, stopWhen: stepCountIs(3), maxRetries: 0 };
      answers.push((await generateText(shared)).text, await streamText(shared).text);
    }
  }
  console.log(JSON.stringify({ answers, changes }));
}

main();
