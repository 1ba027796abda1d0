// What only a live source can show; saved pages do not contain it.
import { experimentView } from "./experiment.js";
import { createWhy } from "./why.js";
import words from "./live_words.json" with { type: "json" };

export const LIVE = { experimentView, createWhy, words };
