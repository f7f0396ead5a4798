// JSON with exact integers: those beyond 2^53 become BigInt, and 1.0 stays apart from 1 where that can be seen.
// JavaScript's own reader would round a token id of 2^53 + 1 without a word.

export class Malformed extends Error {}

const SPACE = /[ \t\n\r]*/y;
const NUMBER = /-?(?:0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?/y;
const TEXT = /"(?:[^"\\\u0000-\u001f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"/y;

/** A float as it was written, so that 1.0 is not taken for an integer. */
export class Float {
  constructor(value) { this.value = value; }
  toJSON() { return this.value; }
}

export function parse(text, { floats = false } = {}) {
  let at = 0;
  const match = (pattern) => {
    pattern.lastIndex = at;
    const found = pattern.exec(text);
    if (found) at = pattern.lastIndex;
    return found;
  };
  const fail = (what) => { throw new Malformed(`${what} at character ${at}`); };
  const expect = (word) => {
    if (!text.startsWith(word, at)) fail(`expected ${word}`);
    at += word.length;
  };
  const skip = () => { match(SPACE); };
  const string = () => {
    const found = match(TEXT) ?? fail("not a text");
    return JSON.parse(found[0]);
  };
  const number = () => {
    const found = match(NUMBER) ?? fail("not a value");
    if (found[1] || found[2]) return floats ? new Float(Number(found[0])) : Number(found[0]);
    const value = Number(found[0]);
    return Number.isSafeInteger(value) ? value : BigInt(found[0]);
  };
  const list = () => {
    expect("[");
    const items = [];
    skip();
    if (text[at] === "]") { at++; return items; }
    for (;;) {
      items.push(value());
      skip();
      if (text[at] === "]") { at++; return items; }
      expect(",");
    }
  };
  const object = () => {
    expect("{");
    const members = Object.create(null);
    skip();
    if (text[at] === "}") { at++; return members; }
    for (;;) {
      skip();
      const key = string();
      skip();
      expect(":");
      members[key] = value();
      skip();
      if (text[at] === "}") { at++; return members; }
      expect(",");
    }
  };
  const value = () => {
    skip();
    switch (text[at]) {
      case "{": return object();
      case "[": return list();
      case '"': return string();
      case "t": expect("true"); return true;
      case "f": expect("false"); return false;
      case "n": expect("null"); return null;
      default: return number();
    }
  };
  const result = value();
  skip();
  if (at !== text.length) fail("more after the value");
  return result;
}

/** JSON text of a value, BigInt as an integer, minus infinity as the text that cases use. */
export function write(value) {
  if (typeof value === "bigint") return value.toString();
  if (value instanceof Float) return write(value.value);
  if (value === -Infinity) return '"-inf"';
  if (Array.isArray(value)) return `[${value.map(write).join(",")}]`;
  if (value !== null && typeof value === "object") {
    const members = Object.entries(value).filter(([, item]) => item !== undefined);
    return `{${members.map(([key, item]) => `${JSON.stringify(key)}:${write(item)}`).join(",")}}`;
  }
  return JSON.stringify(value);
}

export const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value) && !(value instanceof Float);

export const isInteger = (value) => typeof value === "bigint" || Number.isInteger(value);

/** Equality of JSON values: numbers by value, true is not 1, the order of keys does not count. */
export function same(one, other) {
  if (one instanceof Float) one = one.value;
  if (other instanceof Float) other = other.value;
  if (Array.isArray(one) && Array.isArray(other)) {
    return one.length === other.length && one.every((item, at) => same(item, other[at]));
  }
  if (isObject(one) && isObject(other)) {
    const keys = Object.keys(one);
    return keys.length === Object.keys(other).length && keys.every((key) => key in other && same(one[key], other[key]));
  }
  if (["number", "bigint"].includes(typeof one) && ["number", "bigint"].includes(typeof other)) return one == other;
  return one === other;
}
