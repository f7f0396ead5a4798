// Replay rows: base64 of little-endian int32, one row a token but the last (pipeline.md, compute and additional rows).

import { Refusal } from "./refusal.mjs";

const BASE64 = /^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$/;

/** Rows as {dtype, shape, data}; `topk` 0 means that it is recovered from the size. */
export function rows(text, count, layers, topk, where) {
  const values = int32(text, where);
  const cell = count * layers;
  if (cell === 0) {
    if (values.length) throw new Refusal(`${where}: ${values.length} values where no row is expected`);
    return array([0, layers, topk], []);
  }
  const found = topk || values.length / cell;
  if (!Number.isInteger(found) || found < 1 || values.length !== cell * found) {
    throw new Refusal(`${where}: ${values.length} values do not make ${count} rows of ${layers} layers and topk ${topk || "?"}`);
  }
  return array([count, layers, found], values);
}

export function int32(text, where) {
  if (typeof text !== "string" || !BASE64.test(text)) throw new Refusal(`${where}: not base64`);
  const bytes = Buffer.from(text, "base64");
  if (bytes.toString("base64") !== text) throw new Refusal(`${where}: base64 with stray bits`);
  if (bytes.length % 4) throw new Refusal(`${where}: ${bytes.length} bytes are no int32 values`);
  return Array.from({ length: bytes.length / 4 }, (_, at) => bytes.readInt32LE(at * 4));
}

export const array = (shape, data) => ({ dtype: "int32", shape, data });

/** The first `count` rows. */
export function cut(block, count) {
  const [, layers, topk] = block.shape;
  return array([count, layers, topk], block.data.slice(0, count * layers * topk));
}
