"""What a session remembers of its turns: deltas only, and no I/O, clock or randomness (session-http.md).

`request` slices what a client sent, `linear` (v1) and `tree` (v2) find where it attaches, `turn` renders its prompt,
`node` holds what a committed turn added, `dump` rebuilds the records.
"""
