// What requests wait for, in the words of the server.

import type { Stats } from "./types.js";

let words: Record<string, string> = {};

export function learnWords(stats: Stats): void { words = stats.requests.waiting_words; }
export function waitsFor(cause: string): string { return words[cause] ?? cause.replaceAll("_", " "); }
