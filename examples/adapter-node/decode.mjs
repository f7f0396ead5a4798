// The samples payload: a safetensors container, checked, and laid over the input sample (wire.md, Decode).

import { Malformed, isInteger, isObject, parse, same } from "./number.mjs";
import { Refusal } from "./refusal.mjs";

const META = "_samples_meta";
const TENSORS = {
  tokens: ["I64", 1],
  loss_mask: ["U8", 1],
  rollout_log_probs: ["F64", 1],
  rollout_routed_experts: ["I32", 3],
  rollout_indexer_topk: ["I32", 3],
};
const FIELDS = ["response", "response_length", "status", "weight_versions", "prefix_cache_info", "metadata"];
const STATUSES = ["pending", "completed", "truncated", "aborted", "failed"];
const WIDTHS = { BOOL: 1, U8: 1, I8: 1, F8_E4M3: 1, F8_E5M2: 1, I16: 2, U16: 2, F16: 2, BF16: 2, I32: 4, U32: 4, F32: 4, I64: 8, U64: 8, F64: 8, C64: 8 };
const CACHE = { cached_tokens: 0, total_prompt_tokens: 0 };
const SPEC = { spec_accept_token_num: 0, spec_draft_token_num: 0, spec_verify_ct: 0, completion_token_num: 0 };
const DEFAULTS = {
  group_index: null, index: null, rollout_id: null, prompt: "", tokens: [], multimodal_inputs: null,
  multimodal_train_inputs: null, response: "", response_length: 0, label: null, reward: null, loss_mask: null,
  weight_versions: [], rollout_log_probs: null, rollout_routed_experts: null, rollout_indexer_topk: null,
  remove_sample: false, teacher_log_probs: null, opd_reverse_kl: null, status: "pending", metadata: {},
  generate_function_path: null, train_metadata: null, adapter: null, reward_spec: null, routing_key: null,
  non_generation_time: 0, spec_info: SPEC, prefix_cache_info: CACHE,
};
const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

export function decode(input, versionName) {
  const tensors = container(Buffer.from(input.payload, "base64"));
  const meta = readMeta(tensors);
  const fields = versionName === "v2" ? [...FIELDS, "reward"] : FIELDS;
  meta.samples.forEach((entry, at) => checkEntry(entry, fields, at));
  checkNames(tensors, meta.samples);
  const wires = meta.samples.map((entry, at) => wireSample(entry, tensors, fields, at));
  const whole = { ...DEFAULTS, ...input.input_sample };
  if (wires.length) checkDefaults(whole);
  return {
    samples: wires.map((wire) => overlay(whole, wire)),
    session_metadata: meta.session_metadata,
    empty_reason: meta.empty_reason,
  };
}

function json(bytes, what) {
  try {
    return parse(utf8.decode(bytes));
  } catch (error) {
    if (error instanceof Malformed || error instanceof TypeError || error instanceof RangeError) {
      throw new Refusal(`${what} is not JSON: ${error.message}`);
    }
    throw error;
  }
}

function container(payload) {
  if (payload.length < 8) throw new Refusal("not a safetensors file: it is shorter than 8 bytes");
  const size = payload.readBigUInt64LE(0);
  if (size > BigInt(payload.length - 8)) throw new Refusal("not a safetensors file: the header is longer than the file");
  const start = 8 + Number(size);
  const header = json(payload.subarray(8, start), "the safetensors header");
  if (!isObject(header)) throw new Refusal("not a safetensors file: the header is no object");
  const data = payload.subarray(start);
  const tensors = {};
  const texts = Object.hasOwn(header, "__metadata__") ? header.__metadata__ : {};
  if (!isObject(texts) || Object.values(texts).some((value) => typeof value !== "string")) {
    throw new Refusal("not a safetensors file: __metadata__ is no object of texts");
  }
  for (const [name, info] of Object.entries(header)) if (name !== "__metadata__") tensors[name] = tensor(info, data);
  let end = 0;
  for (const one of Object.values(tensors).sort((a, b) => a.from - b.from || a.to - b.to)) {
    if (one.from !== end) throw new Refusal("not a safetensors file: tensors overlap or leave a hole");
    end = one.to;
  }
  if (end !== data.length) throw new Refusal("not a safetensors file: bytes follow the last tensor");
  return tensors;
}

function tensor(info, data) {
  const counts = (value) => Array.isArray(value) && value.every((item) => Number.isInteger(item) && item >= 0);
  const known = isObject(info) && Object.keys(info).sort().join() === "data_offsets,dtype,shape";
  if (!known || !Object.hasOwn(WIDTHS, info.dtype) || !counts(info.shape) || !counts(info.data_offsets) || info.data_offsets.length !== 2) {
    throw new Refusal("not a safetensors file: a tensor is not described by dtype, shape and data_offsets");
  }
  const [from, to] = info.data_offsets;
  const size = info.shape.reduce((product, dimension) => product * BigInt(dimension), BigInt(WIDTHS[info.dtype]));
  const largest = info.shape.reduce((product, dimension) => product * BigInt(dimension || 1), BigInt(WIDTHS[info.dtype]));
  if (largest >= 2n ** 63n) throw new Refusal("not a safetensors file: a shape beyond any memory");
  if (BigInt(to - from) !== size || to > data.length) throw new Refusal("not a safetensors file: offsets and shape disagree");
  return { dtype: info.dtype, shape: info.shape, from, to, raw: data.subarray(from, to) };
}

