// Shows openapi.json: endpoints, their parameters and responses, and a curl command to try.

const REF = "#/components/schemas/";
const LIMITS = {
  minimum: "at least", exclusiveMinimum: "above", maximum: "at most", exclusiveMaximum: "below",
  minLength: "characters, at least", maxLength: "characters, at most",
  minItems: "entries, at least", maxItems: "entries, at most",
};

let schemas = {};

function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

function resolve(schema) {
  return schema.$ref ? schemas[schema.$ref.slice(REF.length)] : schema;
}

const isNull = (schema) => schema.type === "null";

function typeName(schema) {
  if (schema.$ref) return schema.$ref.slice(REF.length);
  const either = schema.anyOf ?? schema.oneOf;
  if (either) return [...new Set(either.filter((part) => !isNull(part)).map(typeName))].join(" or ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of (${typeName(schema.items ?? {})})`.replace(/\(([\w.]+)\)$/, "$1");
  return schema.type ?? "anything";
}

// The structs that a field's value may be, which a reader may want to unfold.
function structs(schema) {
  if (schema.$ref) return [schema.$ref.slice(REF.length)];
  return [...(schema.anyOf ?? schema.oneOf ?? []), ...(schema.items ? [schema.items] : [])].flatMap(structs);
}

function limits(schema) {
  return [schema, ...(schema.anyOf ?? [])].flatMap((part) =>
    Object.entries(LIMITS).filter(([key]) => key in part).map(([key, words]) => `${words} ${part[key]}`)).join(", ");
}

function field(name, schema, isRequired) {
  const line = [element("code", "", name), " ", element("span", "type", typeName(schema))];
  if (isRequired) line.push(" ", element("span", "required", "required"));
  const allowed = limits(schema);
  if (allowed) line.push(" ", element("span", "limits", allowed));
  if (schema.default !== undefined && schema.default !== null && typeof schema.default !== "object") {
    line.push(" ", element("span", "limits", `default ${JSON.stringify(schema.default)}`));
  }
  const inside = [...new Set(structs(schema))];
  if (!inside.length) return element("div", "field", ...line);
  return element("div", "field", unfolding(line, () => inside.flatMap((each) => {
    const body = [describe(schemas[each])];
    return inside.length > 1 ? [element("h3", "", each), ...body] : body;
  })));
}

// Filled when it is first opened, because structs may contain themselves.
function unfolding(summary, fill) {
  const details = element("details", "", element("summary", "", ...summary));
  details.addEventListener("toggle", () => {
    if (details.open && details.childElementCount === 1) details.append(...fill());
  });
  return details;
}

function describe(schema) {
  const shown = resolve(schema);
  const box = element("div", "fields");
  if (shown.description) box.append(element("p", "description", shown.description));
  const required = new Set(shown.required ?? []);
  const names = Object.keys(shown.properties ?? {});
  for (const name of [...names.filter((n) => required.has(n)), ...names.filter((n) => !required.has(n))]) {
    box.append(field(name, shown.properties[name], required.has(name)));
  }
  if (!shown.properties) box.append(element("p", "type", typeName(shown)));
  return box;
}

function curl(base, method, path, operation) {
  const parts = [`curl ${base}${path}`];
  if (method !== "get" && method !== "post") parts[0] += ` -X ${method.toUpperCase()}`;
  if (operation.security) parts.push('-H "Authorization: Bearer $API_KEY"');
  const example = operation.requestBody?.content["application/json"].example;
  if (example) {
    parts.push('-H "Content-Type: application/json"');
    parts.push(`-d '${JSON.stringify(example).replaceAll("'", "'\\''")}'`);
  } else if (method === "post") {
    parts[0] += " -X POST";
  }
  return parts.join(" \\\n  ");
}

function section(base, path, method, operation) {
  const heading = element("h2", "", element("span", "method", method.toUpperCase()), " ", element("code", "", path));
  const shown = element("section", "", heading, element("p", "summary", operation.summary));
  shown.id = operation.operationId;
  shown.append(element("h3", "", "Try it"), element("pre", "", curl(base, method, path, operation)));
  if (operation.parameters) {
    const rows = operation.parameters.map((each) => field(each.name, each.schema, each.required));
    shown.append(element("h3", "", "In the address"), element("div", "fields", ...rows));
  }
  if (operation.requestBody) {
    shown.append(unfolding(["Body"], () => [describe(operation.requestBody.content["application/json"].schema)]));
  }
  for (const [status, response] of Object.entries(operation.responses)) {
    for (const [kind, content] of Object.entries(response.content ?? {})) {
      const title = status === "default" ? "Error" : kind === "text/event-stream" ? "Event of a stream" : "Answer";
      shown.append(unfolding([title], () => [describe(content.schema)]));
    }
  }
  return shown;
}

async function show() {
  const main = document.getElementById("operations");
  try {
    const response = await fetch("openapi.json");
    if (!response.ok) throw new Error(`HTTP ${response.status}`);
    const api = await response.json();
    schemas = api.components.schemas;
    const base = new URL(".", location.href).href.replace(/\/$/, "");
    document.getElementById("about").prepend(`${api.info.version}. `);
    for (const [path, methods] of Object.entries(api.paths)) {
      for (const [method, operation] of Object.entries(methods)) {
        main.append(section(base, path, method, operation));
      }
      const link = element("a", "", path);
      link.href = `#${Object.values(methods)[0].operationId}`;
      document.getElementById("index").append(link);
    }
    if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
  } catch (error) {
    main.append(element("p", "error", `openapi.json cannot be shown: ${error.message}`));
  }
  main.removeAttribute("aria-busy");
}

show();
