"""The OpenAI-compatible HTTP application; see `app`."""
