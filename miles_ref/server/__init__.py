"""The session server: turns, records and samples of agent sessions over HTTP (session-http.md)."""
