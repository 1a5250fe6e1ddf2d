// What every page is.

import type { Stats } from "./types.js";

export interface Page {
  title: string;
  element: HTMLElement;
  /** Parameters of /v1/stats/stream; a page without them needs no statistics. */
  query?: () => Record<string, string>;
  update?: (stats: Stats) => void;
  /** The key is no operator's: it may not read the statistics. */
  refused?: () => void;
  close?: () => void;
}

/** Call `work` now and every `every_ms` while the page is visible; return what stops it. */
export function repeat(every_ms: number, work: () => Promise<void>): () => void {
  let timer = 0, stopped = false;
  const turn = async (): Promise<void> => {
    if (!document.hidden) await work();
    if (!stopped) timer = window.setTimeout(() => void turn(), every_ms);
  };
  void turn();
  return () => { stopped = true; window.clearTimeout(timer); };
}
