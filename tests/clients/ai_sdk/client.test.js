// The AI SDK's @ai-sdk/openai-compatible against a live Quire at QUIRE_URL. Run by test_ai_sdk.py.

import assert from "node:assert/strict";
import test from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, cosineSimilarity, embedMany, generateObject, generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const quire = createOpenAICompatible({
  name: "quire",
  baseURL: `${process.env.QUIRE_URL}/v1`,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = quire("demo");
const settings = { model, temperature: 0, maxOutputTokens: 200, maxRetries: 0 };

const weather = tool({
  description: "The weather of a city",
  inputSchema: z.object({ city: z.string().max(20), days: z.number().int().min(1).max(7) }),
  execute: async ({ city, days }) => `sunny in ${city} for ${days} days`,
});

test("generateText", async () => {
  const result = await generateText({ ...settings, system: "Answer briefly.", prompt: "Hello! Who are you?" });
  assert.match(result.text, /Quire/);
  assert.equal(result.finishReason, "stop");
  assert.equal(result.usage.totalTokens, result.usage.inputTokens + result.usage.outputTokens);
  assert.equal(result.response.modelId, "demo");
  assert.deepEqual(result.warnings, []);
});

test("streamText gives the same text in pieces, and the usage", async () => {
  const prompt = "Tell me a story about a fox.";
  const whole = await generateText({ ...settings, prompt });
  const result = streamText({ ...settings, prompt });
  const pieces = [];
  for await (const piece of result.textStream) pieces.push(piece);
  assert.ok(pieces.length > 1);
  assert.equal(pieces.join(""), whole.text);
  assert.deepEqual((await result.usage).outputTokens, whole.usage.outputTokens);
  assert.equal(await result.finishReason, whole.finishReason);
});

test("a conversation of several turns", async () => {
  const messages = [
    { role: "user", content: "My name is Judith." },
    { role: "assistant", content: "Nice to meet you, Judith!" },
    { role: "user", content: [{ type: "text", text: "What is my name?" }] },
  ];
  assert.match((await generateText({ ...settings, messages })).text, /Judith/);
});

test("sampling settings, stop texts and limits arrive", async () => {
  const sampling = { ...settings, temperature: 1, topP: 0.9, seed: 7, presencePenalty: 0.5, frequencyPenalty: 0.5 };
  const prompt = "Tell me a story about a cat.";
  const [first, second] = await Promise.all([generateText({ ...sampling, prompt }), generateText({ ...sampling, prompt })]);
  assert.equal(first.text, second.text);
  const short = await generateText({ ...settings, prompt, maxOutputTokens: 5 });
  assert.equal(short.finishReason, "length");
  assert.equal(short.usage.outputTokens, 5);
  const stopped = await generateText({ ...settings, prompt, stopSequences: ["."] });
  assert.ok(!stopped.text.includes("."));
  assert.equal(stopped.finishReason, "stop");
});

test("completion models", async () => {
  const result = await generateText({ ...settings, model: quire.completionModel("demo"), prompt: "One, two,", maxOutputTokens: 8 });
  assert.ok(result.text.length > 0);
  assert.ok(result.usage.outputTokens > 0);
});

test("embedMany", async () => {
  const values = ["a fox", "a fox", "sums"];
  const { embeddings, usage } = await embedMany({ model: quire.embeddingModel("demo"), values });
  assert.ok(cosineSimilarity(embeddings[0], embeddings[1]) > 0.999);
  assert.ok(cosineSimilarity(embeddings[0], embeddings[2]) < 0.99);
  assert.ok(usage.tokens > 3);
});

test("a stream that is aborted ends", async () => {
  const stop = new AbortController();
  const result = streamText({ ...settings, prompt: "Tell me a story about a dog.", abortSignal: stop.signal });
  const kinds = [];
  for await (const part of result.fullStream) {
    kinds.push(part.type);
    if (part.type === "text-delta") stop.abort();
  }
  assert.equal(kinds.at(-1), "abort");
});

test("errors are APICallErrors that say what is wrong", async () => {
  await assert.rejects(generateText({ ...settings, prompt: "Hi", temperature: -1 }), (error) => {
    assert.ok(APICallError.isInstance(error));
    assert.equal(error.statusCode, 400);
    assert.equal(error.isRetryable, false);
    assert.match(error.message, /temperature/);
    return true;
  });
  await assert.rejects(generateText({ ...settings, model: quire("other"), prompt: "Hi" }), { statusCode: 404 });
});

test("generateText with tools: calls are run and their results go back", async () => {
  const result = await generateText({
    ...settings,
    prompt: "What is the weather in Rome?",
    tools: { weather },
    providerOptions: { quire: { parallel_tool_calls: false } },
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
    stopWhen: stepCountIs(2),
  });
  const [step] = result.steps;
  assert.equal(step.finishReason, "tool-calls");
  assert.equal(step.toolCalls.length, 1);
  assert.ok(step.toolCalls[0].input.days >= 1 && step.toolCalls[0].input.days <= 7);
  assert.match(step.toolResults[0].output, /^sunny in/);
  assert.equal(result.steps.length, 2);
  assert.ok(result.text.length > 0);
});

test("streamText with a named tool", async () => {
  const choice = { toolChoice: { type: "tool", toolName: "weather" }, tools: { weather } };
  const result = streamText({ ...settings, prompt: "What is the weather in Rome?", ...choice });
  const kinds = new Set();
  for await (const part of result.fullStream) kinds.add(part.type);
  for (const kind of ["tool-input-start", "tool-input-delta", "tool-input-end", "tool-call", "tool-result"]) assert.ok(kinds.has(kind), kind);
  assert.equal((await result.toolCalls)[0].toolName, "weather");
});

const Person = z.object({ name: z.string().max(20), age: z.number().int().min(0).max(150), city: z.enum(["Rome", "Lima"]) });

test("generateObject and generateText with an output follow the schema", async () => {
  const prompt = "Turn this into JSON: Paula is 31 years old and lives in Lima.";
  const { object } = await generateObject({ ...settings, schema: Person, prompt });
  assert.equal(typeof Person.parse(object).age, "number");
  const { output } = await generateText({ ...settings, output: Output.object({ schema: Person }), prompt });
  Person.parse(output);
  const choice = await generateObject({ ...settings, output: "enum", enum: ["yes", "no"], prompt: "Is the sky blue?" });
  assert.ok(["yes", "no"].includes(choice.object));
  const plain = jsonSchema({ type: "object", properties: { a: { type: "boolean" } }, required: ["a"], additionalProperties: false });
  assert.equal(typeof (await generateObject({ ...settings, schema: plain, prompt })).object.a, "boolean");
});
