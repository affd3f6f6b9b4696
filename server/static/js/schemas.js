// Checks of JSON schemas while they are typed. The server checks them again, and more.

const TYPES = ["string", "number", "integer", "boolean", "object", "array", "null"];
const SCHEMAS = ["items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else"];
const LISTS = ["anyOf", "oneOf", "allOf", "prefixItems"];
const MAPS = ["properties", "patternProperties", "$defs", "definitions"];

export const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

/** Parse JSON of a user. Throws an Error that says what is wrong. */
export function parseJSON(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`Not valid JSON: ${error.message}`);
  }
}

/** Throw an Error that says what is wrong with a JSON schema. `path`: names that lead to it. */
export function checkSchema(schema, path = []) {
  const fail = (what, ...names) => {
    throw new Error(`${[...path, ...names].join(".") || "The schema"}: ${what}`);
  };
  if (typeof schema === "boolean") return;
  if (!isObject(schema)) fail("must be an object");
  for (const type of [schema.type ?? []].flat()) {
    if (!TYPES.includes(type)) fail(`${JSON.stringify(type)} is none of ${TYPES.join(", ")}`, "type");
  }
  for (const name of ["enum", "required"]) if (name in schema && !Array.isArray(schema[name])) fail("must be a list", name);
  for (const name of SCHEMAS) if (name in schema) checkSchema(schema[name], [...path, name]);
  for (const name of LISTS) {
    if (name in schema && !Array.isArray(schema[name])) fail("must be a list", name);
    (schema[name] ?? []).forEach((each, index) => checkSchema(each, [...path, name, index]));
  }
  for (const name of MAPS) {
    if (name in schema && !isObject(schema[name])) fail("must be an object", name);
    for (const [key, each] of Object.entries(schema[name] ?? {})) checkSchema(each, [...path, name, key]);
  }
}
