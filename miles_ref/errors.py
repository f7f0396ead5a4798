"""The errors of the project. Each says whose fault it is by its HTTP status (session-http.md, "Errors")."""

from __future__ import annotations


class MilesRefError(Exception):
    """Base of every error that this package raises on purpose.

    `status_code` is what the session server answers when the error leaves a request handler.
    """

    status_code: int = 500


class SessionNotFoundError(MilesRefError):
    """The session id is unknown, or the session is closing (404)."""

    status_code = 404


class SessionExpiredError(MilesRefError):
    """The session was dropped because nobody used it for its time to live (410)."""

    status_code = 410


class MessageValidationError(MilesRefError):
    """The client's request cannot be taken: form, messages, roles, tools or template (400)."""

    status_code = 400


class TruncatedGenerationError(MilesRefError):
    """The request extends a generation that ended with finish_reason length (409)."""

    status_code = 409


class BudgetExceededError(MilesRefError):
    """A budget of the server is used up (413 for bytes, 429 for sessions); what is stored stays."""

    def __init__(self, message: str, status_code: int = 413) -> None:
        super().__init__(message)
        self.status_code = status_code


class TokenizationError(MilesRefError):
    """A token invariant is broken: the session's tokens would no longer be what the model saw (500)."""

    status_code = 500


class MatcherError(MilesRefError):
    """A custom message matcher raised, or returned something that is not a bool (500)."""

    status_code = 500


class UpstreamResponseError(MilesRefError):
    """The backend's reply cannot be used, or the backend cannot be reached (502)."""

    status_code = 502


class GenerationAbortedError(MilesRefError):
    """The backend ended the generation with finish_reason abort; a client may try again (503)."""

    status_code = 503


class AssemblyError(MilesRefError):
    """A deterministic failure to turn records into samples (422): the same records fail again.

    The message names the turn (0-based), the field and the values (pipeline.md, introduction).
    """

    status_code = 422


class FieldError(MilesRefError, ValueError):
    """A value of a record or a reply breaks a rule. Each edge says whose fault it is: 422 of records, 502 of replies.

    `field` names the value as the protocol does.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field} {message}")
        self.field = field


class PluginError(AssemblyError):
    """A plugin's hook broke its contract or raised (422); names plugin, distribution, version, hook, file, line."""


class PluginLoadError(MilesRefError):
    """A plugin cannot be used: it is missing, async, or has a wrong signature. Raised at start-up."""


class EncodeError(AssemblyError):
    """A sample cannot be written losslessly (wire.md, Encode); names the sample, the field and the value."""


class DecodeError(MilesRefError, ValueError):
    """A samples payload is malformed, or the input sample is not at its defaults (wire.md, Decode)."""


class CaseError(MilesRefError):
    """A case file is not of the format of cases.md: unknown key, duplicate id, wrong type."""


class UsageError(MilesRefError):
    """Flags or settings that contradict each other; the message says which and what to do."""


def described(error: BaseException) -> str:
    """`Type: message` of an error that somebody else's code raised, also where the message cannot be had."""
    try:
        words = str(error)
    except BaseException:  # It is their code too, and must not end this process.
        words = "an error that cannot be shown"
    return f"{type(error).__name__}: {words}"
