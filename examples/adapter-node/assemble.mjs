// Linear sessions (v1): records -> compute -> truncate -> fold -> sample (pipeline.md).

import { Float, isInteger, isObject, same } from "./number.mjs";
import { Refusal } from "./refusal.mjs";
import { cut as cutRows, rows } from "./replay.mjs";
import { decode } from "./text.mjs";

const STATUSES = { stop: "completed", tool_calls: "completed", length: "truncated", abort: "aborted" };
const SPEC = ["spec_accept_token_num", "spec_draft_token_num", "spec_verify_ct", "completion_tokens"];
const SET_ASIDE = ["lifecycle", "messages", "opd_student_top_logprobs"];

const number = (value) => (value instanceof Float ? value.value : value);

export function assemble(input, config) {
  const { records } = input;
  if (!records.length) return { samples: [], empty_reason: "no_records" };
  const turns = records.map((_, at) => compute(records, at, input.accumulated_token_ids ?? null, config));
  checkTopk(turns, "routed_experts");
  checkTopk(turns, "indexer_topk");
  const kept = truncate(turns, input.max_seq_len ?? null);
  if (!kept.length) return { samples: [], empty_reason: "all_truncated" };
  const folded = kept.slice(1).reduce((left, right) => (left.ended ? left : join(left, right)), kept[0]);
  if (config.routed_experts && config.additional_r3) folded.routed_experts = additional(records, config, folded.tokens.length);
  return { samples: [sample(folded)], empty_reason: null };
}

// compute

function compute(records, at, accumulated, config) {
  const record = records[at];
  const where = `turn ${at}`;
  const prompt = record.request.input_ids;
  if (!Array.isArray(prompt)) throw new Refusal(`${where}: request.input_ids is absent`);
  const choice = record.response.choices?.[0];
  const meta = choice?.meta_info;
  if (!isObject(meta)) throw new Refusal(`${where}: choices[0].meta_info is absent`);
  if (!Array.isArray(meta.output_token_logprobs)) throw new Refusal(`${where}: output_token_logprobs is absent`);
  const output = meta.output_token_logprobs.map((entry) => entry[1]);
  const logProbs = meta.output_token_logprobs.map((entry) => logProb(entry[0], where));
  const last = at === records.length - 1;
  const trim = trimmed(prompt, output, accumulated, last, config.max_trim_tokens ?? 0, where);
  const length = output.length - trim;
  const status = STATUSES[choice.finish_reason];
  if (typeof choice.finish_reason !== "string" || !Object.hasOwn(STATUSES, choice.finish_reason)) {
    throw new Refusal(`${where}: finish_reason ${JSON.stringify(choice.finish_reason ?? null)} is not known`);
  }
  const turn = {
    tokens: [...prompt, ...output.slice(0, length)],
    output: output.slice(0, length),
    response: decode(output.slice(0, length)),
    response_length: length,
    loss_mask: Array(length).fill(1),
    rollout_log_probs: logProbs.slice(0, length),
    status,
    weight_versions: version(meta.weight_version),
    cache: [number(meta.cached_tokens) ?? 0, number(meta.prompt_tokens) ?? 0],
    spec: SPEC.map((key) => (config.speculative ? number(meta[key]) ?? 0 : 0)),
    metadata: { lifecycle: lifecycle(record, records[at - 1], meta, at) },
    routed_experts: null,
    indexer_topk: null,
  };
  if (last && config.debug_messages) turn.metadata.messages = [...(record.request.messages ?? []), choice.message];
  const count = prompt.length + output.length - 1;
  if (config.routed_experts && !config.additional_r3 && meta.routed_experts != null) {
    const all = rows(meta.routed_experts, Math.max(0, count), config.num_layers ?? 0, config.moe_router_topk ?? 0, `${where}: routed_experts`);
    turn.routed_experts = cutRows(all, Math.max(0, all.shape[0] - trim));
  }
  if (config.indexer_topk && meta.indexer_topk != null) {
    if (!isInteger(meta.indexer_topk_num_layers)) throw new Refusal(`${where}: indexer_topk_num_layers is absent`);
    const all = rows(meta.indexer_topk, Math.max(0, count), meta.indexer_topk_num_layers, 0, `${where}: indexer_topk`);
    turn.indexer_topk = cutRows(all, Math.max(0, all.shape[0] - trim));
  }
  return turn;
}

function logProb(item, where) {
  const value = item === "-inf" ? -Infinity : number(item);
  if (typeof value !== "number" || Number.isNaN(value) || value === Infinity) {
    throw new Refusal(`${where}: a log prob in output_token_logprobs is ${item === null ? "null" : item}`);
  }
  return value;
}

function trimmed(prompt, output, accumulated, last, limit, where) {
  if (accumulated === null) return 0;
  const rest = accumulated.slice(prompt.length);
  let matched = 0;
  while (matched < output.length && matched < rest.length && output[matched] === rest[matched]) matched++;
  const trim = output.length - matched;
  const allowed = last ? 0 : limit;
  if (trim > allowed) {
    throw new Refusal(`${where}: trim ${trim}, allowed ${allowed}: [${output.slice(matched).join(", ")}] against [${rest.slice(matched, matched + trim).join(", ")}]`);
  }
  if (last && prompt.length + matched !== accumulated.length) {
    throw new Refusal(`${where}: ends at ${prompt.length + matched}, accumulated ids at ${accumulated.length}`);
  }
  return trim;
}

