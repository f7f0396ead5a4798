"""Text and token ids: tokenizers, rendering with token reuse, matching of messages, the mismatch report.

Contract: tokens.md; session-http.md, "Matching messages". Pure but for loading a tokenizer's files.
"""
