"""From records to samples: compute, truncate, fold, replay rows, pick, merge (pipeline.md). Pure, linear in tokens."""