function readMeta(tensors) {
  const found = tensors[META];
  if (!found || found.dtype !== "U8" || found.shape.length !== 1) throw new Refusal(`${META} is absent, or not rank-1 uint8`);
  const meta = json(found.raw, META);
  if (!isObject(meta)) throw new Refusal(`${META} is no object`);
  for (const key of ["samples", "session_metadata", "empty_reason"]) if (!(key in meta)) throw new Refusal(`${META} has no ${key}`);
  if (!Array.isArray(meta.samples)) throw new Refusal(`${META}: samples is no list`);
  if (!isObject(meta.session_metadata)) throw new Refusal(`${META}: session_metadata is no object`);
  if (![null, "no_records", "all_truncated"].includes(meta.empty_reason)) throw new Refusal(`${META}: empty_reason ${meta.empty_reason}`);
  return meta;
}

function checkEntry(entry, fields, at) {
  if (!isObject(entry)) throw new Refusal(`sample ${at} is no object`);
  for (const field of [...fields, "nulls"]) if (!(field in entry)) throw new Refusal(`sample ${at} has no ${field}`);
  const texts = (value) => Array.isArray(value) && value.every((item) => typeof item === "string");
  const right = {
    response: typeof entry.response === "string",
    response_length: isInteger(entry.response_length) && entry.response_length >= 0,
    status: STATUSES.includes(entry.status),
    weight_versions: texts(entry.weight_versions),
    prefix_cache_info: isObject(entry.prefix_cache_info) && Object.keys(CACHE).every((key) => isInteger(entry.prefix_cache_info[key])),
    metadata: isObject(entry.metadata),
    nulls: texts(entry.nulls) && entry.nulls.every((field) => Object.hasOwn(TENSORS, field)),
  };
  for (const [field, good] of Object.entries(right)) if (!good) throw new Refusal(`sample ${at}: ${field} is not of its form: ${JSON.stringify(entry[field], (_, v) => (typeof v === "bigint" ? String(v) : v))}`);
}

function checkNames(tensors, entries) {
  const promised = entries.flatMap((entry, at) => Object.keys(TENSORS).filter((field) => !entry.nulls.includes(field)).map((field) => `${field}.${at}`));
  for (const name of promised) if (!(name in tensors)) throw new Refusal(`tensor ${name} is missing`);
  for (const name of Object.keys(tensors)) if (name !== META && !promised.includes(name)) throw new Refusal(`tensor ${name} belongs to no sample`);
}

function wireSample(entry, tensors, fields, at) {
  const wire = Object.fromEntries(fields.map((field) => [field, entry[field]]));
  wire.prefix_cache_info = Object.fromEntries(Object.keys(CACHE).map((key) => [key, entry.prefix_cache_info[key]]));
  for (const field of Object.keys(TENSORS)) {
    wire[field] = entry.nulls.includes(field) ? (field === "tokens" ? [] : null) : values(tensors[`${field}.${at}`], field, at);
  }
  for (const field of ["loss_mask", "rollout_log_probs"]) {
    if (wire[field] !== null && wire[field].length !== wire.response_length) {
      throw new Refusal(`sample ${at}: ${field} has ${wire[field].length} entries, response_length is ${wire.response_length}`);
    }
  }
  if (wire.response_length > wire.tokens.length) throw new Refusal(`sample ${at}: response_length ${wire.response_length} is over ${wire.tokens.length} tokens`);
  return wire;
}

function values({ dtype, shape, raw }, field, at) {
  const [wanted, rank] = TENSORS[field];
  if (dtype !== wanted || shape.length !== rank) throw new Refusal(`sample ${at}: ${field} is ${dtype} of rank ${shape.length}, not ${wanted} of rank ${rank}`);
  const read = {
    I64: (index) => { const value = raw.readBigInt64LE(index * 8); return Number.isSafeInteger(Number(value)) ? Number(value) : value; },
    U8: (index) => raw[index],
    F64: (index) => raw.readDoubleLE(index * 8),
    I32: (index) => raw.readInt32LE(index * 4),
  }[dtype];
  const data = Array.from({ length: raw.length / WIDTHS[dtype] }, (_, index) => read(index));
  return rank === 3 ? { dtype: "int32", shape, data } : data;
}

function checkDefaults(whole) {
  const wanted = { weight_versions: [], prefix_cache_info: CACHE, spec_info: SPEC, teacher_log_probs: null, opd_reverse_kl: null };
  for (const [field, value] of Object.entries(wanted)) {
    if (!same(whole[field], value)) throw new Refusal(`the input sample's ${field} is not at its default: ${JSON.stringify(whole[field])}`);
  }
  if (whole.metadata !== null && !isObject(whole.metadata)) throw new Refusal("the input sample's metadata is no object");
  if ("opd_student_top_logprobs" in (whole.metadata ?? {})) throw new Refusal("the input sample's metadata has opd_student_top_logprobs");
}

function overlay(whole, wire) {
  const { metadata, reward, ...rest } = wire;
  const merged = { ...whole, ...rest, metadata: { ...whole.metadata, ...metadata } };
  if (reward != null) merged.reward = reward;
  return merged;
}
