// What the server answers; docs/api.md has the meaning of each field.

export const PARTS = ["queue", "adapter", "kv", "prefill"] as const;
export type Part = (typeof PARTS)[number];
export const KINDS = ["kv_running", "kv_cached", "adapters", "inflight", "free"] as const;
export type Kind = (typeof KINDS)[number];

export interface Percentiles { count: number; mean: number; p50: number; p90: number; p99: number; max: number }
export type Tier = Record<Kind | "total", number>;
export interface Memory { device: Tier; host: Tier }

export interface Adapter {
  name: string; is_base: boolean; digest: string | null; rank: number | null; tier: "device" | "host" | "files";
  device_bytes: number; pinned?: boolean; requests: number; requests_per_s: number; requests_running: number;
  requests_unanswered: number; oldest_unanswered_s: number; requests_failed: number; requests_aborted: number;
  requests_refused: number; prompt_tokens: number; cached_tokens: number; generation_tokens: number; hits: number;
  misses: number; ttft_s: Percentiles | null; parts_s: Record<Part, number> | null; itl_s: Percentiles | null;
  slowness_s: number; queue_s: Record<string, number>; saved_s: Record<string, number>; loads: number;
  latest_load_s: number | null; load_error: string | null; why: string;
}

export interface Ended {
  request_id: string; ended_ago_s: number; finish_reason: string; input_tokens: number; output_tokens: number;
  ttft_s: number | null; parts_s: Record<Part, number>; itl_s: number | null; itl_max_s: number | null; e2e_s: number;
  hit: boolean | null;
}

export interface AdapterDetails extends Adapter {
  errors: { unix_s: number; request_id: string | null; message: string }[];
  recent: Ended[];
}

export interface Card {
  name: string; digest: string; source: string; base: string; created: number; rank: number; weight_bytes: number;
  loaded: boolean; level: string | null; device_bytes: number; pinned: boolean;
  owner?: string;
  /** These are for its owner and the operator, once it is loaded. */
  also_named?: string[]; replicas?: string[]; stats?: AdapterDetails;
}

export interface Sample {
  unix_s: number; generation_tokens_per_s: number; requests_per_s: number; running: number; waiting: number;
  memory: Memory;
}

export interface Stats {
  /** A router knows of no memory, hits and parts of TTFT. */
  is_router?: boolean;
  unix_s: number; uptime_s: number; version: string; model: string; status: string; recent_s: number;
  requests: {
    accepted: number; running: number; waiting: number; waiting_by: Record<string, number>;
    waiting_words: Record<string, string>; finished: number; failed: number; aborted: number;
  };
  per_s: { requests: number; prompt_tokens: number; generation_tokens: number };
  ttft_s: Percentiles | null; parts_s: Record<Part, number> | null; itl_s: Percentiles | null;
  hits: Record<string, number>; preemptions: number; memory: Memory; adapters_total: number;
  adapters_matching: number; adapters: Adapter[]; history_every_s?: number; history?: Sample[];
}

export interface Replica {
  id: string; pid: number | null; address: string; alive: boolean; is_open: boolean; restarts: number;
  running: number; waiting: number; resident: string[]; held: number; held_bytes: number; memory_used: number | null;
  links: Record<string, { transfers: number; bytes: number; failed: number; busy_s: number }>; trouble: string;
}

export interface Cluster {
  replicas: Replica[]; unrouted: number; epoch: number; shares: Record<string, Record<string, number>>;
  moves: number; wanted: number | null;
}

export interface SequenceSummary {
  id: string; status: string; adapter: string | null; arrival_unix_s: number; input_tokens: number;
  cached_tokens: number; queue_s: number | null; waited_for: string; adapter_wait_s: number; kv_wait_s: number;
  ttft_s: number | null; preemptions: number; saved_s: Record<string, number>; finish_reason?: string;
  output_tokens?: number; e2e_s?: number; error?: string;
}

export interface Sequence extends SequenceSummary {
  decisions: { after_s: number; mechanism: string; saved_s: number; why: string }[];
}
