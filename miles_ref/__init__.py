"""miles_ref: the reference for session serving and server-side sample assembly in agentic RL."""

__version__ = "0.1.0"