function version(value) {
  if (value == null) return [];
  if (value instanceof Float && Number.isInteger(value.value)) return [`${value.value}.0`];
  return [String(number(value))];
}

function lifecycle(record, previous, meta, at) {
  const end = number(record.timestamp);
  const latency = number(meta.e2e_latency);
  const life = { t0: latency == null ? null : end - latency, t1: end, turn: at + 1 };
  if (record.request_timestamp != null) life.req_ts = record.request_timestamp;
  if (previous) life.prev_t1 = previous.timestamp;
  return life;
}

function checkTopk(turns, field) {
  const seen = new Set(turns.filter((turn) => turn[field]?.shape[0]).map((turn) => turn[field].shape[2]));
  if (seen.size > 1) throw new Refusal(`${field}: topk differs between turns: ${[...seen].join(", ")}`);
}

// truncate

function truncate(turns, budget) {
  if (budget === null) return turns;
  const first = turns.findIndex((turn) => turn.tokens.length > budget);
  if (first < 0) return turns;
  const turn = turns[first];
  const over = turn.tokens.length - budget;
  const kept = turns.slice(0, first);
  return turn.response_length - over >= 1 ? [...kept, shorten(turn, over)] : kept;
}

function shorten(turn, over) {
  const left = turn.response_length - over;
  const fewer = (block) => block && cutRows(block, Math.max(0, block.shape[0] - over));
  return {
    ...turn,
    tokens: turn.tokens.slice(0, -over),
    output: turn.output.slice(0, left),
    response: decode(turn.output.slice(0, left)),
    response_length: left,
    loss_mask: turn.loss_mask.slice(0, left),
    rollout_log_probs: turn.rollout_log_probs.slice(0, left),
    routed_experts: fewer(turn.routed_experts),
    indexer_topk: fewer(turn.indexer_topk),
    status: "truncated",
  };
}

// fold

function join(left, right) {
  const loses = (field) => left[field] !== null && right[field] === null;
  if (left.status !== "completed" || loses("routed_experts") || loses("indexer_topk")) return { ...left, ended: true };
  const length = left.tokens.length;
  if (!left.tokens.every((token, at) => right.tokens[at] === token)) {
    throw new Refusal(`fold: a turn of ${right.tokens.length} tokens does not start with the ${length} before it`);
  }
  const seen = right.tokens.length - length - right.response_length;
  if (seen <= 0) throw new Refusal(`fold: ${seen} observation tokens`);
  const rest = (metadata) => Object.fromEntries(Object.entries(metadata).filter(([key]) => !SET_ASIDE.includes(key)));
  if (!same(rest(left.metadata), rest(right.metadata))) throw new Refusal("fold: metadata differ");
  const before = left.metadata.lifecycle;
  return {
    ...right,
    response: left.response + decode(right.tokens.slice(length, length + seen)) + right.response,
    response_length: left.response_length + seen + right.response_length,
    loss_mask: [...left.loss_mask, ...Array(seen).fill(0), ...right.loss_mask],
    rollout_log_probs: [...left.rollout_log_probs, ...Array(seen).fill(0), ...right.rollout_log_probs],
    weight_versions: [...left.weight_versions, ...right.weight_versions],
    cache: left.cache.map((value, at) => value + right.cache[at]),
    spec: left.spec.map((value, at) => value + right.spec[at]),
    metadata: { ...right.metadata, lifecycle: [...(Array.isArray(before) ? before : [before]), right.metadata.lifecycle] },
  };
}

// additional replay rows

function additional(records, config, length) {
  const metas = records.map((record) => record.response.choices[0].meta_info);
  if (metas.every((meta) => meta.routed_experts == null)) return null;
  const needed = Math.max(0, length - 1);
  const layers = config.num_layers ?? 0;
  let topk = config.moe_router_topk ?? 0;
  let covered = 0;
  let data = [];
  records.forEach((record, at) => {
    const where = `turn ${at}: routed_experts`;
    const start = record.request.routed_experts_start_len;
    if (!isInteger(start) || start !== covered) throw new Refusal(`${where}_start_len is ${start}, covered are ${covered}`);
    const end = record.request.input_ids.length + metas[at].output_token_logprobs.length - 1;
    if (end < start) throw new Refusal(`${where}: starts at ${start}, ends at ${end}`);
    const present = metas[at].routed_experts != null;
    if (present !== end > start) throw new Refusal(`${where}: ${present ? "a" : "no"} payload from ${start} to ${end}`);
    covered = end;
    if (start >= needed || end === start) return;
    const patch = rows(metas[at].routed_experts, end - start, layers, topk, where);
    topk = patch.shape[2];
    data = [...data, ...patch.data];
  });
  if (data.length < needed * layers * topk) throw new Refusal(`routed_experts: ${needed} rows needed, ${data.length / (layers * topk)} there`);
  return cutRows({ dtype: "int32", shape: [needed, layers, topk], data }, needed);
}

function sample(turn) {
  return {
    tokens: turn.tokens,
    response: turn.response,
    response_length: turn.response_length,
    loss_mask: turn.loss_mask,
    rollout_log_probs: turn.rollout_log_probs,
    rollout_routed_experts: turn.routed_experts,
    rollout_indexer_topk: turn.indexer_topk,
    status: turn.status,
    weight_versions: turn.weight_versions,
    prefix_cache_info: { cached_tokens: turn.cache[0], total_prompt_tokens: turn.cache[1] },
    metadata: turn.metadata,
  };
}
