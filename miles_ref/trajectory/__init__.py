"""What a session remembers of its turns: deltas only, and no I/O, clock or randomness (session-http.md).

`request` slices what a client sent, `linear` (v1) and `tree` (v2) find where it attaches, `turn` renders its prompt,
`node` holds what a committed turn added, `dump` rebuilds the records.

What is known by text. A conversation that goes on sends its whole history again, mostly byte for byte, and nothing of
it is to be parsed or compared twice:

- Believed is this: messages whose text is also the beginning of the request that became a node stand for the same
  stored messages as they did there. They agreed with them, or became them, when that node was attached; the same text
  has the same values, and each built-in matcher goes by values. A custom matcher is always asked (`Matching.by_text`).
- A reply is not: its text is the backend's. The client's replay of it is compared when it first comes, and is from then
  on part of the text of the node that follows.
- In order: `ChatRequest` cuts the body, without scanning what it shares with the last committed request (`Seen`; a
  hint, checked by its bytes). `linear` or `tree` measures how far the text goes along the paths (`common_text`) and
  says so (`MessageList.know` of `KnownEnds`) before any message is read; what lies beyond is parsed, and asked of the
  matcher. `commit` keeps of the text what the parent's does not have (`Node.text`, `Node.ends`).
"""
