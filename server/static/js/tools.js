// The demonstration tools, which run in the page: a clock and a calculator.
import { checkSchema, isObject, parseJSON } from "./schemas.js";

const NAME = /^[\w-]{1,64}$/;
const DEMONSTRATION = {
  get_time: {
    description: "The present date and time.",
    parameters: {
      type: "object",
      properties: { time_zone: { type: "string", description: "An IANA time zone such as Europe/Berlin." } },
    },
    run: ({ time_zone: timeZone }) =>
      new Intl.DateTimeFormat("en-GB", { dateStyle: "full", timeStyle: "long", ...(timeZone ? { timeZone } : {}) }).format(),
  },
  calculate: {
    description: "The value of an arithmetic expression of numbers, + - * / ^, parentheses, and sqrt(x).",
    parameters: {
      type: "object",
      properties: { expression: { type: "string", description: "For instance (17 + 25) * 3" } },
      required: ["expression"],
    },
    run: ({ expression }) => String(calculate(String(expression))),
  },
};

/** Return a conversation's tools in the API's format. Throws an Error if the user's tools are invalid. */
export function toolsOf(settings) {
  const builtIn = Object.entries(settings.demoTools ? DEMONSTRATION : {}).map(([name, { description, parameters }]) => ({
    type: "function",
    function: { name, description, parameters },
  }));
  return [...builtIn, ...parseTools(settings.tools ?? "")];
}

/** Parse tools from JSON: a list in the API's format, or of bare functions. Throws an Error with the reason. */
export function parseTools(text) {
  if (text.trim() === "") return [];
  const given = [parseJSON(text)].flat();
  const tools = given.map((tool) => (tool?.function ? tool : { type: "function", function: tool }));
  tools.forEach(({ function: tool }, index) => {
    const { name, parameters = {} } = isObject(tool) ? tool : {};
    if (typeof name !== "string" || !NAME.test(name)) throw new Error(`Tool ${index + 1} needs a "name" of letters, digits, _ and -`);
    if (tools.findIndex((each) => each.function.name === name) < index) throw new Error(`Two tools have the name ${name}`);
    checkSchema(parameters, [name, "parameters"]);
  });
  return tools;
}

/** Return the result of a demonstration tool's call, or null if the user must enter it. */
export function resultOf(call, settings) {
  if (!settings.demoTools || !Object.hasOwn(DEMONSTRATION, call.name)) return null;
  try {
    return DEMONSTRATION[call.name].run(JSON.parse(call.arguments || "{}"));
  } catch (error) {
    return `Error: ${error.message}`;
  }
}

/** Evaluate an arithmetic expression by recursive descent. Throws an Error that says what is wrong. */
export function calculate(text) {
  const tokens = text.match(/\d+\.?\d*(?:e[+-]?\d+)?|\.\d+|sqrt|\*\*|[-+*/^()]|\S/gi) ?? [];
  let at = 0;
  const take = (...wanted) => (wanted.includes(tokens[at]) ? tokens[at++] : null);
  const sum = () => {
    let value = product();
    for (let sign; (sign = take("+", "-")); ) value = sign === "+" ? value + product() : value - product();
    return value;
  };
  const product = () => {
    let value = signed();
    for (let sign; (sign = take("*", "/")); ) value = sign === "*" ? value * signed() : value / signed();
    return value;
  };
  const signed = () => (take("-") ? -signed() : take("+") ? signed() : power());
  const power = () => {
    const base = atom();
    return take("^", "**") ? base ** signed() : base;
  };
  const atom = () => {
    const root = take("sqrt");
    if (take("(")) {
      const value = sum();
      if (!take(")")) throw new Error("a parenthesis is not closed");
      return root ? Math.sqrt(value) : value;
    }
    const value = Number(tokens[at] ?? NaN);
    if (root || Number.isNaN(value)) throw new Error(`cannot read ${tokens[at] ?? "the end"}`);
    at += 1;
    return value;
  };
  const value = sum();
  if (at < tokens.length) throw new Error(`cannot read ${tokens[at]}`);
  return value;
}
