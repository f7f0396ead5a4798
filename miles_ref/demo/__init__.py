"""One episode end to end, shown and proven: `miles-ref demo`."""
