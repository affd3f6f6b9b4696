// @openai/agents against a scripted model behind Quire at QUIRE_URL. Run by test_agents.py.

import assert from "node:assert/strict";
import test from "node:test";
import { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, run, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";

setTracingDisabled(true);
const client = new OpenAI({ baseURL: `${process.env.QUIRE_URL}/v1`, apiKey: "none", maxRetries: 0 });

function agent(model, asked) {
  const weather = tool({
    name: "weather",
    description: "The weather of a city",
    parameters: z.object({ city: z.string(), days: z.number().int().min(1).max(7) }),
    execute: async ({ city, days }) => {
      asked.push([city, days]);
      return `sunny in ${city}`;
    },
  });
  const outputType = z.object({ city: z.string(), sunny: z.boolean() });
  return new Agent({ name: "demo", instructions: "Use tools.", model, tools: [weather], outputType });
}

for (const Model of [OpenAIResponsesModel, OpenAIChatCompletionsModel]) {
  for (const stream of [false, true]) {
    test(`${Model.name}, stream: ${stream}`, async () => {
      const asked = [];
      const result = await run(agent(new Model(client, "toy"), asked), "Weather in Rome?", { stream });
      if (stream) await result.completed;
      assert.deepEqual(asked, [["Rome", 2]]);
      assert.deepEqual(result.finalOutput, { city: "Rome", sunny: true });
    });
  }
}
