"""One episode end to end, shown and proven: `miles-ref demo`."""

MOST_TURNS = 40
"""A conversation that has no end by then is given up; a task takes one turn more than it has steps."""
