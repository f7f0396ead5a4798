// The JSON-lines protocol (docs/adapter-protocol.md): a case a line in, an observation a line out.

import { createInterface } from "node:readline";

import { assemble } from "./assemble.mjs";
import { decode } from "./decode.mjs";
import { parse, write } from "./number.mjs";
import { Refusal } from "./refusal.mjs";

const KINDS = ["assemble/v1", "decode"];

function observe(test) {
  try {
    return test.kind === "decode" ? decode(test.input, test.version) : assemble(test.input, test.config ?? {});
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    return { error: test.kind === "decode" ? "refused" : 422, message: error.message };
  }
}

function answer(said) {
  if ("hello" in said) return { hello: 1, name: "adapter-node", kinds: KINDS };
  const test = said.case;
  if ((test.config?.tokenizer ?? "bytes") !== "bytes") return { id: test.id, skip: "only the tokenizer bytes" };
  return { id: test.id, observed: observe(test) };
}

for await (const line of createInterface({ input: process.stdin })) {
  process.stdout.write(`${write(answer(parse(line, { floats: line.includes('"assemble"') })))}\n`);
}
