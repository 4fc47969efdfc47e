// Every route of this server as its OpenAPI description has it. Nothing here is markup that came from elsewhere.
"use strict";

const METHODS = ["get", "post", "put", "patch", "delete"];

function element(tag, text, ...children) {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

/** A schema's type in words: "string or null", "list of ToolCall". */
function worded(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  const ways = schema.anyOf || schema.oneOf;
  if (ways) return [...new Set(ways.map(worded))].join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (schema.type === "array") return `list of ${worded(schema.items || {})}`;
  return schema.format === "binary" ? "file" : schema.type || "anything";
}

function table(fields) {
  const rows = fields.map(([name, type, text]) =>
    element("tr", "", element("th", name), element("td", type), element("td", text || "")));
  for (const row of rows) row.firstChild.scope = "row";
  const made = element("table", "", element("tbody", "", ...rows));
  made.className = "fields";
  return element("div", "", made);
}

function fieldsOf(schema) {
  const required = schema.required || [];
  return Object.entries(schema.properties || {}).map(([name, field]) =>
    [name, worded(field) + (required.includes(name) ? ", required" : ""), field.description]);
}

function operation(path, method, said, schemas) {
  const section = element("section", "", element("h2", `${method.toUpperCase()} ${path}`));
  section.append(element("p", said.description || said.summary));
  const parameters = (said.parameters || []).filter((one) => one.in !== "header");
  if (parameters.length) {
    section.append(table(parameters.map((one) => [one.name, `${worded(one.schema)}, in the ${one.in}`, one.description])));
  }
  for (const [kind, content] of Object.entries(said.requestBody?.content || {})) {
    const name = content.schema.$ref && worded(content.schema);
    section.append(element("h3", `Body, ${kind}`), table(fieldsOf(name ? schemas[name] : content.schema)));
  }
  const answers = Object.entries(said.responses).map(([status, answer]) => {
    const kinds = Object.values(answer.content || {}).map((content) => worded(content.schema || {}));
    return [status, kinds.join(" or "), answer.description];
  });
  section.append(element("h3", "Answers"), table(answers));
  return section;
}

async function show() {
  const said = await (await fetch("openapi.json")).json();
  const main = document.getElementById("main");
  const schemas = said.components.schemas;
  for (const [path, methods] of Object.entries(said.paths)) {
    for (const method of METHODS.filter((one) => methods[one])) {
      main.append(operation(path, method, methods[method], schemas));
    }
  }
  main.append(element("h2", "Objects"));
  for (const [name, schema] of Object.entries(schemas)) {
    main.append(element("section", "", element("h3", name), element("p", schema.description || ""), table(fieldsOf(schema))));
  }
}

show().catch((error) => {
  const problem = document.getElementById("problem");
  problem.textContent = `The description can't be read: ${error.message}`;
  problem.hidden = false;
});
