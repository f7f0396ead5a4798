"""Tests talk to loopback only: the libraries shall not ask a model hub. The kit's plugin comes by its entry point."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
